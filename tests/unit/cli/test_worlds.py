"""`diloco sim`: the options reach the program that it becomes, whose exit code and signals are its own."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from diloco_cli import worlds
from diloco_cli.__main__ import app


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    """The exit code, and the command line of the program that would have been started."""
    started: list[str] = []
    monkeypatch.setattr(worlds.os, "execv", lambda program, argv: started.extend(argv))
    return CliRunner().invoke(app, ["sim", *arguments]).exit_code, started


def test_the_options_reach_the_simulator(monkeypatch):
    _, argv = command(monkeypatch, "--seed", "3")
    assert argv == [sys.executable, "-m", "diloco_sim", "--seed=3", "--steps=100", "--jobs=1"]
    _, argv = command(monkeypatch, "--seeds", "3..9", "--steps", "40", "--jobs", "2", "--shrink")
    assert argv[3:] == ["--seeds=3..9", "--steps=40", "--jobs=2", "--shrink"]


@pytest.mark.parametrize("arguments", [[], ["--seed", "1", "--seeds", "1..2"]])
def test_exactly_one_of_seed_and_seeds_is_needed(monkeypatch, arguments):
    code, argv = command(monkeypatch, *arguments)
    assert (code != 0, argv) == (True, [])
