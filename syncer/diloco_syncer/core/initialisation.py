"""
Which learner uploads Θ^(0), for how long it is waited for, and whose model counts until then. Pure.

Until Θ^(0) has arrived, no model is fixed for good. The learners that have joined train one model, that of
the learner that is asked; others must retry, and are remembered here. Once every learner that joined
has failed to deliver more often than one that waits, the sessions are closed and the model of that one counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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

WAITING_SECONDS = 20.0
"""
A learner that must retry and did not for this long no longer waits; learners pause for 5 s at most.
Paper leaves this open.
"""


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
    waiting: dict[str, float] = field(default_factory=dict)
    """Learner with another model than those that joined → when it last had to retry, monotonic."""
    _interrupted: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Learner whose session ended while it was asked → its deadline and the parts that it had begun."""

    def request(self, connected: Sequence[str], now: float) -> list[ev.Decision]:
        """Ask a learner, unless one is asked already or none is connected."""
        if self.learner is not None or not connected:
            return []
        learner = self.learner = min(connected, key=lambda name: (self._failed(name), name))
        # A new session brings no new time: else a learner that reconnects would be waited for forever.
        self.deadline, self.begun_parts = self._interrupted.pop(learner, (now + STALL_SECONDS, 1))
        self.received_bytes = 0
        return [ev.RequestInitial(learner=learner)]

    def expire(self, connected: Iterable[str], now: float) -> None:
        """Those of them that were asked, and away for longer than they had left, have failed."""
        for name in connected:
            if self._interrupted.get(name, (math.inf, 0))[0] <= now:
                del self._interrupted[name]
                self.failures[name] = self._failed(name) + 1

    # ------------------------------------------------------------ learners with another model

    def wait(self, learner: str, now: float) -> None:
        """The learner must retry: its model is not the one that counts at present."""
        self.waiting[learner] = now

    def joined(self, learner: str) -> None:
        """The learner has joined, with the model that counts."""
        self.waiting.pop(learner, None)

    def preceding(self, learners: Iterable[str]) -> str:
        """
        Whose model counts before that of any of these learners: it waits, and has failed less often than
        each of them. "": there is none, or a learner is asked at present.
        """
        if self.learner is not None or not self.waiting:
            return ""
        first = min(self.waiting, key=lambda name: (self._failed(name), name))
        fewest = min(map(self._failed, learners), default=0)
        return first if self._failed(first) < fewest else ""

    def waiting_for(self) -> str:
        """What Θ^(0) waits for, for people."""
        text = f"{self.learner or 'the first learner'} to upload the initial model"
        names = sorted(self.waiting)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"{text}; with another model: {', '.join(names[:8])}{more}" if names else text

    def _failed(self, learner: str) -> int:
        return self.failures.get(learner, 0)

    # ------------------------------------------------------------ the learner that is asked

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
            self._interrupted[learner] = (self.deadline, self.begun_parts)

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused for this long."""
        self.deadline += seconds
        self.waiting = {name: at + seconds for name, at in self.waiting.items()}
        self._interrupted = {
            name: (deadline + seconds, begun)
            for name, (deadline, begun) in self._interrupted.items()
        }

    def fail(self, learner: str, reason: str, detail: str) -> list[ev.Decision]:
        """The learner could not upload a usable Θ^(0)."""
        if self.learner != learner:
            return []
        self.learner = None
        self.failures[learner] = self.failures.get(learner, 0) + 1
        fields = {"learner": learner, "reason": reason, "detail": detail}
        return [ev.Log(event="refuse", fields=fields)]

    def tick(self, now: float) -> list[ev.Decision]:
        """Withdraw a request that makes no progress, and forget who no longer waits."""
        self.waiting = {n: at for n, at in self.waiting.items() if now - at <= WAITING_SECONDS}
        if self.learner is None or now < self.deadline:
            return []
        detail = (
            f"no part of the initial model came from {self.learner} for {STALL_SECONDS:g} s; "
            "the next learner is asked"
        )
        return self.fail(self.learner, "InitialLate", detail)
