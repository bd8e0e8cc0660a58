"""
Which peer a new process asks for the state of its optimizers, and when it asks the next. Pure.

See docs/adr/0033-moments-from-a-peer.md (paper E.3). Parameters come from the syncer in any case, so nothing here can
delay or change what the syncer learns: at worst, the learner begins with moments of its own, as without peers.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_worker.core import events as ev

LEAST_SECONDS = 60.0
"""
H global steps may be a second, in which a peer of another region is not even connected. Without a global step for so
long, a request is abandoned as well: the job may wait for this learner.
"""


class PeerRecovery:
    """
    One process's requests to its peers, one after the other.

    Args:
        interval: H; a request that takes longer is abandoned (paper E.3).
    """

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._peers: list[ev.PeerAddress] = []
        self._asked: ev.AskPeer | None = None
        self._asked_at: float
        self._step: int
        self._step_at: float
        """The newest global step, and when it was first seen."""
        self._number = 0
        self._begun = False
        self._begun_at: float
        self.source: ev.PeerState | None = None
        """What has arrived; None: nothing."""
        self.why = ""
        """Why nothing has, in one sentence; empty: none is needed, or it has."""
        self.seconds = 0.0
        """From the first request until the last answer."""

    @property
    def pending(self) -> bool:
        """Whether the trainer is to wait."""
        return self._asked is not None

    @property
    def asked(self) -> str:
        """The peer whose answer is awaited; empty: none."""
        return self._asked.peer.learner if self._asked is not None else ""

    def offered(self, peers: Sequence[ev.PeerAddress]) -> None:
        """The syncer named these, best first; none in a session that continues."""
        if peers and not self._begun:
            self._peers = [*peers]

    def begin(self, *, step: int, run: str, now: float) -> list[ev.Decision]:
        """The model is about to be downloaded: ask the first peer, unless one was asked before."""
        if self._begun:
            return []
        self._begun, self._begun_at = True, now
        if not self._peers and step > 0:
            self.why = "the syncer named no learner to ask"
        return self._ask(step, run, now)

    def answered(self, event: ev.PeerAnswered, *, step: int, run: str, now: float) -> list[ev.Decision]:  # fmt: skip
        """A request has ended; those that were abandoned no longer count."""
        if self._asked is None or event.number != self._asked.number:
            return []
        self.seconds = now - self._begun_at
        if event.state is not None:
            self.source, self.why, self._asked = event.state, "", None
            return []
        return self._next(event.error, step, run, now)

    def proceed(self, *, step: int, run: str, now: float) -> list[ev.Decision]:
        """Time has passed: abandon a request that is too old."""
        if self._asked is None:
            return []
        if step != self._step:
            self._step, self._step_at = step, now
        steps, waited = step - self._asked.step, now - self._asked_at
        standstill = now > self._step_at + LEAST_SECONDS
        if waited <= LEAST_SECONDS or not (steps > self._interval or standstill):
            return []
        self.seconds = now - self._begun_at
        why = f"no complete answer within {steps} global steps and {waited:.0f} s"
        return [ev.DropPeer(number=self._asked.number), *self._next(why, step, run, now)]

    def stop(self) -> list[ev.Decision]:
        """The trainer no longer waits."""
        asked, self._asked = self._asked, None
        return [ev.DropPeer(number=asked.number)] if asked is not None else []

    def _next(self, error: str, step: int, run: str, now: float) -> list[ev.Decision]:
        self.why = f"{self.asked}: {error}"
        return self._ask(step, run, now)

    def _ask(self, step: int, run: str, now: float) -> list[ev.Decision]:
        if not self._peers:
            self._asked = None
            return []
        self._number += 1
        peer = self._peers.pop(0)
        self._asked = ev.AskPeer(number=self._number, peer=peer, step=step, run=run)
        self._asked_at, self._step, self._step_at = now, step, now
        return [self._asked]
