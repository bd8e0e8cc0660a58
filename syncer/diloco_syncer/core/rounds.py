"""
One round of one fragment: its members and its phase. Pure; the engine moves it.

    COLLECTING ──quorum──► GRACE ──deadline or all reported──► PULLING ──all contributed──► MERGING ──► MERGED
        ▲                                                         │                            │
        └──────────────── a member was lost and fewer than K are left ─────────────────────────┘
                          (K or more are left: PULLING again, next attempt)
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diloco.runtime.backoff import doubled
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import ConfirmedNorm, Merged
from diloco_syncer.core.upload_limits import UploadProgress


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
    """Members for which others wait."""
    early: dict[str, Contribution] = field(default_factory=dict)
    """Headers whose report has not arrived."""
    held_since: float | None = None
    """Since when enough members wait for the rest; None: they do not."""
    failure: str = ""
    """Why the last attempt lost a member."""
    merged: Merged | None = None
    _next_deadline: float | None = None
    """No pending member's deadline is earlier; None: not computed."""

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
        self.deadline = self.held_since = self._next_deadline = None

    def contributed(self, contribution: Contribution) -> None:
        """A member's header has arrived; its upload now waits for the other headers."""
        self.contributions[contribution.learner] = contribution
        upload = self.members[contribution.learner]
        self.pending -= upload.pending
        upload.waiting = True

    def progressed(
        self, learner: str, received_bytes: int, *, waiting: bool, done: bool, now: float
    ) -> None:
        """A member's upload has come further."""
        upload = self.members[learner]
        self.pending -= upload.pending
        upload.progressed(received_bytes, waiting=waiting, done=done, now=now)
        self.pending += upload.pending
        if upload.pending and self._next_deadline is not None:
            self._next_deadline = min(self._next_deadline, upload.deadline)

    def remove(self, learner: str) -> None:
        """A member was lost."""
        self.losses[learner] += 1
        self.pending -= self.members.pop(learner).pending
        self.contributions.pop(learner, None)
        self.early.pop(learner, None)

    def merge(self, now: float) -> None:
        """All headers are there: the uploads continue."""
        self.phase, self.held_since = Phase.MERGING, None
        for upload in self.members.values():
            upload.resume(now)
        self.pending = sum(upload.pending for upload in self.members.values())
        self._next_deadline = None

    def collect_again(self, now: float) -> None:
        """The attempt failed for too many members: after a pause, begin with the reports again."""
        self.members.clear()
        self.contributions.clear()
        self.pending = 0
        self.early.clear()
        self.phase = Phase.COLLECTING
        self.retry_at = now + doubled(RETRY_SECONDS, self.repeats, MAX_RETRY_SECONDS)
        self.repeats += 1
        self.attempt += 1
        self.deadline = self.quorum_at = self.held_since = None

    # ------------------------------------------------------------ lateness

    def update_hold(self, now: float, *, quorum: int) -> None:
        """Note whether at least K members, and half of all, now wait for the rest."""
        ahead = len(self.members) - self.pending
        if not self.pending or ahead < max(quorum, (len(self.members) + 1) // 2):
            self.held_since = None
        elif self.held_since is None:
            self.held_since = now

    def note_wait(self, learner: str, now: float) -> None:
        """A member delivers now what the others may have waited for."""
        upload = self.members[learner]
        if upload.pending and self.held_since is not None:
            upload.held_seconds += now - self.held_since

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
        pending = member is not None and member.pending
        return now - self.held_since if pending and self.held_since is not None else 0.0

    def late(self, now: float, *, hold_seconds: float) -> list[str]:
        """Members past their own deadline, and all for which the others waited `hold_seconds`."""
        if not self.transferring:
            return []
        held = self.held_since is not None and now >= self.held_since + hold_seconds
        return sorted(
            name
            for name, upload in self.members.items()
            if upload.pending and (held or now >= upload.deadline)
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
        if self.held_since is None:
            return self._next_deadline
        return min(self._next_deadline, self.held_since + hold_seconds)

    def shift(self, seconds: float) -> None:
        """Move all times: the syncer itself was paused, and no member is late because of it."""
        self.started += seconds
        self.pulled_at += seconds
        self.quorum_at = None if self.quorum_at is None else self.quorum_at + seconds
        self.deadline = None if self.deadline is None else self.deadline + seconds
        self.held_since = None if self.held_since is None else self.held_since + seconds
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
