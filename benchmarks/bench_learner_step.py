"""
What `learner.step()` costs, in % of a training step: `python benchmarks/bench_learner_step.py [--quick]`.

Real processes: the syncer, learners that run the built-in recipe, a link beside each; rounds are merged
all the time and local checkpoints are written. The numbers are the learner's own (steps.jsonl):
`syncSeconds` is the time `learner.step()` took from the loop, `seconds` the rest of the step, and
`copyWaitSeconds` the part of it in which the optimizer's hook waited for the copy of a checkpoint. The
learner's time of a step is the first and the last together. Goals: at most 1 % for the model of
examples/01-text, at most 2 % for 100 M parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _job import Syncer, children, json_lines, learner_environment, memory_bytes, syncer, wait_for
from _timing import judge, table, write_results

from diloco.spec import Checkpoint, RunSpec

SKIPPED = 3
"""First steps of a learner, which find cold caches and make the host copies' pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and its job."""

    name: str
    config: dict[str, Any]
    learners: int
    checkpoint_steps: int
    seconds: float
    """How long to watch, from the first step on."""
    goal_percent: float

    def spec(self) -> RunSpec:
        """With local checkpoints on the way, and no end."""
        return RunSpec(
            job="bench",
            steps=10**9,
            learners={"r": self.learners},
            learner_checkpoint=Checkpoint(every_steps=self.checkpoint_steps, keep=2),
            recipe="gpt",
            recipe_config=self.config,
        )


EXAMPLE = Case(
    name="example 01-text, 0.85 M parameters, batch 16 × 128, Muon",
    config={"layers": 4, "width": 128, "heads": 4, "context": 128, "batch": 16, "threads": 1},
    learners=2,
    checkpoint_steps=50,
    seconds=45,
    goal_percent=1.0,
)
LARGE = Case(
    name="GPT of 100 M parameters, batch 2 × 128, AdamW",
    config={
        "layers": 14, "width": 768, "heads": 12, "context": 128, "batch": 2, "optimizer": "AdamW",
        "learningRate": 3e-4,
    },
    learners=1,
    checkpoint_steps=25,
    seconds=240,
    goal_percent=2.0,
)  # fmt: skip
QUICK = Case(
    name="quick",
    config={**EXAMPLE.config, "batch": 4},
    learners=1,
    checkpoint_steps=20,
    seconds=4,
    goal_percent=1.0,
)


@dataclass(slots=True)
class Process:
    """One learner; its peaks are watched while it runs."""

    process: subprocess.Popen[bytes]
    state: Path
    peak: int = 0
    link_peak: int = 0

    def watch(self) -> None:
        """
        Note the memory of trainer and link.

        Raises:
            RuntimeError: the learner ended.
        """
        self.peak = max(self.peak, memory_bytes(self.process.pid))
        for pid in children(self.process.pid):
            self.link_peak = max(self.link_peak, memory_bytes(pid))
        if self.process.poll() is not None:
            raise RuntimeError(f"a learner ended:\n{(self.state / 'log').read_text()[-2000:]}")

    def end(self) -> None:
        """Kill the remaining processes; the link exits with its trainer."""
        self.process.kill()
        self.process.wait()


def start(case: Case, index: int, spec: RunSpec, at: Syncer) -> Process:
    """One learner of the recipe."""
    state = at.directory / f"learner-{index}"
    state.mkdir()
    environment = {
        **os.environ,
        **learner_environment(spec, f"r/{index}", at.endpoint, at.spec_file),
        "DILOCO_CONFIG": json.dumps(case.config),
        "DILOCO_STATE": str(state),
    }
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco_worker.recipes.gpt"],
            env=environment,
            stderr=log,
            stdout=log,
        )
    return Process(process=process, state=state)


