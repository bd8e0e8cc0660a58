"""What comes when no process of the run is left: sample of the model, report, last words."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from diloco_operator.local import words
from diloco_operator.local.children import Children, Command
from diloco_operator.local.commands import Commands
from diloco_operator.local.events import Outcome
from diloco_operator.local.policy import Policy
from diloco_operator.local.rundir import RunDir

PATIENCE_SECONDS = 120.0
"""For the sample, and for the report."""

SAMPLE_LINES = 12
"""Of the sample are shown; the file has all of it."""

TURN_SECONDS = 0.05


def conclude(commands: Commands, policy: Policy, status: dict[str, Any], console: Console) -> None:
    """Leave sample and report in the run directory, and say how it went and what is missing."""
    rundir = commands.rundir

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    wanted = []
    if not policy.forced:
        wanted.append(commands.report())
        if policy.outcome is Outcome.COMPLETE and commands.plan.spec.recipe == "gpt":
            wanted.insert(0, commands.sample())  # the report shows it
    for command in wanted:
        if problem := finish(command):
            say(f"warning: no {command.name}: {problem}")
    for line in last_words(rundir, policy, status):
        say(line)


def finish(command: Command, *, patience_seconds: float = PATIENCE_SECONDS) -> str:
    """
    Run a command to its end; why it did not do its work, or "" when it did.

    In a process of its own: neither torch nor a plot can take a finished run along.
    """
    children = Children()
    try:
        children.start(command)
        deadline = time.monotonic() + patience_seconds
        while not (dead := children.deaths()):
            if time.monotonic() >= deadline:
                return f"it was not done after {patience_seconds:g} s"
            time.sleep(TURN_SECONDS)
        if dead[0].code == 0:
            return ""
        return f"{words.ending(dead[0].code)}: {dead[0].last_line or f'see {command.log}'}"
    finally:
        children.close()


def last_words(rundir: RunDir, policy: Policy, status: dict[str, Any]) -> list[str]:
    """How the run went, in lines for people."""
    place = _shown(rundir.path)
    if policy.forced or policy.outcome is Outcome.SUSPENDED:
        how = "stopped" if policy.forced else "suspended"
        return [f"{how} at step {status['progress']}; go on with: diloco resume --dir {place}"]
    if policy.outcome is Outcome.FAILED:
        return [f"failed at step {status['progress']}: {policy.message}", f"logs: {place}/logs"]
    lines = [
        f"complete: {status['steps']} steps, {words.count(status['tokens'])} tokens{_took(status)}"
    ]
    scores = evaluations(rundir.evaluations)
    if scores:
        (first, before), (last, after) = scores[0], scores[-1]
        lines.append(f"validation loss: {before:.4f} at step {first}, {after:.4f} at step {last}")
    if rundir.model.is_dir():
        lines.append(f"model:  {place}/model/model.safetensors")
    if rundir.report.exists():
        lines.append(f"report: {place}/report.html")
    if rundir.sample.exists():
        text = rundir.sample.read_text(errors="replace").strip("\n").split("\n")
        lines.append(f"sample: {place}/model/sample.txt")
        lines += [f"    {line}" for line in text[:SAMPLE_LINES]]
    return lines


def evaluations(file: Path) -> list[tuple[int, float]]:
    """(step, loss) of every whole line of eval.jsonl, in order of steps."""
    scores = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by a crash
        scores[int(entry["step"])] = float(entry["loss"])
    return sorted(scores.items())


def _took(status: dict[str, Any]) -> str:
    began, ended = status["startTime"], status["completionTime"]
    if not ended:
        return ""
    seconds = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    return f" in {words.duration(seconds)}"


def _shown(path: Path) -> str:
    """The path as a person in this folder would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
