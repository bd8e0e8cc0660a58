"""What follows after the last process of a run: sample of the model, report, summary."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from diloco.journal import reader
from diloco.runtime import formatting
from diloco_agent.processes import Command, Processes
from diloco_agent.restarts import exit_cause
from diloco_local.commands import Commands
from diloco_local.events import Outcome
from diloco_local.policy import UNCHANGED, Policy
from diloco_local.run_directory import RunDir

TIMEOUT_SECONDS = 120.0
"""Of the sample, and of the report."""

SAMPLE_LINES = 12
"""Lines of the sample that are printed; the file holds all of it."""

POLL_SECONDS = 0.05


def conclude(commands: Commands, policy: Policy, status: dict[str, Any], console: Console) -> None:
    """Write sample and report into the run directory, and print a summary."""
    run_dir = commands.run_dir

    def show(text: str) -> None:
        console.print(Text(formatting.printable(text, lines=True)), soft_wrap=True)

    pending = []
    if not policy.forced:
        pending.append(commands.report())
        if _has_model(policy) and commands.plan.spec.recipe == "gpt":
            pending.insert(0, commands.sample())  # the report shows it
    for command in pending:
        if problem := run_to_end(command):
            show(f"warning: no {command.name}: {problem}")
    for line in summary(run_dir, policy, status):
        show(line)


def run_to_end(command: Command, *, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """
    Run a command to its end; returns why it failed, or "" on success.

    In its own process: neither torch nor a plot can crash a finished run.
    """
    processes = Processes()
    try:
        processes.start(command)
        deadline = time.monotonic() + timeout_seconds
        while not (exits := processes.exits()):
            if time.monotonic() >= deadline:
                return f"not done after {timeout_seconds:g} s"
            time.sleep(POLL_SECONDS)
        [done] = exits
        if done.code == 0:
            return ""
        return exit_cause(done.code, done.cause or f"see {command.log}")
    finally:
        processes.close()


def summary(run_dir: RunDir, policy: Policy, status: dict[str, Any]) -> list[str]:
    """How the run ended, as lines of text."""
    place = _shown(run_dir.path)
    if policy.forced or policy.outcome is Outcome.SUSPENDED:
        how = "stopped" if policy.forced else "suspended"
        return [f"{how} at step {status['progress']}; resume it with: diloco resume --dir {place}"]
    if policy.outcome is Outcome.FAILED:
        return [f"failed at step {status['progress']}: {policy.message}", f"logs: {place}/logs"]
    lines = [
        f"complete: {status['steps']} steps, {formatting.count(status['tokens'])} tokens{_took(status)}"
    ]
    scores = evaluations(run_dir.evaluations)
    if scores:
        (first, before), (last, after) = scores[0], scores[-1]
        lines.append(f"validation loss: {before:.4f} at step {first}, {after:.4f} at step {last}")
    scored = max([step for step, _ in scores] + [(status["evaluation"] or {"step": -1})["step"]])
    if "evaluator" in policy.processes and scored < status["steps"]:
        lines.append(
            f"warning: the final model has no validation loss ({_no_score(policy, place)}); evaluate it with: "
            f"diloco resume --dir {place}"
        )
    if policy.exported:
        lines.append(f"model:  {place}/model/model.safetensors")
    else:
        lines.append(
            f"warning: the model was not exported (see {place}/logs/syncer.log); export it with: "
            f"diloco resume --dir {place}"
        )
    if run_dir.report.exists():
        lines.append(f"report: {place}/report.html")
    if run_dir.sample.exists():
        text = run_dir.sample.read_text(errors="replace").strip("\n").split("\n")
        lines.append(f"sample: {place}/model/sample.txt")
        lines += [f"    {line}" for line in text[:SAMPLE_LINES]]
    if policy.unchanged:
        lines.append(f"warning: {UNCHANGED}")
    return lines


def _has_model(policy: Policy) -> bool:
    return policy.outcome is Outcome.COMPLETE and policy.exported


def _no_score(policy: Policy, place: str) -> str:
    """Why the final model has none."""
    if policy.no_score:
        return policy.no_score
    return "interrupted" if policy.skips_waiting else f"see {place}/logs/evaluator.log"


def evaluations(file: Path) -> list[tuple[int, float]]:
    """(step, loss) of every score in eval.jsonl and its older part, in order of steps."""
    scores = {
        int(score["step"]): float(score["loss"])
        for score in reader.read(file)
        if "step" in score and "loss" in score
    }
    return sorted(scores.items())


def _took(status: dict[str, Any]) -> str:
    began, ended = status["startTime"], status["completionTime"]
    if not ended:
        return ""
    seconds = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    return f" in {formatting.duration(seconds)}"


def _shown(path: Path) -> str:
    """The path relative to the working directory, if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
