"""`diloco run` as a real process tree, as a user starts it: its files, its processes, its end."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from diloco_testing.machine import slowdown

CLI = [sys.executable, "-m", "diloco_cli"]

# Slowed down so that four learners on two cores do not wait for a core: tests measure which learner
# waits for which, not the scheduler.
TINY = {
    "slowdown": 3,
    "layers": 2,
    "width": 64,
    "heads": 2,
    "context": 64,
    "batch": 8,
    "data": "stdlib",
}

TORCHRUN = """
import json, os, sys

ranks = json.loads(os.environ["DILOCO_CONFIG"])["ranks"]
torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv[1:]])
"""
"""A program that starts the one in its arguments in as many ranks as `regions[].config.ranks` states."""


def manifest(name: str, *, steps: int, learners: int = 4, **spec: Any) -> dict[str, Any]:
    """A small text job: half of the learners in each of two regions."""
    config = spec.pop("config", TINY)
    body = {
        "steps": steps,
        "seed": 7,
        "sync": {"fragments": 8, "interval": 8, **spec.pop("sync", {})},
        "learner": {"recipe": {"name": "gpt", "config": config},
                    "checkpoint": {"everySteps": 100, "keep": 2}},
        "regions": [{"name": "eu", "learners": (learners + 1) // 2},
                    {"name": "us", "learners": learners // 2}],
        "syncer": {"checkpoint": {"everySteps": 16, "keep": 3}},
        "evaluation": {"everySteps": 40},
        **spec,
    }  # fmt: skip
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": name},
        "spec": body,
    }


class LocalRun:
    """One `diloco run`; call `stop` in a finally."""

    def __init__(self, folder: Path, job: dict[str, Any], **popen: Any) -> None:
        self.dir = folder / "run"
        self.job = folder / "job.yaml"
        self.job.write_text(yaml.safe_dump(job))
        self.output = folder / "output.txt"
        self._popen = popen
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start (again)."""
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [*CLI, "run", str(self.job), "--dir", str(self.dir)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                **self._popen,
            )
        return self.process

    def stop(self) -> None:
        """End what still runs; SIGKILL of the supervisor kills its processes too."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)

    def wait(self, seconds: float) -> int:
        """
        Exit code; AssertionError with the output's end when it takes longer.

        Args:
            seconds: how long at most, on a machine where no process waits for a core; longer on a busy one.
        """
        begun = time.monotonic()
        while True:
            try:
                return self.process.wait(1)
            except subprocess.TimeoutExpired:
                took = time.monotonic() - begun
            if took > seconds * slowdown():
                raise AssertionError(f"still running after {took:.0f} s:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """End of the terminal output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

    def until(self, what: Callable[[], Any], seconds: float, *, expected: str) -> Any:
        """Poll until true; `seconds` as for `wait`."""
        begun = time.monotonic()
        while not (seen := what()):
            took = time.monotonic() - begun
            if took > seconds * slowdown() or self.process.poll() is not None:
                raise AssertionError(f"{expected}: not within {took:.0f} s:\n{self.tail()}")
            time.sleep(0.1)
        return seen

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Complete lines of a JSON-lines file so far."""
        path = self.dir / name
        if not path.exists():
            return []
        complete = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines() if line]

    def step(self) -> int:
        """Global step of the last merge."""
        merges = [line for line in self.lines("events.jsonl") if line["event"] == "merge"]
        return int(merges[-1]["step"]) if merges else 0

    def stepped(self, learner: str) -> int:
        """Optimizer steps of a learner so far."""
        return len(self._steps(learner))

    def incarnations(self, learner: str) -> int:
        """Incarnations of a learner that have made a step."""
        return len({line["incarnation"] for line in self._steps(learner)})

    def _steps(self, learner: str) -> list[dict[str, Any]]:
        return self.lines(f"learners/{learner.replace('/', '-')}/steps.jsonl")

    def status(self) -> dict[str, Any]:
        """status.json."""
        return dict(json.loads((self.dir / "status.json").read_text()))

    def child(self, module: str) -> int:
        """Pid of the supervisor's child that runs this module."""
        for pid in children(self.process.pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if module in command:
                return pid
        raise AssertionError(f"no child runs {module}")

    def rank_pid(self, learner: str, rank: int) -> int:
        """Process of a rank of a learner whose program is, or has become, torchrun."""
        pid = next(p["pid"] for p in self.status()["processes"] if p["name"] == learner)
        for child in children(pid) if pid else ():
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
        raise AssertionError(f"{learner} has no rank {rank}")

    def kill_learner(self, name: str) -> None:
        """Kill a learner's process group with `diloco kill`."""
        subprocess.run([*CLI, "kill", name, "--dir", str(self.dir)], check=True, timeout=280)

    def kill_syncer(self) -> None:
        """Send SIGKILL to the syncer."""
        os.kill(self.child("diloco_syncer"), signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Direct children, from /proc."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(p) for p in (task / "children").read_text().split()]
    return found


def longest_wait(run: LocalRun, learner: str) -> tuple[float, float]:
    """
    Longest time that learner.step() took from the loop, and the median step time.

    Time spent in the run queue is subtracted: a learner that restarts takes a core, which does not
    mean that the others wait for it.
    """
    lines = run.lines(f"learners/{learner}/steps.jsonl")
    longest = max(x["syncSeconds"] - x["queuedSeconds"] for x in lines)
    return longest, statistics.median(x["seconds"] for x in lines)
