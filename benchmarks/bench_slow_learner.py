"""
Does a learner that is five times slower slow the others down?
`python benchmarks/bench_slow_learner.py [--quick]`.

`diloco run` of two learners, A and B, B with `slowdown: 5`, against the same job without B, in
turns. So that they compete for nothing, A's training process has the first core alone, and all
else (B, links, syncer, supervisor) has the second. Goal: A's steps per second within 2 %, and B is
a member of merges.
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
"""First steps of A: until all processes are in place."""
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


def manifest(*, with_b: bool) -> dict[str, Any]:
    """The job; without B its region is there, empty."""
    slow = {"name": "b", "learners": int(with_b), "config": {"slowdown": SLOWDOWN}}
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "slow-learner"},
        "spec": {
            "steps": 10**6,
            "seed": 7,
            "sync": {"fragments": 8, "interval": 8},
            "learner": {"recipe": {"name": "gpt", "config": CONFIG}},
            "regions": [{"name": "a", "learners": 1}, slow],
            "syncer": {"region": "a"},
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


def run(folder: Path, seconds: float, cores: tuple[int, int], *, with_b: bool) -> Outcome:
    """One job, watched for so long from A's first measured step on, and from B's first."""
    folder.mkdir()
    job, directory = folder / "job.yaml", folder / "run"
    job.write_text(yaml.safe_dump(manifest(with_b=with_b)))
    alone, others = cores
    command = ["taskset", "-c", str(others), sys.executable, "-m", "diloco_operator.cli", "run"]
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(
            [*command, str(job), "--dir", str(directory)],
            stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    files = {
        name: directory / "learners" / f"{name}-0" / "steps.jsonl"
        for name in ("a", "b")[: 1 + with_b]
    }

    def watch(enough: Callable[[], bool], limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline and not enough():
            if process.poll() is not None:
                said = (folder / "output").read_text()[-2000:]
                raise RuntimeError(f"diloco run ended with {process.returncode}:\n{said}")
            pin(process.pid, alone, others)
            time.sleep(0.2)

    try:
        watch(lambda: all(json_lines(file) for file in files.values()), START_SECONDS)
        skipped = len(json_lines(files["a"])) + SKIPPED
        watch(lambda: False, seconds)
        took = [x["seconds"] + x["syncSeconds"] for x in json_lines(files["a"])[skipped:]]
        steps_of_b = len(json_lines(files["b"])) if with_b else 0
        events = json_lines(directory / "events.jsonl")
    finally:
        end(process)
    merges = [x for x in events if x["event"] == "merge"]
    return Outcome(
        steps_per_second=len(took) / sum(took),
        step_ms=1e3 * statistics.median(took),
        merges=len(merges),
        with_b=sum(any(m["learner"] == "b/0" for m in x["members"]) for x in merges),
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
    seconds, pairs = (5.0, 0) if arguments.quick else (22.0, 3)
    alone: list[Outcome] = []
    slow: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="bench-slow-") as folder:
        for pair in range(pairs):
            for with_b in (False, True) if pair % 2 == 0 else (True, False):
                place = Path(folder) / f"{pair}-{with_b}"
                outcome = run(place, seconds, (cores[0], cores[1]), with_b=with_b)
                (slow if with_b else alone).append(outcome)
        if arguments.quick:
            outcome = run(Path(folder) / "quick", seconds, (cores[0], cores[1]), with_b=True)
            print(outcome)
            return 0 if outcome.with_b else 1
    ratios = [b.steps_per_second / a.steps_per_second for a, b in zip(alone, slow, strict=True)]
    ratio = statistics.median(ratios)
    body = table(
        ["pair", "A alone, steps/s", "A beside B, steps/s", "ratio", "A's step ms alone",
         "beside B", "steps of B", "merges", "with B"],
        [
            [number + 1, a.steps_per_second, b.steps_per_second, f"{ratios[number]:.3f}", a.step_ms,
             b.step_ms, b.steps_of_b, b.merges, b.with_b]
            for number, (a, b) in enumerate(zip(alone, slow, strict=True))
        ],
    )  # fmt: skip
    note = (
        f"GPT recipe {CONFIG}, {seconds:.0f} s each; B: slowdown {SLOWDOWN}. A's trainer alone on one core, "
        f"everything else on the other. Median ratio {ratio:.3f}. The first {SKIPPED} steps of A once "
        "all run are left out."
    )
    write_results(
        "slow_learner", "A slow learner beside a fast one", f"{note}\n\n{body}",
        packages=("torch", "numpy", "grpcio"),
    )  # fmt: skip
    return judge(
        {
            "A's steps/s beside B against alone": (ratio, GOAL),
            "share of merges with B": (min(b.with_b / max(1, b.merges) for b in slow), 0.05),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
