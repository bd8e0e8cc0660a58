"""
How long the upload of one member may take. Pure.

Two limits, both per member, and neither is extended by the progress of another member:
  - its own: a start-up time, and then at least MIN_BYTES_PER_SECOND;
  - while enough others wait for it, added up over the attempt: what the round can spare
    (`hold_seconds`). What the round took too long because of it (`excess_seconds`) is charged to it.
A member that waits for slower ones (the window of the merge is full) is not late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

START_SECONDS = 30.0
"""From the pull to the first byte, and the longest pause of an upload that was fast before."""

MIN_BYTES_PER_SECOND = 128 * 1024.0
"""A slower upload would take minutes per megabyte; no job can train over such a link."""

MIN_HOLD_SECONDS = 3.0
MAX_HOLD_SECONDS = 30.0

HOLD_WINDOWS = 2.0
"""Multiple of the time that overlap hides, τ·ξ_step, for which one member may delay the others."""

LEAD = 3
"""
Quarters of the window of the merge by which the others are ahead of a member when they wait for it: they soon
stop, at a lead of 4. A header puts a member as far ahead of those whose header is missing.
"""

DELIVERED = 1 << 62
"""Position of a member that has delivered."""

FREE_WINDOWS = 1.05
"""Multiple of τ·ξ_step that every merge may take because of a member."""

SPREAD = 1.25
"""
Multiple of what a merge takes without waiting for a member that it may take with it, and of τ·ξ_step
that the probe of an ejected learner may take.
"""


def free_seconds(*, overlap: int, step_seconds: float | None) -> float:
    """
    How much longer than a merge the probe of an ejected learner may take.

    A quarter more than τ steps is left for jitter, so that a round trip of τ steps is none too long.
    """
    hold = hold_seconds(overlap=overlap, step_seconds=step_seconds)
    return min(hold, max(MIN_HOLD_SECONDS, SPREAD * overlap * (step_seconds or 0.0)))


def excess_seconds(*, took: float, held: float, window: float) -> float:
    """
    What a round took longer than it should because others waited for some of its members.

    Paper leaves this open. A round that takes τ steps (`window`) delays none. If its members need
    longer, even those that are not waited for, no member is charged, and a quarter more is jitter.
    """
    return max(0.0, took - max(FREE_WINDOWS * window, SPREAD * (took - held)))


def hold_seconds(*, overlap: int, step_seconds: float | None) -> float:
    """
    How long the members that have delivered wait for the others.

    Paper leaves this open: it bounds the wait for reports (Eq 3), not for the transfer. The same
    slack is used, twice: a round that takes τ steps causes no delay, so up to 2τ costs at most τ.
    """
    window = HOLD_WINDOWS * overlap * (step_seconds or 0.0)
    return min(MAX_HOLD_SECONDS, max(MIN_HOLD_SECONDS, window))


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

    @property
    def begun(self) -> float | None:
        """When it would have begun if it had not stopped meanwhile; None: it does not run."""
        return None if self.since is None else self.since - self.seconds

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
    position: int = 0
    """How far it is, in quarters of the window of the merge."""
    held: Stopwatch = field(default_factory=Stopwatch)
    """While the others wait for it."""

    @classmethod
    def begin(cls, now: float) -> UploadProgress:
        """A member that was pulled now."""
        return cls(begun=now, deadline=now + START_SECONDS)

    @property
    def pending(self) -> bool:
        """Others wait for it."""
        return not (self.done or self.waiting)

    def progressed(
        self,
        received_bytes: int,
        *,
        waiting: bool,
        done: bool,
        now: float,
        position: int = 0,
    ) -> None:
        """Account for what was received so far; older states are ignored."""
        if received_bytes < self.received_bytes:
            return
        earned = (received_bytes - self.received_bytes) / MIN_BYTES_PER_SECOND
        self.received_bytes = received_bytes
        if self.waiting or waiting:
            earned = START_SECONDS  # the wait was not its own
        # A fast beginning must not pay for a long silence: never more than the start-up time ahead.
        self.deadline = max(self.deadline, min(self.deadline + earned, now + START_SECONDS))
        self.waiting, self.done = waiting, self.done or done
        self.position = max(self.position, DELIVERED if done else position)

    def resume(self, now: float) -> None:
        """What it waited for has come: from now on it delivers."""
        self.waiting, self.position = False, 0
        self.held.run(False, now)
        self.deadline = max(self.deadline, now + START_SECONDS)

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused: give the time back."""
        self.begun += seconds
        self.deadline += seconds
        self.held.shift(seconds)
