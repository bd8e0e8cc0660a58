"""
How long the copy for a local checkpoint may stop a step, and how often an attempt is abandoned. Pure.

The copy is made beside one forward and backward pass, and the optimizer waits for what is missing then
(docs/adr/0014-local-checkpoint-copy.md). The wait is at most a share of a step: an attempt that needs
longer is abandoned, and the next step begins another. Some copies never fit, however often they are
tried, so the optimizer waits for the last attempt as long as it takes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Self

# Paper leaves this open: it has no local checkpoints.
SHARE = 0.05
"""The most of a step that the copy may stop it."""

ATTEMPTS = 4
"""As many attempts in a row are abandoned; the next is waited for."""

STEPS = 15
"""Number of steps whose median is the time of a step: a long one, such as the first, does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBudget:
    """The time for copies, from the steps so far."""

    steps: tuple[float, ...] = ()
    """Seconds of the newest steps, the oldest first, without what copies stopped them."""
    abandoned: int = 0
    """Attempts in a row that were abandoned."""

    @property
    def step_seconds(self) -> float:
        """Of a usual step; 0: none is known."""
        return statistics.median(self.steps) if self.steps else 0.0

    def wait_seconds(self, *, spent_seconds: float) -> float | None:
        """
        How long the optimizer may wait now; None: as long as it takes.

        Args:
            spent_seconds: for which this attempt stopped the training thread before.
        """
        if self.abandoned >= ATTEMPTS:
            return None
        return max(0.0, SHARE * self.step_seconds - spent_seconds)

    def after_step(self, seconds: float) -> Self:
        """A step ended that took this long."""
        return replace(self, steps=(*self.steps, seconds)[-STEPS:])

    def after_abandoned(self) -> Self:
        """The attempt was abandoned."""
        return replace(self, abandoned=self.abandoned + 1)

    def after_copied(self, *, spent_seconds: float) -> Self:
        """
        The attempt succeeded.

        If it needed more than the share, the next checkpoint has one attempt within it before the
        optimizer waits again: further ones would most likely be in vain too.

        Args:
            spent_seconds: for which it stopped the training thread.
        """
        within = spent_seconds <= SHARE * self.step_seconds
        return replace(self, abandoned=0 if within else ATTEMPTS - 1)
