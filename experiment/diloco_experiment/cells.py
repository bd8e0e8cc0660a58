"""Runs one cell."""

from __future__ import annotations

from dataclasses import replace

from diloco.errors import NotFiniteError
from diloco_experiment import lockstep
from diloco_experiment.results import Result, Status
from diloco_experiment.tasks import Method, Task
from diloco_experiment.world import TrainingWorld


def run(task: Task) -> Result:
    """
    The result of a task: equal tasks give equal results, in any process of one kind of CPU.

    Raises:
        ConfigError: the task cannot run; its data is missing, for example.
    """
    try:
        match task.method:
            case Method.SYNCHRONOUS:
                found = lockstep.synchronous(task)
            case Method.DILOCO:
                found = lockstep.diloco(task)
            case _:
                found = TrainingWorld(task).result()
    except NotFiniteError as error:  # of the formats on the wire
        return Result(status=Status.DIVERGED, detail=str(error))
    steps = task.spec.steps
    if found.status is Status.OK and (not found.curve or found.curve[-1][0] != steps):
        # A curve has finite losses only: its last one would be that of an earlier Θ.
        detail = f"the validation loss after global step {steps} is not finite"
        return replace(found, status=Status.DIVERGED, detail=detail)
    return found
