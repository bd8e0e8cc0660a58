"""
Which fragments each learner should keep host copies of. Pure.

A learner is pulled only for fragments that its newest report offers, and it offers what was
announced to it. An announcement that takes long to arrive must therefore reach further ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from diloco_syncer.core import events as ev
from diloco_syncer.core.learners import LearnerRecord, LearnerRecords

LAG_DECAY = 0.95
"""Factor per report by which a measured lag is forgotten, so that a single late report soon is."""


def lag_of(previous: float, *, started: int, global_step: int) -> float:
    """
    How many global steps begin before a report shows that an announcement was received.

    It is the round trip counted in global steps: the learner reports the newest step that was
    announced to it.
    """
    return max(float(max(0, started - global_step)), LAG_DECAY * previous)


@dataclass(slots=True)
class Announcements:
    """What was announced to each learner last; repeats nothing."""

    overlap: int
    steps: int
    due: Callable[[int], int | None]
    """The fragment of a global step; None: none is due."""
    next_due: Callable[[int], int]
    """The first step after a global step that may have one: H may be far larger than P."""
    _last: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _touched: set[str] = field(default_factory=set)
    """Learners for which the answer may differ although no round has changed."""
    _connected: list[LearnerRecord] = field(default_factory=list)
    """The list, by identity, that was announced to last."""
    _rounds: tuple[list[int], int, int] | None = None
    """The rounds that were announced last."""

    def forget(self, learner: str) -> None:
        """A new session has received nothing yet."""
        self._last.pop(learner, None)
        self._touched.add(learner)

    def touch(self, learner: str) -> None:
        """Its lag may have changed."""
        self._touched.add(learner)

    def update(
        self, learners: LearnerRecords, *, in_flight: list[int], step: int, started: int
    ) -> list[ev.Decision]:
        """
        Announce to each connected learner what it does not know yet.

        Args:
            learners: of the job; only connected ones get announcements.
            in_flight: fragments that may still be pulled, oldest round first.
            step: global step t.
            started: the last global step that was started.
        """
        by_reach: dict[int, tuple[int, ...]] = {}
        groups: dict[tuple[int, ...], list[str]] = {}
        for record in self._changed(learners, (in_flight, step, started)):
            until = step + math.ceil(record.lag) + 1
            fragments = by_reach.get(until)
            if fragments is None:
                fragments = by_reach[until] = self._fragments(in_flight, started, until)
            if self._last.get(record.name) != (step, fragments):
                self._last[record.name] = (step, fragments)
                groups.setdefault(fragments, []).append(record.name)
        return [
            ev.AnnounceFragments(learners=tuple(names), step=step, fragments=fragments)
            for fragments, names in groups.items()
        ]

    def _changed(
        self, learners: LearnerRecords, rounds: tuple[list[int], int, int]
    ) -> Iterable[LearnerRecord]:
        """Those whose announcement may differ: after most events, the learner of the event alone."""
        connected, touched = learners.connected(), sorted(self._touched)
        self._touched.clear()
        if connected is self._connected and rounds == self._rounds:
            records = (learners.by_name.get(name) for name in touched)
            return [r for r in records if r is not None and r.session is not None]
        self._connected, self._rounds = connected, rounds
        return connected

    def _fragments(self, in_flight: list[int], started: int, until: int) -> tuple[int, ...]:
        """Those of τ + 1 rounds at least, and of all steps up to `until`."""
        fragments, step = list(in_flight), self.next_due(started)
        while step <= self.steps and (len(fragments) <= self.overlap or step <= until):
            fragment = self.due(step)
            if fragment is not None:
                if fragment in fragments:
                    break
                fragments.append(fragment)
            step = self.next_due(step)
        return tuple(fragments)
