"""Asks the syncer how it is, once a second, on a thread of its own: a slow answer delays nobody."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from diloco.errors import DilocoError
from diloco.v1 import syncer_pb2 as pb
from diloco_operator.syncer_client import SyncerClient

EVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the syncer said, and when (monotonic)."""

    reply: pb.StatusReply
    at: float


class Poller:
    """The newest answer of one syncer; `close` ends the thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._wanted: str | None = None
        self._answer: Answer | None = None
        self._thread = threading.Thread(target=self._run, name="status-poller", daemon=True)
        self._thread.start()

    def watch(self, endpoint: str) -> None:
        """
        Ask the syncer that serves here from now on, the first time at once.

        Say it again for every life of a syncer: a new connection does not sit out the pauses
        that the old one made while nobody listened.
        """
        with self._lock:
            self._wanted = endpoint
        self._wake.set()

    def ask(self) -> None:
        """Ask now, without waiting for the next turn."""
        self._wake.set()

    def answer(self) -> Answer | None:
        """The newest answer; None before the first."""
        with self._lock:
            return self._answer

    def close(self) -> None:
        """End the thread; an answer on its way is waited for, at most for its deadline."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        client: SyncerClient | None = None
        while not self._closed:
            with self._lock:
                wanted, self._wanted = self._wanted, None
            if wanted is not None:
                if client is not None:
                    client.close()
                client = SyncerClient(wanted)
            if client is not None:
                self._ask(client)
            self._wake.wait(EVERY_SECONDS)
            self._wake.clear()
        if client is not None:
            client.close()

    def _ask(self, client: SyncerClient) -> None:
        try:
            reply = client.status()
        except DilocoError:
            return  # it restarts, or is busy; the age of the last answer tells
        with self._lock:
            self._answer = Answer(reply=reply, at=time.monotonic())
