"""
How long the upload of one member may take. Pure.

Two limits, both per member, and neither is extended by the progress of another member:
  - its own: a start-up time, and then at least MIN_BYTES_PER_SECOND;
  - while enough others wait for it, added up over the attempt: what the round can spare (`hold_seconds`).
What it needed beyond `allowed_seconds` is charged to it once the round is merged.
A member that waits for slower ones (the window of the merge is full) is not late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco_syncer.core.events import Progress

START_SECONDS = 30.0
"""From the pull to the first byte, and the longest pause of an upload that was fast before."""

MIN_BYTES_PER_SECOND = 128 * 1024.0
"""A slower upload would take minutes per megabyte; no job can train over such a link."""

MIN_HOLD_SECONDS = 3.0
MAX_HOLD_SECONDS = 30.0

HOLD_WINDOWS = 2.0
"""Multiple of the time that overlap hides, τ·ξ_step, for which one member may delay the others."""

FREE_WINDOWS = 1.25
"""Multiple of τ·ξ_step, and of what most others need, that a member may take for each merge."""

JITTER_SECONDS = 0.25
"""How much longer than most others a member may take for each merge, however short the steps are."""


def free_seconds(*, overlap: int, step_seconds: float | None) -> float:
    """
    How much longer than a merge the probe of an ejected learner may take.

    A quarter more than τ steps is left for jitter, so that a round trip of τ steps is none too long.
    """
    hold = hold_seconds(overlap=overlap, step_seconds=step_seconds)
    return min(hold, max(MIN_HOLD_SECONDS, FREE_WINDOWS * overlap * (step_seconds or 0.0)))


def hold_seconds(*, overlap: int, step_seconds: float | None) -> float:
    """
    How long the members that have delivered wait for the others.

    Paper leaves this open: it bounds the wait for reports (Eq 3), not for the transfer. The same
    slack is used, twice: a round that takes τ steps causes no delay, so up to 2τ costs at most τ.
    """
    window = HOLD_WINDOWS * overlap * (step_seconds or 0.0)
    return min(MAX_HOLD_SECONDS, max(MIN_HOLD_SECONDS, window))


def allowed_seconds(*, usual: float, window: float) -> float:
    """
    How long a member may take for its upload without cost to the others.

    Paper leaves this open: a member whose uploads take more than τ steps delays every merge that it
    is part of. A quarter more is left for jitter, so that a round trip of τ steps is none too long.
    If most members need longer than τ steps, that is the fault of none.

    Args:
        usual: seconds in which most members can deliver, without their waits for others.
        window: seconds of τ steps.
    """
    return max(FREE_WINDOWS * max(window, usual), usual + JITTER_SECONDS)


@dataclass(slots=True)
class Stopwatch:
    """Adds up the time during which something holds."""

    seconds: float = 0.0
    """Until it last stopped."""
    since: float | None = None
    """None: it does not run."""

    def run(self, running: bool, now: float) -> None:
        """It runs from now on, or does not."""
        if not running and self.since is not None:
            self.seconds, self.since = self.read(now), None
        elif running and self.since is None:
            self.since = now

    def read(self, now: float) -> float:
        """The time so far."""
        return self.seconds + (now - self.since if self.since is not None else 0.0)

    def reaches(self, seconds: float) -> float:
        """When it shows this if it does not stop before."""
        return math.inf if self.since is None else self.since + seconds - self.seconds

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused: that time does not count."""
        self.since = None if self.since is None else self.since + seconds


@dataclass(slots=True)
class UploadProgress:
    """Progress of one member's upload."""

    begun: float
    """Time of the pull, monotonic."""
    deadline: float
    """Its own limit, monotonic; moves with what it delivers."""
    received_bytes: int = 0
    waiting: bool = False
    """It waits for other members, not they for it."""
    done: bool = False
    header_at: float | None = None
    """When its header arrived, monotonic."""
    awaited_seconds: float = 0.0
    expected_seconds: float = 0.0
    """See `Progress`."""
    excused_seconds: float = 0.0
    """Pauses of the syncer while it waited for this upload after the header."""
    held: float = 0.0
    """For how long the others had waited for it when it last stopped to be pending ..."""
    held_from: float = 0.0
    """... and what the round's stopwatch of waits showed when it last became pending."""

    @classmethod
    def begin(cls, now: float) -> UploadProgress:
        """A member that was pulled now."""
        return cls(begun=now, deadline=now + START_SECONDS)

    @property
    def pending(self) -> bool:
        """Others wait for it."""
        return not (self.done or self.waiting)

    @property
    def own_seconds(self) -> float:
        """What the upload of a member took, without its waits for others and for the syncer."""
        return self._header_seconds + max(0.0, self.awaited_seconds - self.excused_seconds)

    @property
    def usual_seconds(self) -> float:
        """What the upload would have taken, at its own rate, if it had not been held back."""
        if self.excused_seconds:  # a pause of the syncer may be in its rate
            return self.own_seconds
        return max(self.own_seconds, self._header_seconds + self.expected_seconds)

    @property
    def _header_seconds(self) -> float:
        return 0.0 if self.header_at is None else self.header_at - self.begun

    @property
    def ahead(self) -> float:
        """By how much the others have waited for this pending member longer than the round's stopwatch shows."""
        return self.held - self.held_from

    def progressed(self, event: Progress, now: float) -> None:
        """Account for what was received so far; older states are ignored."""
        if event.received_bytes < self.received_bytes:
            return
        earned = (event.received_bytes - self.received_bytes) / MIN_BYTES_PER_SECOND
        self.received_bytes = event.received_bytes
        self.awaited_seconds = max(self.awaited_seconds, event.awaited_seconds)
        self.expected_seconds = max(self.expected_seconds, event.expected_seconds)
        if self.waiting or event.waiting:
            earned = START_SECONDS  # the wait was not its own
        # A fast beginning must not pay for a long silence: never more than the start-up time ahead.
        self.deadline = max(self.deadline, min(self.deadline + earned, now + START_SECONDS))
        self.waiting, self.done = event.waiting, self.done or event.done

    def resume(self, now: float) -> None:
        """What it waited for has come: from now on it delivers."""
        self.waiting = False
        self.deadline = max(self.deadline, now + START_SECONDS)

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused: give the time back."""
        self.begun += seconds
        self.deadline += seconds
        if self.header_at is not None:
            self.header_at += seconds
            self.excused_seconds += seconds if self.pending else 0.0
