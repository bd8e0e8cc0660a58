"""Runs one cell."""

from __future__ import annotations

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
                return lockstep.synchronous(task)
            case Method.DILOCO:
                return lockstep.diloco(task)
            case _:
                return TrainingWorld(task).result()
    except NotFiniteError as error:  # of the formats on the wire
        return Result(status=Status.DIVERGED, detail=str(error))
