"""
How long the upload of one member may take. Pure.

Two limits, both per member, and neither is extended by the progress of another member:
  - its own: a start-up time, and then at least MIN_BYTES_PER_SECOND;
  - while enough others have delivered: what the round can spare (`hold_seconds`), and less if the
    member needs that long again and again (`free_seconds`).
A member that waits for slower ones (the window of the merge is full) is not late.
"""

from __future__ import annotations

from dataclasses import dataclass

START_SECONDS = 30.0
"""From the pull to the first byte, and the longest pause of an upload that was fast before."""

MIN_BYTES_PER_SECOND = 128 * 1024.0
"""A slower upload would take minutes per megabyte; no job can train over such a link."""

MIN_HOLD_SECONDS = 3.0
MAX_HOLD_SECONDS = 30.0

HOLD_WINDOWS = 2.0
"""Multiple of the time that overlap hides, τ·ξ_step, for which one member may delay the others."""

FREE_WINDOWS = 1.25
"""Multiple of τ·ξ_step for which one member may delay the others in every merge."""


def free_seconds(*, overlap: int, step_seconds: float | None) -> float:
    """
    How long the others may wait for a member again and again.

    Paper leaves this open: a member whose uploads take more than τ steps delays every merge that it
    is part of. A quarter more is left for jitter, so that a round trip of τ steps is none too long.
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
    held_seconds: float = 0.0
    """For how long the others have waited for it."""

    @classmethod
    def begin(cls, now: float) -> UploadProgress:
        """A member that was pulled now."""
        return cls(begun=now, deadline=now + START_SECONDS)

    @property
    def pending(self) -> bool:
        """Others wait for it."""
        return not (self.done or self.waiting)

    def progressed(self, received_bytes: int, *, waiting: bool, done: bool, now: float) -> None:
        """Account for the bytes received so far; older states are ignored."""
        if received_bytes < self.received_bytes:
            return
        earned = (received_bytes - self.received_bytes) / MIN_BYTES_PER_SECOND
        self.received_bytes = received_bytes
        if self.waiting or waiting:
            earned = START_SECONDS  # the wait was not its own
        # A fast beginning must not pay for a long silence: never more than the start-up time ahead.
        self.deadline = max(self.deadline, min(self.deadline + earned, now + START_SECONDS))
        self.waiting, self.done = waiting, self.done or done

    def resume(self, now: float) -> None:
        """What it waited for has come: from now on it delivers."""
        self.waiting = False
        self.deadline = max(self.deadline, now + START_SECONDS)

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused: give the time back."""
        self.begun += seconds
        self.deadline += seconds
