"""Only learners that the numbers in force allow join and are merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_sim.checkers.checker import Violation


class Limits:
    """Follows the numbers of learners in the journal: those of the last start or change."""

    observes = (dict,)

    def __init__(self) -> None:
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

    def _check(self, learner: str, what: str, event: dict[str, Any], now: float) -> None:
        region, _, index = learner.partition("/")
        if int(index) >= self._limits.get(region, 0):
            sentence = f"{learner} {what}, the job has {dict(self._limits)} learners"
            raise Violation("limits", sentence, step=event["step"], now=now)
