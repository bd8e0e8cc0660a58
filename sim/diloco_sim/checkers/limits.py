"""Only learners that the numbers in force allow join and are merged; the document's numbers come into force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diloco_sim.checkers.checker import Violation


class Limits:
    """
    Follows the numbers of learners in the journal: those of the last start or change.

    Args:
        wanted: those that must be in force now; None: they may not be known to the syncer yet.
    """

    observes = (dict,)

    def __init__(self, wanted: Callable[[], Mapping[str, int] | None]) -> None:
        self._wanted = wanted
        self._limits: Mapping[str, int] = {}

    def observe(self, event: dict[str, Any], now: float) -> None:
        """See `Checker`."""
        match event.get("event"):
            case "start" | "limits":
                self._limits = event["learners"]
            case "join":
                self._check(event["learner"], "joins", event, now)
            case "merge":
                for member in event["members"]:
                    self._check(member["learner"], "is merged", event, now)

    def finish(self, now: float) -> None:
        """See `Checker`."""
        wanted = self._wanted()
        if wanted is not None and wanted != self._limits:
            sentence = (
                f"the spec document has {dict(wanted)} learners, in force are {dict(self._limits)}"
            )
            raise Violation("limits", sentence, step=0, now=now)

    def _check(self, learner: str, what: str, event: dict[str, Any], now: float) -> None:
        region, _, index = learner.partition("/")
        if int(index) >= self._limits.get(region, 0):
            sentence = f"{learner} {what}, the job has {dict(self._limits)} learners"
            raise Violation("limits", sentence, step=event["step"], now=now)
