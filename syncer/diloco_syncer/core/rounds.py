"""
One round of one fragment: its members and its phase. Pure; the engine moves it.

    COLLECTING ──quorum──► GRACE ──deadline or all reported──► PULLING ──all contributed──► MERGING ──► MERGED
        ▲                                                         │                            │
        └──────────────── a member was lost and fewer than K are left ─────────────────────────┘
                          (K or more are left: PULLING again, next attempt)
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diloco.runtime.backoff import doubled
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import ConfirmedNorm, Merged
from diloco_syncer.core.upload_limits import LEAD, Stopwatch, UploadProgress, excess_seconds


class Phase(enum.Enum):
    """Progress of a round."""

    COLLECTING = "Collecting"
    GRACE = "Grace"
    PULLING = "Pulling"
    MERGING = "Merging"
    MERGED = "Merged"


RETRY_SECONDS = 0.05
MAX_RETRY_SECONDS = 5.0
"""Pause before an attempt that left fewer than K members is repeated; doubles up to the maximum."""


@dataclass(slots=True, kw_only=True)
class Round:
    """State of the round for global step `step`."""

    step: int
    fragment: int
    started: float
    phase: Phase = Phase.COLLECTING
    attempt: int = 0
    deadline: float | None = None
    """End of the grace window, monotonic."""
    retry_at: float = 0.0
    """No pull before this time: an attempt that failed for all its members is not repeated at once."""
    repeats: int = 0
    """How often fewer than K members were left."""
    losses: Counter[str] = field(default_factory=Counter)
    """How often each learner was lost as a member."""
    quorum_at: float | None = None
    pulled_at: float = 0.0
    grace_seconds: float = 0.0
    """How long the grace window lasted."""
    members: dict[str, UploadProgress] = field(default_factory=dict)
    """Members of this attempt and how far their uploads are."""
    contributions: dict[str, Contribution] = field(default_factory=dict)
    pending: int = 0
    """Members that can continue."""
    early: dict[str, Contribution] = field(default_factory=dict)
    """Headers whose report has not arrived."""
    held: Stopwatch = field(default_factory=Stopwatch)
    """While enough members of this attempt wait for others."""
    failure: str = ""
    """Why the last attempt lost a member."""
    merged: Merged | None = None
    _next_deadline: float | None = None
    """No pending member's deadline is earlier; None: not computed."""
    _held_from: float | None = None
    """No wait for a member that is waited for would have begun earlier, in one piece; None: none is."""
    _held: int = 0
    """Members that are waited for."""
    _behind: int = -1
    """Members at this position or before were waited for when that was last computed."""
    _positions: list[int] = field(default_factory=list)
    """Of the members, in order."""
    _moved: set[str] = field(default_factory=set)
    """Members whose position has changed since."""

    @property
    def open(self) -> bool:
        """Still collecting reports."""
        return self.phase in (Phase.COLLECTING, Phase.GRACE)

    @property
    def may_pull(self) -> bool:
        """The fragment may still be pulled."""
        return self.open or self.phase is Phase.PULLING

    @property
    def transferring(self) -> bool:
        """Members are uploading."""
        return self.phase in (Phase.PULLING, Phase.MERGING)

    @property
    def changes_parameters(self) -> bool:
        """At least one contribution has a weight."""
        return any(c.weight > 0 for c in self.contributions.values())

    def by_name(self) -> tuple[Contribution, ...]:
        """The contributions in the order of learner names."""
        return tuple(self.contributions[name] for name in sorted(self.contributions))

    # ------------------------------------------------------------ transitions

    def pull(self, members: Iterable[str], now: float) -> None:
        """Begin an attempt with these members."""
        self.phase = Phase.PULLING
        self.attempt += 1
        self.members = {name: UploadProgress.begin(now) for name in members}
        self.pending = len(self.members)
        self.contributions, self.early = {}, {}
        self.pulled_at = now
        self.held = Stopwatch()
        self.deadline = self._next_deadline = None
        self._begin_positions()

    def contributed(self, contribution: Contribution) -> None:
        """A member's header has arrived; its upload now waits for the other headers."""
        self.contributions[contribution.learner] = contribution
        upload = self.members[contribution.learner]
        self.pending -= upload.pending
        before, upload.waiting, upload.position = upload.position, True, LEAD
        self._move(contribution.learner, before, LEAD)

    def progressed(
        self,
        learner: str,
        received_bytes: int,
        *,
        waiting: bool,
        done: bool,
        now: float,
        position: int = 0,
    ) -> None:
        """A member's upload has come further."""
        upload = self.members[learner]
        self.pending -= upload.pending
        before = upload.position
        upload.progressed(received_bytes, waiting=waiting, done=done, now=now, position=position)
        self.pending += upload.pending
        self._move(learner, before, upload.position)
        if upload.pending and self._next_deadline is not None:
            self._next_deadline = min(self._next_deadline, upload.deadline)

    def remove(self, learner: str) -> None:
        """A member was lost."""
        self.losses[learner] += 1
        upload = self.members.pop(learner)
        self.pending -= upload.pending
        self._held -= upload.held.since is not None
        del self._positions[bisect_left(self._positions, upload.position)]
        self.contributions.pop(learner, None)
        self.early.pop(learner, None)

    def merge(self, now: float) -> None:
        """All headers are there: the uploads continue."""
        self.phase = Phase.MERGING
        self.held.run(False, now)
        for upload in self.members.values():
            upload.resume(now)
        self.pending = sum(upload.pending for upload in self.members.values())
        self._next_deadline = None
        self._begin_positions()

    def collect_again(self, now: float) -> None:
        """The attempt failed for too many members: after a pause, begin with the reports again."""
        self.members.clear()
        self.contributions.clear()
        self.pending = 0
        self.early.clear()
        self._begin_positions()
        self.phase = Phase.COLLECTING
        self.retry_at = now + doubled(RETRY_SECONDS, self.repeats, MAX_RETRY_SECONDS)
        self.repeats += 1
        self.attempt += 1
        self.deadline = self.quorum_at = None

    # ------------------------------------------------------------ lateness

    def update_hold(self, now: float, *, quorum: int) -> None:
        """Note for which members at least K of them, and half of all, wait now."""
        ahead = max(quorum, (len(self.members) + 1) // 2)
        behind = -1
        if self.transferring and ahead <= len(self._positions):
            behind = self._positions[-ahead] - LEAD
        changed = self._moved & self.members.keys() if behind == self._behind else self.members
        for name in changed:
            upload = self.members[name]
            held = upload.position <= behind
            if held != (upload.held.since is not None):
                upload.held.run(held, now)
                self._held += 1 if held else -1
                if upload.held.begun is not None:
                    begun = upload.held.begun
                    self._held_from = min(
                        begun, begun if self._held_from is None else self._held_from
                    )
        self._behind, self._moved = behind, set()
        if not self._held:
            self._held_from = None
        self.held.run(self._held > 0, now)

    def _begin_positions(self) -> None:
        self._positions, self._moved = [0] * len(self.members), set()
        self._behind, self._held, self._held_from = -1, 0, None

    def _move(self, learner: str, before: int, position: int) -> None:
        if position != before:
            del self._positions[bisect_left(self._positions, before)]
            insort(self._positions, position)
            self._moved.add(learner)

    def waited_seconds(
        self, learner: str, now: float, *, quorum: int, pauses: bool = True
    ) -> float:
        """
        What the others lose if this member is lost now: their wait for it, or the whole attempt.

        With a pause as if its own losses alone had made it grow, for one that is lost soon after each pull;
        `pauses` False: without.
        """
        member = self.members.get(learner)
        if member is not None and len(self.members) <= quorum:
            pause = doubled(RETRY_SECONDS, self.losses[learner], MAX_RETRY_SECONDS)
            return now - self.pulled_at + (pause if pauses else 0.0)
        if self.phase in (Phase.MERGING, Phase.MERGED):
            return now - self.pulled_at
        return member.held.read(now) if member is not None else 0.0

    def waits(self, now: float, *, window_seconds: float) -> dict[str, float]:
        """The seconds that this attempt took longer because of each member that it waited for."""
        excess = excess_seconds(
            took=now - self.pulled_at, held=self.held.read(now), window=window_seconds
        )
        held = {name: upload.held.read(now) for name, upload in self.members.items()}
        return {name: min(it, excess) for name, it in held.items() if min(it, excess) > 0}

    def late(self, now: float, *, hold_seconds: float) -> list[str]:
        """Members past their own deadline, and those for which the others waited `hold_seconds`."""
        if not self.transferring:
            return []
        return sorted(
            name
            for name, upload in self.members.items()
            if (upload.pending and now >= upload.deadline)
            or (upload.held.begun is not None and now >= upload.held.begun + hold_seconds)
        )

    def next_deadline(self, hold_seconds: float, now: float) -> float | None:
        """
        When `late` may next name a member, monotonic.

        The deadlines are read again when the earliest of them has come: uploads only move theirs
        to later times, and then this is too early by a wake-up, not by a decision.
        """
        if not self.transferring or not self.pending:
            return None
        if self._next_deadline is None or now >= self._next_deadline:
            self._next_deadline = min(d.deadline for d in self.members.values() if d.pending)
        if self._held_from is not None and now >= self._held_from + hold_seconds:
            begun = (upload.held.begun for upload in self.members.values())
            self._held_from = min((at for at in begun if at is not None), default=None)
        if self._held_from is None:
            return self._next_deadline
        return min(self._next_deadline, self._held_from + hold_seconds)

    def shift(self, seconds: float) -> None:
        """Move all times: the syncer itself was paused, and no member is late because of it."""
        self.started += seconds
        self.pulled_at += seconds
        self.quorum_at = None if self.quorum_at is None else self.quorum_at + seconds
        self.deadline = None if self.deadline is None else self.deadline + seconds
        self.held.shift(seconds)
        self._held_from = None if self._held_from is None else self._held_from + seconds
        for upload in self.members.values():
            upload.shift(seconds)
        self._next_deadline = None


def merge_line(
    round_: Round, merged: Merged, *, quorum: int, guard: float, receivers: int, now: float
) -> dict[str, Any]:
    """The fields of a `merge` line of events.jsonl: what the audit needs to judge it."""
    confirmed = {found.learner: found for found in merged.confirmed}
    return {
        "step": round_.step,
        "fragment": round_.fragment,
        "attempt": round_.attempt,
        "quorum": quorum,
        "quorumSeconds": round((round_.quorum_at or now) - round_.started, 6),
        "graceSeconds": round(round_.grace_seconds, 6),
        "syncSeconds": round(now - round_.pulled_at, 6),
        "bytesUp": merged.bytes_up,
        "bytesDown": merged.bytes_result * receivers,
        "deltaNorm": merged.delta_norm,
        "guard": guard,
        **({"buffers": True} if any(c.buffers for c in round_.by_name()) else {}),
        "members": [_member(c, confirmed.get(c.learner), guard) for c in round_.by_name()],
    }


def _member(c: Contribution, found: ConfirmedNorm | None, guard: float) -> dict[str, Any]:
    return {
        "learner": c.learner,
        "incarnation": c.incarnation,
        "step": c.local_step,
        "steps": c.steps,
        "tokens": c.tokens,
        "weight": c.weight,
        "base": None if c.base is None else c.base[1],
        "norm": 0.0 if found is None else found.norm,
        "deviation": 0.0 if found is None else found.deviation,
        "ofMedian": guard * c.excess,
        "clipped": c.clipped,
    }
