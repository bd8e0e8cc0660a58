"""`diloco sim`: options and exit codes of the command that runs simulated worlds in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from diloco.errors import EXIT_USAGE
from diloco_cli import worlds
from diloco_cli.__main__ import app


class Simulator:
    """What the command starts, without starting it."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.argv: list[str] = []

    def run(self, argv: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        self.argv = argv
        return subprocess.CompletedProcess(argv, self.code)


def command(monkeypatch: pytest.MonkeyPatch, code: int, *arguments: str) -> tuple[int, list[str]]:
    simulator = Simulator(code)
    monkeypatch.setattr(worlds.subprocess, "run", simulator.run)
    return CliRunner().invoke(app, ["sim", *arguments]).exit_code, simulator.argv


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (1, 1), (EXIT_USAGE, EXIT_USAGE), (-9, 1)],
    ids=["promises kept", "a promise broken", "wrong options", "killed"],
)  # fmt: skip
def test_the_exit_code_shows_whether_a_promise_was_broken(monkeypatch, code, expected):
    assert command(monkeypatch, code, "--seed", "3")[0] == expected


def test_the_options_reach_the_simulator(monkeypatch):
    _, argv = command(monkeypatch, 0, "--seed", "3")
    assert argv == [sys.executable, "-m", "diloco_sim", "--seed=3", "--steps=100", "--jobs=1"]
    _, argv = command(monkeypatch, 1, "--seeds", "3..9", "--steps", "40", "--jobs", "2", "--shrink")
    assert argv[3:] == ["--seeds=3..9", "--steps=40", "--jobs=2", "--shrink"]


@pytest.mark.parametrize("arguments", [[], ["--seed", "1", "--seeds", "1..2"]])
def test_exactly_one_of_seed_and_seeds_is_needed(monkeypatch, arguments):
    code, argv = command(monkeypatch, 0, *arguments)
    assert (code != 0, argv) == (True, [])
