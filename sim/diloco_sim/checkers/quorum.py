"""No merge has fewer learners than the quorum of the job."""

from __future__ import annotations

from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_syncer.core.events import BeginMerge


class Quorum:
    """
    Args:
        quorum: K of the spec; what the lines state is not believed.
    """

    observes = (dict, BeginMerge)

    def __init__(self, quorum: int) -> None:
        self._quorum = quorum

    def observe(self, event: dict[str, Any] | BeginMerge, now: float) -> None:
        """See `Checker`."""
        if isinstance(event, BeginMerge):
            self._count({c.learner for c in event.contributions}, event.round, now)
        elif event.get("event") == "merge":
            self._count({member["learner"] for member in event["members"]}, event["step"], now)

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _count(self, learners: set[str], step: int, now: float) -> None:
        if len(learners) < self._quorum:
            raise Violation(
                "quorum",
                f"the merge has {len(learners)} learners, the quorum is {self._quorum}",
                step=step,
                now=now,
            )
