"""What starts of the syncer do to Θ that lose merges which the learners have received."""

from __future__ import annotations

from diloco.spec import RunSpec
from diloco_syncer.core.growth import MAX_GROWTH


class LostMerges:
    """
    Counts starts that lost merges, by how much each lets Θ grow.

    The learners continue with the parameters of the lost merges, so the first delta of each fragment
    contains what these did, and an outer step with α·(1 + μ) > 1 goes beyond it.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._factor = max(1.0, spec.outer_learning_rate * (1 + spec.outer_momentum))
        self._growth = 1.0
        self._step = 0

    def merged(self, step: int) -> None:
        """Global step `step` was merged."""
        self._step = step

    def started(self, step: int) -> None:
        """The syncer started from a snapshot of `step`."""
        if step < self._step:
            self._growth *= self._factor
        self._step = step

    @property
    def may_halt(self) -> bool:
        """Whether growth that the syncer calls implausible has this cause."""
        return self._growth > MAX_GROWTH
