"""Polls the status of the syncer once a second, on its own thread: a slow reply blocks nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from diloco.errors import DilocoError
from diloco.rpc.status_client import SyncerClient
from diloco.v1 import syncer_pb2 as pb

EVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReply:
    """A reply of the syncer."""

    reply: pb.StatusReply
    asked_at: float
    """When it was requested (monotonic): it has what happened before."""
    at: float
    """When it arrived."""


class Poller:
    """The latest reply of one syncer; `close` ends the thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._endpoint: str | None = None
        self._latest: TimedReply | None = None
        self._thread = threading.Thread(target=self._run, name="status-poller", daemon=True)
        self._thread.start()

    def watch(self, endpoint: str) -> None:
        """
        Poll the syncer at `endpoint` from now on, immediately at first.

        Call it for every start of the syncer: a new connection does not wait for the back-off of the
        old one.
        """
        with self._lock:
            self._endpoint = endpoint
        self._wake.set()

    def poll_now(self) -> None:
        """Poll without waiting for the next turn."""
        self._wake.set()

    def latest(self) -> TimedReply | None:
        """The latest reply; None before the first."""
        with self._lock:
            return self._latest

    def close(self) -> None:
        """End the thread; waits for a pending reply, at most until its deadline."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        client: SyncerClient | None = None
        while not self._closed:
            with self._lock:
                endpoint, self._endpoint = self._endpoint, None
            if endpoint is not None:
                if client is not None:
                    client.close()
                client = SyncerClient(endpoint)
            if client is not None:
                self._poll(client)
            self._wake.wait(EVERY_SECONDS)
            self._wake.clear()
        if client is not None:
            client.close()

    def _poll(self, client: SyncerClient) -> None:
        asked_at = time.monotonic()
        try:
            reply = client.status()
        except DilocoError:
            return  # it restarts or is busy; the age of the latest reply shows it
        with self._lock:
            self._latest = TimedReply(reply=reply, asked_at=asked_at, at=time.monotonic())
