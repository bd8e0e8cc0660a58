"""Tasks of models so small that a cell takes a second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco.spec import Checkpoint, RunSpec
from diloco_experiment.results import Result
from diloco_experiment.scenarios import Scenario
from diloco_experiment.tasks import Checks, Method, Moments, Task, task_of

CONFIG: dict[str, Any] = {
    "layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 2, "validationTokens": 64,
}  # fmt: skip


def text(folder: Path) -> str:
    """A file to train on."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(_sentences(400)))
    return str(path)


def _sentences(count: int) -> Iterator[str]:
    for number in range(count):
        yield f"{number} times {number % 7} is {number * (number % 7)}.\n"


def task(
    folder: Path, method: Method = Method.DECOUPLED, *, learners: int = 2, scenario: Scenario | None = None,
    checks: Checks = Checks.LIGHT, moments: Moments = Moments.LOCAL, config: dict[str, Any] | None = None,
    **spec: Any,
) -> Task:  # fmt: skip
    """A task of 12 steps."""
    values: dict[str, Any] = {
        "steps": 12, "seed": 3, "fragments": 4, "interval": 4, "overlap": 1,
        "learner_checkpoint": Checkpoint(every_steps=2, keep=1),
        "syncer_checkpoint": Checkpoint(every_steps=6, keep=1),
        **spec,
    }  # fmt: skip
    job = RunSpec(job="tiny", recipe="gpt", learners={"eu": learners}, **values)
    own = {**CONFIG, "data": text(folder), **(config or {})}
    return task_of(
        method, job, [(f"eu/{index}", own) for index in range(learners)], scenario or Scenario(),
        evaluate_every=6, checks=checks, moments=moments,
    )  # fmt: skip


def killed(task: Task) -> Result:
    """In place of a cell: its process ends without a result."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def stuck(task: Task) -> Result:
    """In place of a cell: it does not end; a file beside its text has the name of its process."""
    Path(task.configs[0][1]["data"]).with_name(f"{os.getpid()}.pid").touch()
    time.sleep(600)
    raise AssertionError
