"""What starts of the syncer do to Θ that lose merges which the learners have received."""

from __future__ import annotations

from diloco.spec import RunSpec
from diloco_syncer.core.growth import MAX_GROWTH


class LostMerges:
    """
    Counts starts that lost merges, by how much each lets Θ grow.

    The learners continue with the parameters of the lost merges, so the first delta of each fragment
    contains what these did, and an outer step with α·(1 + μ) > 1 goes beyond it. Once each fragment was merged
    since the start, and a snapshot of that is durable, nothing of this is left.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._factor = max(1.0, spec.outer_learning_rate * (1 + spec.outer_momentum))
        self._all = frozenset(range(spec.fragments))
        self._growth = 1.0
        self._step = 0
        self._whole = 0
        """Global step after which each fragment was merged since the start, if `_missing` is empty."""
        self._missing = self._all
        self._over: list[tuple[int, float]] = []
        """Step of the durable snapshot that ended growth, and that growth."""

    def merged(self, step: int, fragment: int) -> None:
        """A fragment was merged at global step `step`."""
        self._step = step
        if fragment in self._missing:
            self._missing -= {fragment}
            self._whole = step

    def durable(self, step: int) -> None:
        """A snapshot of global step `step` is durable."""
        if not self._missing and step >= self._whole and self._growth > 1:
            self._over.append((step, self._growth))
            self._growth = 1.0

    def started(self, step: int) -> None:
        """The syncer started from a snapshot of `step`."""
        while self._over and step < self._over[-1][0]:  # that snapshot was lost
            self._growth *= self._over.pop()[1]
        if step < self._step:
            self._growth *= self._factor
        self._step, self._missing = step, self._all

    @property
    def may_halt(self) -> bool:
        """Whether growth that the syncer calls implausible has this cause."""
        return self._growth > MAX_GROWTH
