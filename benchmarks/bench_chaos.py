"""
What a kill every ten seconds costs a run: `python benchmarks/bench_chaos.py [--quick]`.

`diloco chaos` of eight small learners, of which one is killed every ten seconds on average, and the syncer less
often. Then `diloco run` of the same job without faults, with as many steps as give about the same number of merged
tokens: those of the members of all merges, per fragment. Goals: it ends at T, the audit passes, and its validation
loss is at most 1 % above the other. The steps of learners are mostly rest (`slowdown`), so that two cores are
enough for eight.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from _job import json_lines
from _timing import judge, table, write_results

LEARNERS, QUORUM = 8, 4
FRAGMENTS, INTERVAL = 8, 24
BATCH, CONTEXT = 4, 32
CONFIG = {
    "layers": 2, "width": 32, "heads": 2, "context": CONTEXT, "batch": BATCH, "data": "stdlib", "slowdown": 25,
    "learningRate": 0.024, "validationTokens": 65536,
}  # fmt: skip
KILLS, SYNCER_KILLS = 5.6, 0.4
"""Per minute."""
STEPS = 7000
LOSS = 1.01
HEADER = ("run", "T", "minutes", "merged tokens, M", "validation loss", "members per merge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run left behind."""

    steps: int
    seconds: float
    merged_tokens: float
    loss: float
    members: float
    """Of a merge, on average."""
    output: str

    def line(self, begin: str) -> str:
        """The line of the command's output that begins so."""
        found = re.search(rf"^{begin}.*$", self.output, re.MULTILINE)
        return found.group().strip() if found else f"{begin} is missing"

    @property
    def row(self) -> list[object]:
        """Of the table."""
        return [
            self.steps, f"{self.seconds / 60:.1f}", f"{self.merged_tokens / 1e6:.3f}", f"{self.loss:.4f}",
            self.members,
        ]  # fmt: skip


def manifest(steps: int) -> dict[str, Any]:
    """The job."""
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "chaos"},
        "spec": {
            "steps": steps,
            "seed": 1,
            "sync": {
                "fragments": FRAGMENTS, "interval": INTERVAL, "overlap": 2, "quorum": QUORUM,
            },
            "learner": {
                "recipe": {"name": "gpt", "config": CONFIG},
                "checkpoint": {"everySteps": 50, "keep": 2},
            },
            "regions": [{"name": name, "learners": LEARNERS // 2} for name in ("eu", "us")],
            "syncer": {"checkpoint": {"everySteps": 48, "keep": 3}},
            "evaluation": {"everySteps": max(1, steps // 5)},
        },
    }  # fmt: skip


def run(folder: Path, steps: int, *command: str) -> Outcome:
    """Run the job by this command to its end."""
    folder.mkdir()
    job, directory = folder / "job.yaml", folder / "run"
    job.write_text(yaml.safe_dump(manifest(steps)))
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "diloco_cli", *command, str(job), "--dir", str(directory)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - begun
    print(ended.stdout, ended.stderr, flush=True)
    if ended.returncode:
        sys.exit(f"{command[0]} ended with {ended.returncode}; see {directory}")
    merges: list[dict[str, Any]] = []
    for line in json_lines(directory / "events.jsonl"):
        if line["event"] == "start":  # of a syncer; merges after its snapshot are lost
            merges = [merge for merge in merges if merge["step"] <= line["step"]]
        elif line["event"] == "merge":
            merges.append(line)
    members = [member for line in merges for member in line["members"]]
    last = json_lines(directory / "eval.jsonl")[-1]
    if last["step"] != steps:
        sys.exit(f"the last score is of step {last['step']}, expected {steps}")
    return Outcome(
        steps=steps,
        seconds=seconds,
        merged_tokens=sum(member["tokens"] for member in members) / FRAGMENTS,
        loss=last["loss"],
        members=len(members) / len(merges),
        output=ended.stdout,
    )


def main() -> int:
    """Print and write the results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--steps", type=int, default=STEPS, help="T of the disturbed run")
    given = arguments.parse_args()
    steps = 150 if given.quick else given.steps
    rates = ["--kill-rate", str(KILLS), "--syncer-kill-rate", str(SYNCER_KILLS), "--seed", "1"]
    with tempfile.TemporaryDirectory() as name:
        disturbed = run(Path(name, "disturbed"), steps, "chaos", *rates, "--minutes", "600")
        # One step of each interval is made between copy and result, and overwritten.
        whole = LEARNERS * BATCH * CONTEXT * (INTERVAL - 1) / INTERVAL * steps
        as_many = max(1, round(steps * min(1.0, disturbed.merged_tokens / whole)))
        calm = run(Path(name, "undisturbed"), as_many, "run")
    difference = 100 * (disturbed.loss / calm.loss - 1)
    body = f"""{LEARNERS} learners of 41 thousand parameters, K = {QUORUM}, H = {INTERVAL}, P = {FRAGMENTS}; {KILLS:g}
kills of a learner and {SYNCER_KILLS:g} of the syncer per minute, of which those are skipped that would leave less than
K learners undisturbed. The other run has no faults, and as many steps as give about the same number of merged tokens.

{table(HEADER, [["a kill every ten seconds", *disturbed.row], ["without faults", *calm.row]])}

Validation loss: {difference:+.2f} %. Of the output of the disturbed run:

```
{disturbed.line("faults:")}
{disturbed.line("goodput:")}
{disturbed.line("restarts:")}
{disturbed.line("audit:")}
```
"""
    print(body)
    if not given.quick:
        write_results("chaos", "A kill every ten seconds", body, packages=("torch",), timed=False)
    goals = {"loss / loss without faults": (disturbed.loss / calm.loss, LOSS)}
    return judge(goals, at_most=frozenset(goals))


if __name__ == "__main__":
    sys.exit(main())
