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
from diloco_syncer.core.learners import LearnerRecord

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
    _last: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _rounds: tuple[list[int], int] = field(default_factory=lambda: ([], 0))
    """What `_by_reach` was computed for: this runs after every event, and rounds change rarely."""
    _by_reach: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def forget(self, learner: str) -> None:
        """A new session has received nothing yet."""
        self._last.pop(learner, None)

    def update(
        self, learners: Iterable[LearnerRecord], *, in_flight: list[int], step: int, started: int
    ) -> list[ev.Decision]:
        """
        Announce to each connected learner what it does not know yet.

        Args:
            learners: connected ones.
            in_flight: fragments that may still be pulled, oldest round first.
            step: global step t.
            started: the last global step that was started.
        """
        if self._rounds != (in_flight, started):
            self._rounds, self._by_reach = (in_flight, started), {}
        by_reach = self._by_reach
        groups: dict[tuple[int, ...], list[str]] = {}
        for record in learners:
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

    def _fragments(self, in_flight: list[int], started: int, until: int) -> tuple[int, ...]:
        """Those of τ + 1 rounds at least, and of all steps up to `until`."""
        fragments, step = list(in_flight), started
        while (len(fragments) <= self.overlap or step < until) and step < self.steps:
            step += 1
            fragment = self.due(step)
            if fragment is not None:
                if fragment in fragments:
                    break
                fragments.append(fragment)
        return tuple(fragments)
