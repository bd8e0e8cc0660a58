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
from diloco_syncer.core.events import ConfirmedNorm, Merged, Progress
from diloco_syncer.core.upload_limits import Stopwatch, UploadProgress, allowed_seconds


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
    pulled: set[str] = field(default_factory=set)
    """Learners that were members of any attempt."""
    clock: dict[str, int] = field(default_factory=dict)
    """t_m of the newest report of each learner that trained, at the last pull."""
    grace_seconds: float = 0.0
    """How long the grace window lasted."""
    members: dict[str, UploadProgress] = field(default_factory=dict)
    """Members of this attempt and how far their uploads are."""
    contributions: dict[str, Contribution] = field(default_factory=dict)
    pending: int = 0
    """Members for which others wait."""
    early: dict[str, Contribution] = field(default_factory=dict)
    """Headers whose report has not arrived."""
    held: Stopwatch = field(default_factory=Stopwatch)
    """Runs while enough members of this attempt wait for the rest."""
    failure: str = ""
    """Why the last attempt lost a member."""
    merged: Merged | None = None
    _next_deadline: float | None = None
    """No pending member's deadline is earlier; None: not computed."""
    _most_ahead: float = 0.0
    """No pending member is `ahead` by more."""
    _most: int = 1
    """At least K of the members, and half of all."""

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
        self.pulled.update(self.members)
        self.pending = len(self.members)
        self.contributions, self.early = {}, {}
        self.pulled_at = now
        self.held, self._most_ahead = Stopwatch(), 0.0
        self.deadline = self._next_deadline = None

    def contributed(self, contribution: Contribution, now: float) -> None:
        """A member's header has arrived; its upload now waits for the other headers."""
        self.contributions[contribution.learner] = contribution
        upload = self.members[contribution.learner]
        self._not_pending(upload, now)
        upload.waiting, upload.header_at = True, now
        upload.awaited_seconds = upload.excused_seconds = 0.0

    def progressed(self, event: Progress, now: float) -> None:
        """A member's upload has come further."""
        upload = self.members[event.learner]
        self._not_pending(upload, now)
        upload.progressed(event, now)
        self._pending_again(upload, now)
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
        self.phase = Phase.MERGING
        self.held.run(False, now)
        for upload in self.members.values():
            self._not_pending(upload, now)
            upload.resume(now)
            self._pending_again(upload, now)
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
        self.held.run(False, now)
        self.deadline = self.quorum_at = None

    # ------------------------------------------------------------ lateness

    def update_hold(self, now: float, *, quorum: int) -> None:
        """Note whether at least K members, and half of all, now wait for the rest."""
        self._most = max(quorum, (len(self.members) + 1) // 2)
        ahead = len(self.members) - self.pending
        self.held.run(self.transferring and self.pending > 0 and ahead >= self._most, now)

    def _not_pending(self, upload: UploadProgress, now: float) -> None:
        """The others do not wait for this member, until `_pending_again`."""
        if upload.pending:
            self.pending -= 1
            upload.held += self.held.read(now) - upload.held_from

    def _pending_again(self, upload: UploadProgress, now: float) -> None:
        """The others may wait for it from now on, unless it waits for them or has delivered."""
        if upload.pending:
            self.pending += 1
            upload.held_from = self.held.read(now)
            self._most_ahead = max(self._most_ahead, upload.ahead)

    def _held_seconds(self, upload: UploadProgress, now: float) -> float:
        """For how long the others have waited for this member in this attempt."""
        return self.held.read(now) + upload.ahead if upload.pending else upload.held

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
        return self._held_seconds(member, now) if member is not None else 0.0

    def late_seconds(self, window_seconds: float) -> dict[str, float]:
        """What each member cost the others that needed more than it may, once all have delivered."""
        usual = self._usual_seconds(self.members.values())
        allowed = allowed_seconds(usual=usual, window=window_seconds)
        own = {name: upload.own_seconds for name, upload in self.members.items()}
        beyond = max(usual, window_seconds)
        return {name: seconds - beyond for name, seconds in own.items() if seconds > allowed}

    def _usual_seconds(self, uploads: Iterable[UploadProgress]) -> float:
        """What most members need, of these that have delivered or are held back."""
        seconds = sorted(upload.usual_seconds for upload in uploads)
        return seconds[self._most - 1] if len(seconds) >= self._most else 0.0

    def late(self, now: float, *, hold_seconds: float, window_seconds: float) -> list[str]:
        """
        Members past their own deadline, and all for which the others waited `hold_seconds`.

        Not before the attempt has taken what a member may always take: `window_seconds` are τ steps.
        """
        if not self.transferring:
            return []
        allowed = self._allowed_until(window_seconds)
        return sorted(
            name
            for name, upload in self.members.items()
            if upload.pending
            and (
                now >= upload.deadline
                or now >= max(allowed, self.held.reaches(hold_seconds - upload.ahead))
            )
        )

    def next_deadline(self, hold_seconds: float, window_seconds: float, now: float) -> float | None:
        """
        When `late` may next name a member, monotonic.

        The deadlines are read again when the earliest of them has come: uploads only move theirs
        to later times, and then this is too early by a wake-up, not by a decision.
        """
        if not self.transferring or not self.pending:
            return None
        if self._next_deadline is None or now >= self._next_deadline:
            self._next_deadline = min(d.deadline for d in self.members.values() if d.pending)
        if self.held.since is None:
            return self._next_deadline
        if now >= self._hold_ends(hold_seconds):
            self._most_ahead = max(m.ahead for m in self.members.values() if m.pending)
        hold_ends = self._hold_ends(hold_seconds)
        if now >= hold_ends:
            hold_ends = max(hold_ends, self._allowed_until(window_seconds))
        return min(self._next_deadline, hold_ends)

    def _hold_ends(self, hold_seconds: float) -> float:
        """The others will not have waited for a pending member for too long before."""
        return self.held.reaches(hold_seconds - self._most_ahead)

    def _allowed_until(self, window_seconds: float) -> float:
        usual = self._usual_seconds(m for m in self.members.values() if not m.pending)
        allowed = allowed_seconds(usual=usual, window=window_seconds)
        return self.pulled_at + allowed

    def shift(self, seconds: float) -> None:
        """Move all times: the syncer itself was paused, and no member is late because of it."""
        self.started += seconds
        self.pulled_at += seconds
        self.quorum_at = None if self.quorum_at is None else self.quorum_at + seconds
        self.deadline = None if self.deadline is None else self.deadline + seconds
        self.held.shift(seconds)
        for upload in self.members.values():
            upload.shift(seconds)
        self._next_deadline = None


def merge_line(
    round_: Round, merged: Merged, *, quorum: int, guard: float, receivers: int, now: float
) -> dict[str, Any]:
    """The fields of a `merge` line of events.jsonl: what the audit needs to judge it."""
    confirmed = {found.learner: found for found in merged.confirmed}
    abandoned = ", ".join(sorted(round_.pulled - round_.contributions.keys()))
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
        "clock": round_.clock,
        **({"abandoned": abandoned} if abandoned else {}),
        **({"digests": merged.digests.hex()} if merged.digests else {}),
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
        **({"digests": c.digests.hex()} if c.digests else {}),
    }
