"""What people see is true: the state is never Training while nothing can merge, and Waiting has a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Moment, ReportArrived


class Status:
    """
    Args:
        quorum: K of the spec.
        explained_gap: from the time of the last merge and now: how long there need be no merge; after that,
            something is wrong, and the status must show it.
    """

    observes = (dict, Moment, ReportArrived)

    def __init__(self, quorum: int, explained_gap: Callable[[float, float], float]) -> None:
        self._quorum, self._explained_gap = quorum, explained_gap
        self._connected: dict[str, int] = {}
        """Learner → incarnation of its session."""
        self._since = 0.0
        """From when a merge is missing: the last one or the start, later by the time without a quorum."""
        self._now = 0.0
        """Time of the last event."""
        self._reported: set[str] = set()
        """Learners that have reported in their session."""

    def observe(self, event: dict[str, Any] | Moment | ReportArrived, now: float) -> None:
        """See `Checker`."""
        if len(self._reported) < self._quorum:
            self._since += now - self._now
        self._now = now
        match event:
            case Moment():
                self._judge(event, now)
            case {"event": "start"}:
                self._connected.clear()
                self._reported.clear()
                self._since = now
            case ReportArrived(learner=learner):
                self._reported.update({learner} & self._connected.keys())
            case {"event": "initialised" | "merge"}:
                self._since = now
            case {"event": "join", "learner": learner, "incarnation": incarnation}:
                self._connected[learner] = incarnation
                self._reported.discard(learner)
            case {"event": "leave", "learner": learner, "incarnation": incarnation}:
                if self._connected.get(learner) == incarnation:
                    del self._connected[learner]
                    self._reported.discard(learner)

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _judge(self, moment: Moment, now: float) -> None:
        if moment.state == "Waiting" and not moment.waiting_for:
            self._fail("the state is Waiting for nothing", moment.step, now)
        if moment.state != "Training":
            return
        if len(self._connected) < self._quorum:
            self._fail(
                f"the state is Training with {len(self._connected)} learners, the quorum is {self._quorum}",
                moment.step,
                now,
            )
        seconds = now - self._since
        if seconds > (explained := self._explained_gap(self._since, now)):
            self._fail(
                f"the state is Training, there was no merge for {seconds:.0f} s and "
                f"{explained:.0f} s explain it",
                moment.step,
                now,
            )

    def _fail(self, sentence: str, step: int, now: float) -> None:
        raise Violation("status", sentence, step=step, now=now)
