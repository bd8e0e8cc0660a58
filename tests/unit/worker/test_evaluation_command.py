"""What the evaluator keeps of its user's command, and when it kills it."""

from __future__ import annotations

import os
import textwrap
import tracemalloc

import pytest

from diloco_worker import evaluator
from diloco_worker.evaluator import CommandScorer, NoScoreError


def command(body):
    return CommandScorer(command=("python", "-c", textwrap.dedent(body)))


def test_only_the_end_of_what_a_command_prints_is_kept():
    body = """
        import sys
        for _ in range(2048):
            print(16384 * "x")
            print(16384 * "y", file=sys.stderr)
        print('{"loss": 1.5}')
        """
    tracemalloc.start()
    try:
        assert command(body)({}) == {"loss": 1.5}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20  # of the 64 MiB printed


def test_a_command_that_takes_too_long_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "_COMMAND_SECONDS", 2.0)
    path = tmp_path / "pid"
    body = f"""
        import os, pathlib, time
        pathlib.Path({str(path)!r}).write_text(str(os.getpid()))
        time.sleep(600)
        """
    with pytest.raises(NoScoreError, match="timed out after 2"):
        command(body)({})
    if path.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
