"""`diloco experiment`: the options reach the program that it becomes."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from diloco_cli import worlds
from diloco_cli.__main__ import app


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of the programs that would have been started."""
    found: list[list[str]] = []
    monkeypatch.setattr(worlds.os, "execv", lambda program, argv: found.append(argv))
    return found


def test_the_options_reach_the_program(started):
    CliRunner().invoke(app, ["experiment", "study.yaml"])
    CliRunner().invoke(app, ["experiment", "study.yaml", "--dir", "here", "--jobs", "3"])
    first = [sys.executable, "-m", "diloco_experiment", "study.yaml"]
    assert started == [first, [*first, "--dir=here", "--jobs=3"]]


def test_less_than_one_cell_at_a_time_is_refused(started):
    assert CliRunner().invoke(app, ["experiment", "study.yaml", "--jobs", "0"]).exit_code == 2
    assert not started


def test_without_torch_the_message_names_what_to_install(started, monkeypatch):
    monkeypatch.setattr(worlds, "find_spec", lambda name: None if name == "torch" else object())
    found = CliRunner().invoke(app, ["experiment", "study.yaml"])
    assert "diloco[local]" in str(found.exception)
    assert not started
