"""What the processes of a local run inherit from the user's shell."""

import ast
import re
from pathlib import Path

import diloco_syncer.settings
import diloco_worker.settings
from diloco_local.settings import OURS, Settings

MEANT = {"DILOCO_FAULTS": "faults are injected into a local run from the shell"}
"""Variables that do reach the processes, with the reason."""


def read_by(module) -> set[str]:
    """The variables that a settings module reads, by the calls of its `Environment`."""
    tree = ast.parse(Path(module.__file__).read_text())
    return {
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if ast.unparse(call.func.value) == "env" and call.args
        if isinstance(call.args[0], ast.Constant) and re.fullmatch("[A-Z_]+", call.args[0].value)
    }


def test_no_variable_that_learners_or_the_syncer_read_comes_from_the_users_shell():
    read = read_by(diloco_worker.settings) | read_by(diloco_syncer.settings)
    assert {"DILOCO_SYNCER", "DILOCO_SPEC", "DILOCO_LISTEN", "RANK"} <= read, "not all was found"
    assert read - MEANT.keys() <= set(OURS)


def test_a_proxy_of_the_shell_does_not_reach_the_learners(monkeypatch):
    monkeypatch.setenv("DILOCO_SYNCER_PROXY", "http://proxy:3128")
    monkeypatch.setenv("DILOCO_FAULTS", "upload:nan")
    monkeypatch.setenv("MINE", "1")
    inherited = Settings.from_environment().environment
    assert "DILOCO_SYNCER_PROXY" not in inherited
    assert (inherited["DILOCO_FAULTS"], inherited["MINE"]) == ("upload:nan", "1")
