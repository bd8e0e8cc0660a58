"""
Is the guard of a merge ever active among honest learners?
`python benchmarks/bench_guard.py [--quick | --dir RUN ...]`.

`diloco run` of learners with batches of 8 and 16 at full speed and others at a sixth of it, warm-up
included, and then what each merge of three members or more states in events.jsonl: how far every norm
and every member's tokens per step were from their limits. With `--dir`, it reads runs that exist
already. Goals: no tensor is clipped, and no weight is limited. No time is measured.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from _job import json_lines
from _timing import judge, table, write_results

from diloco_syncer.core.guard import GUARDED_MEMBERS, RATE_MULTIPLE
from diloco_syncer.core.outer import weight

CONFIG = {"layers": 4, "width": 64, "heads": 4, "context": 64, "batch": 8, "threads": 1}
SLOWDOWN = 6
FRAGMENTS = 24
STEPS = 200
RUN_SECONDS = 900.0

JOBS = {
    "2, one with twice the batch, one slow": (2, 1, 1),
    "1, one with twice the batch, two slow": (1, 1, 2),
}
"""Learners with batch 8, with batch 16, and at a sixth of the speed."""

HEADER = (
    "learners", "merges of 3 or more", "contributions", "steps of a member",
    "largest multiple of the median norm", "largest share of the limit on tokens per step",
    "tensors clipped", "weights limited",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the guard did in the merges of one run that have GUARDED_MEMBERS or more."""

    merges: int
    contributions: int
    steps: tuple[int, int]
    """Fewest and most of a member."""
    of_median: float
    """Longest norm of a tensor, in multiples of the members' median per √step, or per step where that is less."""
    of_limit: float
    """Largest share that a member's tokens per step have of their limit."""
    clipped: int
    """Tensors."""
    limited: int
    """Contributions with another weight than tokens² / steps."""

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]]) -> Found:
        """Of the lines of events.jsonl. Members without a step or a token have no weight, as in the guard."""
        merges = [
            [m for m in line["members"] if m["weight"] > 0]
            for line in lines
            if line["event"] == "merge"
        ]
        merges = [members for members in merges if len(members) >= GUARDED_MEMBERS]
        members = [member for merge in merges for member in merge]
        if not members:
            return cls(
                merges=0, contributions=0, steps=(0, 0), of_median=0.0, of_limit=0.0, clipped=0, limited=0
            )  # fmt: skip
        steps = [m["steps"] for m in members]
        return cls(
            merges=len(merges),
            contributions=len(members),
            steps=(min(steps), max(steps)),
            of_median=max(m["ofMedian"] for m in members),
            of_limit=max(map(_of_limit, merges)),
            clipped=sum(m["clipped"] for m in members),
            limited=sum(
                m["weight"] < weight(tokens=m["tokens"], steps=m["steps"]) for m in members
            ),
        )

    @property
    def row(self) -> list[object]:
        """Its part of the table."""
        steps = f"{self.steps[0]} … {self.steps[1]}"
        return [
            self.merges, self.contributions, steps, self.of_median, self.of_limit, self.clipped, self.limited
        ]  # fmt: skip


def _of_limit(members: list[dict[str, Any]]) -> float:
    rates = [m["tokens"] / m["steps"] for m in members]
    return float(max(rates) / (RATE_MULTIPLE * statistics.median_low(rates)))


def manifest(usual: int, large: int, slow: int, steps: int) -> dict[str, Any]:
    """A job with these numbers of learners in the regions a, b and c."""
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "guard"},
        "spec": {
            "steps": steps,
            "seed": 7,
            "sync": {"fragments": FRAGMENTS, "interval": FRAGMENTS},
            "learner": {"recipe": {"name": "gpt", "config": CONFIG}},
            "regions": [
                {"name": "a", "learners": usual},
                {"name": "b", "learners": large, "config": {"batch": 2 * CONFIG["batch"]}},
                {"name": "c", "learners": slow, "config": {"slowdown": SLOWDOWN}},
            ],
        },
    }


def run(folder: Path, job: dict[str, Any]) -> Path:
    """`diloco run` to its end; its directory."""
    folder.mkdir()
    file, output = folder / "job.yaml", folder / "output"
    file.write_text(yaml.safe_dump(job))
    program = [sys.executable, "-m", "diloco_cli", "run", str(file), "--dir", str(folder / "run")]
    with output.open("wb") as out:
        try:
            subprocess.run(
                program, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                timeout=RUN_SECONDS, check=True,
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"{error}:\n{output.read_text()[-2000:]}") from None
    return folder / "run"


def main() -> int:
    """Measure, write results/guard.md unless the runs are given, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--quick", action="store_true", help="one short job, no results, no goals")
    only.add_argument("--dir", type=Path, nargs="+", help="run directories, no results")
    arguments = parser.parse_args()
    found: dict[str, Found] = {}
    if arguments.dir:
        found = {str(path): Found.of(json_lines(path / "events.jsonl")) for path in arguments.dir}
    else:
        with tempfile.TemporaryDirectory(prefix="bench-guard-") as folder:
            for number, (name, learners) in enumerate(JOBS.items()):
                if arguments.quick and number:
                    break
                job = manifest(*learners, FRAGMENTS if arguments.quick else STEPS)
                directory = run(Path(folder) / str(number), job)
                found[name] = Found.of(json_lines(directory / "events.jsonl"))
    body = table(HEADER, [[name, *of.row] for name, of in found.items()])
    print(body)
    if arguments.quick:
        return 0
    if not arguments.dir:
        note = (
            f"GPT recipe {CONFIG}, H = P = {FRAGMENTS}, {STEPS} global steps with the warm-up. Slow: "
            f"slowdown {SLOWDOWN}. A norm is clipped at `sync.guard` (10) times the median per √step or per step, "
            f"tokens per step count up to {RATE_MULTIPLE} times the median."
        )
        write_results(
            "guard", "The guard among honest learners", f"{note}\n\n{body}", packages=("torch", "numpy")
        )  # fmt: skip
    return judge(
        {
            "tensors clipped": (float(sum(of.clipped for of in found.values())), 0.0),
            "weights limited": (float(sum(of.limited for of in found.values())), 0.0),
        },
        at_most=frozenset({"tensors clipped", "weights limited"}),
    )


if __name__ == "__main__":
    raise SystemExit(main())
