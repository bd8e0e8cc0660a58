"""
At which steps the ranks of a learner begin a local checkpoint: rank 0 decides it for all of them. Pure.

The ranks differ in what they see: how long their disks take, whether their copies fit into a step, the loss of their
part of a batch. The plan of a boundary (`agreement`) has the decision, so that all pieces are of one step.
"""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """What became of a rank's piece, or of a checkpoint as a whole: then the last of those of its pieces."""

    WRITTEN = "written"
    FAILED = "failed"
    """It cannot be written now: the next is due in its turn."""
    LOST = "lost"
    """Its copy was discarded: the next is due at once."""
    OFF = "off"
    """The state can never be saved."""


ORDER = (Outcome.WRITTEN, Outcome.FAILED, Outcome.LOST, Outcome.OFF)


def of_all(outcomes: list[Outcome]) -> Outcome:
    """What becomes of the checkpoint of which these are the pieces."""
    return max(outcomes, key=ORDER.index)


class CheckpointSchedule:
    """
    When the next checkpoint begins.

    Args:
        every: local steps between two checkpoints.
        local_step: at which this process begins to train.
    """

    def __init__(self, every: int, *, local_step: int) -> None:
        self._every: int | None = every
        self._last = local_step
        self._lost = 0
        """Attempts in a row that were discarded."""
        self._final = False

    def at(self, local_step: int, *, busy: bool, trained: bool, ending: bool) -> int | None:
        """
        Whether a checkpoint begins at the end of this step; it does if the answer is a number.

        Args:
            local_step: of the step.
            busy: the previous checkpoint is being written.
            trained: the model made a step, and its loss is finite: a restart must not load what has diverged.
            ending: the learner ends with this step. Such a checkpoint does not wait for its turn, once.

        Returns:
            How many attempts in a row were discarded; None: none begins.
        """
        if self._every is None or not trained:
            return None
        final, self._final = ending and not self._final, ending
        if not final and (busy or local_step - self._last < self._every):
            return None
        self._last = local_step
        return self._lost

    def ended(self, outcome: Outcome) -> None:
        """What became of the checkpoint that was begun last."""
        if outcome is Outcome.OFF:
            self._every = None
        self._lost = self._lost + 1 if outcome is Outcome.LOST else 0
        if outcome is Outcome.LOST and self._every is not None:
            self._last -= self._every
