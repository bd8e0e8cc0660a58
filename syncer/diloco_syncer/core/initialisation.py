"""
Which learner uploads Θ^(0), and for how long it is waited for. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_syncer.core import events as ev
from diloco_syncer.core.upload_limits import MIN_BYTES_PER_SECOND

STALL_SECONDS = 60.0
"""
Without a new byte for this long, or slower than MIN_BYTES_PER_SECOND for longer, the next learner is
asked. Paper leaves this open.
"""


MAX_UPLOADS = 3
"""How often a learner may begin Θ^(0) until its progress no longer counts: it never comes to the end."""


@dataclass(slots=True)
class Initialisation:
    """Asks one learner after the other; a learner that failed is asked again after all others."""

    parts: int = 1 << 30
    """Of Θ^(0): the fragments and the constants."""
    learner: str | None = None
    """The learner that was asked."""
    deadline: float = 0.0
    received_bytes: int = 0
    """Of the part of Θ^(0) that it uploads now."""
    begun_parts: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def request(self, connected: Sequence[str], now: float) -> list[ev.Decision]:
        """Ask a learner, unless one is asked already or none is connected."""
        if self.learner is not None or not connected:
            return []
        self.learner = min(connected, key=lambda name: (self.failures.get(name, 0), name))
        self.deadline, self.received_bytes = now + STALL_SECONDS, 0
        self.begun_parts = 1
        return [ev.RequestInitial(learner=self.learner)]

    def progressed(self, learner: str, received_bytes: int, now: float) -> None:
        """Bytes of a part of Θ^(0) have arrived."""
        if learner != self.learner:
            return
        more = received_bytes - self.received_bytes
        self.received_bytes = received_bytes
        self.begun_parts += more < 0
        if self.begun_parts > MAX_UPLOADS * self.parts:
            return
        earned = (more if more >= 0 else received_bytes) / MIN_BYTES_PER_SECOND
        self.deadline = max(self.deadline, min(self.deadline + earned, now + STALL_SECONDS))

    def withdraw(self, learner: str) -> None:
        """The learner is gone, or its session was replaced: the request is void."""
        if self.learner == learner:
            self.learner = None

    def fail(self, learner: str, reason: str, detail: str) -> list[ev.Decision]:
        """The learner could not upload a usable Θ^(0)."""
        if self.learner != learner:
            return []
        self.learner = None
        self.failures[learner] = self.failures.get(learner, 0) + 1
        fields = {"learner": learner, "reason": reason, "detail": detail}
        return [ev.Log(event="refuse", fields=fields)]

    def tick(self, now: float) -> list[ev.Decision]:
        """Withdraw a request that makes no progress."""
        if self.learner is None or now < self.deadline:
            return []
        detail = (
            f"no part of the initial model came from {self.learner} for {STALL_SECONDS:g} s; "
            "the next learner is asked"
        )
        return self.fail(self.learner, "InitialLate", detail)
