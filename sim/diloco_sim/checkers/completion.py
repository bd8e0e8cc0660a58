"""A learner is notified that the job is complete only when the model and the last snapshot are durable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_syncer.core.events import AnnounceComplete


class Completion:
    """
    Args:
        steps: T of the spec.
        model_is_durable: whether the exported model would survive a power failure now; ask the disk,
            not the syncer.
        expected: by the end of the run the job must be complete.
    """

    observes = (dict, AnnounceComplete)

    def __init__(
        self, steps: int, model_is_durable: Callable[[], bool], *, expected: bool = False
    ) -> None:
        self._steps, self._model_is_durable, self._expected = steps, model_is_durable, expected
        self._durable_step = 0
        self._announced = False

    def observe(self, event: dict[str, Any] | AnnounceComplete, now: float) -> None:
        """See `Checker`."""
        if isinstance(event, AnnounceComplete):
            if self._durable_step < self._steps:
                self._fail(
                    f"{event.learner} is notified of completion, the newest durable snapshot is of step "
                    f"{self._durable_step} of {self._steps}",
                    now,
                )
            if not self._model_is_durable():
                self._fail(
                    f"{event.learner} is notified of completion before the model is durable", now
                )
            self._announced = True
        elif event.get("event") == "snapshot" and event["ok"]:
            self._durable_step = max(self._durable_step, event["step"])

    def finish(self, now: float) -> None:
        """See `Checker`."""
        if self._expected and not self._announced:
            self._fail("the run ended and the job is not complete", now)

    def _fail(self, sentence: str, now: float) -> None:
        raise Violation("completion", sentence, step=self._durable_step, now=now)