def measure(case: Case) -> dict[str, Any]:
    """Watch one job for a while."""
    spec = case.spec()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-step-")))
        at = stack.enter_context(syncer(spec, folder / "run"))
        learners = []
        for index in range(case.learners):
            learner = start(case, index, spec, at)
            stack.callback(learner.end)
            learners.append(learner)
        files = [learner.state / "steps.jsonl" for learner in learners]
        wait_for(lambda: all(json_lines(file) for file in files), "the first steps", 90)
        deadline = time.monotonic() + case.seconds
        while time.monotonic() < deadline:
            for learner in learners:
                learner.watch()
            time.sleep(0.2)
        lines = [json_lines(file)[SKIPPED:] for file in files]
        if min(map(len, lines)) < 5:
            log = (learners[0].state / "log").read_text()[-2000:]
            raise RuntimeError(f"a learner made few steps in {case.seconds} s:\n{log}")
        merges = [x for x in json_lines(at.directory / "events.jsonl") if x["event"] == "merge"]
        steps = [line for mine in lines for line in mine]
        sync = sorted(map(learner_seconds, steps))
        seconds = statistics.median(line["seconds"] for line in steps)
        return {
            **checkpoints(lines, seconds),
            "steps": len(steps),
            "merges": len(merges),
            "seconds": seconds,
            "median": statistics.median(sync),
            "p99": sync[min(len(sync) - 1, len(sync) * 99 // 100)],
            "max": sync[-1],
            "percent": 100 * statistics.median(sync) / seconds,
            "mean_percent": 100 * sum(sync) / sum(line["seconds"] for line in steps),
            "peak": max(learner.peak for learner in learners),
            "link_peak": max(learner.link_peak for learner in learners),
        }


def learner_seconds(line: dict[str, Any]) -> float:
    """What the learner took of one step: `learner.step()`, and waits in the optimizer's hook."""
    return float(line["syncSeconds"]) + float(line.get("copyWaitSeconds", 0.0))


def checkpoints(lines: list[list[dict[str, Any]]], step_seconds: float) -> dict[str, Any]:
    """
    The learner's time in steps beside which a checkpoint was copied, and in the others.

    Args:
        lines: of each learner.
        step_seconds: a usual step.
    """
    beside, others, waits, queued = [0.0], [0.0], [0.0], [0.0]
    for mine in lines:
        copied = {i for i, line in enumerate(mine) if "copyWaitSeconds" in line}
        begun = {i - 1 for i in copied}  # at the end of the step before
        for i, line in enumerate(mine):
            (beside if i in copied | begun else others).append(learner_seconds(line))
            if i in copied | begun:
                queued.append(learner_seconds(line) - float(line["queuedSeconds"]))
        waits += [float(mine[i]["copyWaitSeconds"]) for i in copied]
    return {
        "copies": len(waits) - 1,
        "wait": max(waits),
        "wait_percent": 100 * max(waits) / step_seconds,
        "beside_percent": 100 * max(beside) / step_seconds,
        "beside_run_percent": 100 * max(queued) / step_seconds,
        "others_percent": 100 * max(others) / step_seconds,
    }


def main() -> int:
    """Measure, write results/learner_step.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short job, no results, no goals")
    arguments = parser.parse_args()
    cases = [QUICK] if arguments.quick else [EXAMPLE, LARGE]
    rows, copies, goals = [], [], {}
    for case in cases:
        facts = measure(case)
        rows.append(
            [case.name, case.learners, facts["steps"], facts["merges"],
             f"{facts['seconds'] * 1e3:.0f}", facts["median"] * 1e3, facts["percent"],
             facts["mean_percent"], facts["p99"] * 1e3, facts["max"] * 1e3,
             f"{facts['peak'] / 1e6:.0f}", f"{facts['link_peak'] / 1e6:.0f}"]
        )  # fmt: skip
        copies.append(
            [case.name, facts["copies"], facts["wait"] * 1e3, facts["wait_percent"], facts["beside_percent"],
             facts["beside_run_percent"], facts["others_percent"]]
        )  # fmt: skip
        goals[f"{case.name}: % of a step"] = (facts["percent"], case.goal_percent)
    body = table(
        ["model", "learners", "steps", "merges", "step ms (median)", "learner.step() ms (median)",
         "% of a step", "% of the time, all steps", "p99 ms", "longest ms", "trainer peak MB", "link peak MB"],
        rows,
    )  # fmt: skip
    body += "\n\n" + table(
        ["model", "copies for checkpoints", "longest wait in the hook, ms", "% of a step",
         "longest learner time with a copy, % of a step", "without waits for a core, %",
         "longest without a copy, % of a step"],
        copies,
    )  # fmt: skip
    if arguments.quick:
        print(body)
        return 0
    note = (
        "Syncer, learners and links share the cores. 24 fragments, each merged every 24 steps, τ = 2, bf16 "
        "both ways. learner.step() includes waits in the optimizer's hook for the copies of local "
        "checkpoints; p99 and longest include waits for a core. Memory: VmHWM; the memory that trainer and link share "
        f"(2 N) counts in both. The first {SKIPPED} steps are excluded."
    )
    write_results(
        "learner_step", "What learner.step() costs", f"{note}\n\n{body}",
        packages=("torch", "numpy", "grpcio"),
    )  # fmt: skip
    return judge(goals, at_most=frozenset(goals))


if __name__ == "__main__":
    raise SystemExit(main())
