"""
Only learners that are connected are merged, each in its newest incarnation; impersonators never connect.

A restored copy of the syncer's files issues numbers again that were used after it was made.
"""

from __future__ import annotations

from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Admitted, Restored


class Incarnations:
    """Follows joins and leaves in the journal; a start of the syncer ends every session."""

    observes = (dict, Admitted, Restored)

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._connected: dict[str, int] = {}
        """Learner → incarnation of its session."""
        self._epoch = 0

    def observe(self, event: dict[str, Any] | Admitted | Restored, now: float) -> None:
        """See `Checker`."""
        if isinstance(event, Restored):
            self._newest.clear()
            self._epoch = 0
            return
        if isinstance(event, Admitted):
            raise Violation(
                "incarnations",
                f"an impersonator is admitted as {event.learner}, incarnation {event.incarnation}",
                step=0,
                now=now,
            )
        match event.get("event"):
            case "start":
                self._connected.clear()
                if event["epoch"] <= self._epoch:
                    self._fail(f"epoch {event['epoch']} comes after {self._epoch}", event, now)
                self._epoch = event["epoch"]
            case "join":
                learner, incarnation = event["learner"], event["incarnation"]
                newest = self._newest.get(learner, 0)
                if incarnation < newest:
                    self._fail(
                        f"incarnation {incarnation} of {learner} joins after {newest}", event, now
                    )
                if event.get("fresh") and incarnation == newest:
                    self._fail(
                        f"a new process of {learner} has incarnation {incarnation} of its predecessor",
                        event,
                        now,
                    )
                self._newest[learner] = self._connected[learner] = incarnation
            case "leave":
                if self._connected.get(event["learner"]) == event["incarnation"]:
                    del self._connected[event["learner"]]
            case "merge":
                self._merge(event, now)

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _merge(self, event: dict[str, Any], now: float) -> None:
        if event["epoch"] != self._epoch:
            self._fail(f"a merge of epoch {event['epoch']} in epoch {self._epoch}", event, now)
        for member in event["members"]:
            learner, incarnation = member["learner"], member["incarnation"]
            connected = self._connected.get(learner)
            if connected is None:
                self._fail(f"{learner} is merged while it is not connected", event, now)
            elif connected != incarnation:
                self._fail(
                    f"incarnation {incarnation} of {learner} is merged, {connected} is connected",
                    event,
                    now,
                )

    def _fail(self, sentence: str, event: dict[str, Any], now: float) -> None:
        raise Violation("incarnations", sentence, step=event.get("step", 0), now=now)
