"""
Does a learner that is five times slower slow the others down?
`python benchmarks/bench_slow_learner.py [--quick]`.

`diloco run` of two learners, A and B, B with `slowdown: 5`, against a job of A without B, in turns.
So that they compete for no core, A's training process has the first one alone, and all else (B,
links, syncer, supervisor) has the second. Cores of one machine still share its memory and caches:
while A is without B, B trains in a job of its own on the second core, so that the only difference
is whether the two are in one job. Goal: A's steps per second within 2 %, and B is a member of
merges.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from _job import children, json_lines
from _timing import judge, table, write_results

GOAL = 0.98
SLOWDOWN = 5
SKIPPED = 10
"""First steps of each learner that are not measured."""
CONFIG = {"layers": 4, "width": 96, "heads": 4, "context": 128, "batch": 8, "threads": 1}
START_SECONDS = 60.0
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one job left behind."""

    steps_per_second: float
    """Of A."""
    step_ms: float
    """Median of A."""
    merges: int
    with_b: int
    """Merges of which B was a member."""
    steps_of_b: int


def manifest(regions: str) -> dict[str, Any]:
    """A job with one learner in each of the regions "a" and "b" that are named."""
    here = [{"name": "a", "learners": int("a" in regions)}]
    here += [{"name": "b", "learners": int("b" in regions), "config": {"slowdown": SLOWDOWN}}]
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": f"slow-learner-{regions}"},
        "spec": {
            "steps": 10**6,
            "seed": 7,
            "sync": {"fragments": 8, "interval": 8},
            "learner": {"recipe": {"name": "gpt", "config": CONFIG}},
            "regions": here,
        },
    }


def descendants(pid: int) -> Iterator[int]:
    """A process's children and theirs."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def pin(supervisor: int, alone: int, others: int) -> None:
    """Give A's trainer the core `alone`, with all its threads; all others stay on `others`."""
    for pid in descendants(supervisor):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            about = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            is_a = b"DILOCO_LEARNER=a/0" in about and b"diloco_worker.recipes.gpt" in command
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {alone if is_a else others})


class Job:
    """One `diloco run` that is being watched."""

    def __init__(self, folder: Path, regions: str, cores: tuple[int, int]) -> None:
        folder.mkdir(parents=True)
        self.directory, self._output, self._cores = folder / "run", folder / "output", cores
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(manifest(regions)))
        program = ["taskset", "-c", str(cores[1]), sys.executable, "-m", "diloco_cli"]
        with self._output.open("wb") as out:
            self.process = subprocess.Popen(
                [*program, "run", str(file), "--dir", str(self.directory)],
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def steps(self, region: str) -> list[dict[str, Any]]:
        """What that region's learner wrote so far."""
        return json_lines(self.directory / "learners" / f"{region}-0" / "steps.jsonl")

    def merges(self) -> list[dict[str, Any]]:
        """Of this job so far."""
        events = json_lines(self.directory / "events.jsonl")
        return [event for event in events if event["event"] == "merge"]

    def check(self) -> None:
        """It still runs, and every process is on its core."""
        if self.process.poll() is not None:
            output = self._output.read_text()[-2000:]
            raise RuntimeError(f"diloco run ended with {self.process.returncode}:\n{output}")
        pin(self.process.pid, *self._cores)


def run(folder: Path, seconds: float, cores: tuple[int, int], *, together: bool) -> Outcome:
    """A and B in one job or in two, watched for so long once both have trained a while."""
    jobs = [Job(folder / who, who, cores) for who in (["ab"] if together else ["a", "b"])]
    of_a, of_b = jobs[0], jobs[-1]

    def watch(enough: Callable[[], bool], limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline and not enough():
            for job in jobs:
                job.check()
            time.sleep(0.2)

    try:
        watch(lambda: len(of_a.steps("a")) > SKIPPED < len(of_b.steps("b")), START_SECONDS)
        a, b, merges = len(of_a.steps("a")), len(of_b.steps("b")), len(of_a.merges())
        watch(lambda: False, seconds)
        took = [x["seconds"] + x["syncSeconds"] for x in of_a.steps("a")[a:]]
        steps_of_b = len(of_b.steps("b")) - b
        counted = of_a.merges()[merges:]
    finally:
        for job in jobs:
            end(job.process)
    return Outcome(
        steps_per_second=len(took) / sum(took),
        step_ms=1e3 * statistics.median(took),
        merges=len(counted),
        with_b=sum(any(m["learner"] == "b/0" for m in x["members"]) for x in counted),
        steps_of_b=steps_of_b,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C twice: end at once. Should that not help: its children die with it."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    """Measure, write results/slow_learner.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short job, no results, no goals")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("skipped: two cores are needed, so that A and B do not compete for one")
        return 0
    seconds, pairs = (5.0, 0) if arguments.quick else (30.0, 5)
    apart: list[Outcome] = []
    together: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="bench-slow-") as folder:
        if arguments.quick:
            outcome = run(Path(folder), seconds, (cores[0], cores[1]), together=True)
            print(outcome)
            return 0 if outcome.with_b else 1
        for pair in range(pairs):
            for both in (False, True) if pair % 2 == 0 else (True, False):
                place = Path(folder) / f"{pair}-{both}"
                outcome = run(place, seconds, (cores[0], cores[1]), together=both)
                (together if both else apart).append(outcome)
    ratios = [b.steps_per_second / a.steps_per_second for a, b in zip(apart, together, strict=True)]
    ratio = statistics.median(ratios)
    body = table(
        ["pair", "A, B in another job, steps/s", "A and B in one job, steps/s", "ratio",
         "A's step ms apart", "together", "steps of B", "merges", "with B"],
        [
            [number + 1, a.steps_per_second, b.steps_per_second, f"{ratios[number]:.3f}", a.step_ms,
             b.step_ms, b.steps_of_b, b.merges, b.with_b]
            for number, (a, b) in enumerate(zip(apart, together, strict=True))
        ],
    )  # fmt: skip
    note = (
        f"GPT recipe {CONFIG}, {seconds:.0f} s each; B: slowdown {SLOWDOWN}. A's trainer alone on one core, "
        f"everything else on the other, B in both cases. Median ratio {ratio:.3f}. Measured after "
        f"both had made {SKIPPED} steps. Each report of B can be part of at most one merge."
    )
    write_results(
        "slow_learner", "A slow learner beside a fast one", f"{note}\n\n{body}",
        packages=("torch", "numpy", "grpcio"),
    )  # fmt: skip
    return judge(
        {
            "A's steps/s with B in its job against without": (ratio, GOAL),
            "share of merges with B": (min(b.with_b / max(1, b.merges) for b in together), 0.03),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
