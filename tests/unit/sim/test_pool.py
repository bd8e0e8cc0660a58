"""The processes that run worlds side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diloco_testing.local.fake_run import alive, until

pytestmark = pytest.mark.slow  # processes that import the cores


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.timeout(600)
def test_the_processes_of_a_simulator_that_is_killed_end():
    argv = [sys.executable, "-m", "diloco_sim", "--seeds=1..1000000", "--jobs=2"]
    program = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    started: list[int] = []
    try:
        # Two that run worlds, and the one that multiprocessing has for its resources.
        until(lambda: len(children(program.pid)) == 3, "processes", seconds=240)
        started += children(program.pid)
        program.kill()
        program.wait()
        until(lambda: not any(map(alive, started)), "end of the processes", seconds=120)
    finally:
        program.kill()
        program.wait()
        for pid in filter(alive, started):
            subprocess.run(["kill", "-9", str(pid)], check=False)
