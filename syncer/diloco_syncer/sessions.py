"""
The open streams of learners: which session is current, and messages to it. Thread-safe.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.errors import DilocoError, UnavailableError
from diloco.v1 import syncer_pb2 as pb

MAX_QUEUED = 4096
"""Messages that wait for a learner to read them: minutes of a job, a few per merge."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One open stream of one learner."""

    number: int
    learner: str
    outbox: queue.SimpleQueue[pb.SyncerMessage | DilocoError | None] = field(
        default_factory=queue.SimpleQueue
    )
    """Messages in order; an error ends the stream with its status, None ends it without one."""
    on_end: Callable[[], object] = lambda: None
    """Called when the syncer ends it: its stream must end even if the peer does not read why."""
    unread: UnavailableError | None = None
    """Why this session must end: its learner does not read."""

    def send(self, message: pb.SyncerMessage) -> None:
        """Queue a message; the session is over once MAX_QUEUED wait, and nothing else is kept."""
        if self.unread is not None:
            return
        if self.outbox.qsize() < MAX_QUEUED:
            self.outbox.put(message)
            return
        self.unread = UnavailableError(
            f"{self.learner} has not read {MAX_QUEUED} messages of its session; connect again"
        )
        with contextlib.suppress(queue.Empty):
            while True:
                self.outbox.get_nowait()
        self.outbox.put(self.unread)


class Sessions:
    """All open streams; at most one per learner is current, and only that one gets messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Session] = {}
        self._current: dict[str, tuple[int, int]] = {}
        """Learner → (incarnation, session)."""

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def open(self, learner: str) -> Session:
        """Register a stream; it is not current yet."""
        session = Session(number=next(self._numbers), learner=learner)
        with self._lock:
            self._open[session.number] = session
        return session

    def close(self, session: Session) -> None:
        """Remove a stream that has ended."""
        with self._lock:
            self._open.pop(session.number, None)

    def make_current(self, learner: str, *, incarnation: int, number: int) -> None:
        """The engine admitted this session."""
        with self._lock:
            self._current[learner] = (incarnation, number)

    def end(self, number: int, error: DilocoError) -> None:
        """End a stream with an error; it is neither open nor current any longer, however long its peer reads."""
        with self._lock:
            session = self._open.pop(number, None)
            for learner, (_, current) in list(self._current.items()):
                if current == number:
                    del self._current[learner]
        if session is not None:
            session.outbox.put(error)
            session.on_end()

    def incarnation(self, learner: str) -> int | None:
        """The incarnation of a learner's current session; None: it has not joined."""
        with self._lock:
            current = self._current.get(learner)
            return current[0] if current else None

    def send(self, learner: str, message: pb.SyncerMessage) -> None:
        """Queue a message for a learner; dropped if it has no open session."""
        with self._lock:
            current = self._current.get(learner)
            session = self._open.get(current[1]) if current else None
        if session is not None:
            session.send(message)

    def send_all(self, message: pb.SyncerMessage) -> None:
        """Queue a message for every learner with a current session."""
        with self._lock:
            numbers = {number for _, number in self._current.values()}
            sessions = [s for number, s in self._open.items() if number in numbers]
        for session in sessions:
            session.send(message)
