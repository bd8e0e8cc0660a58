"""
The syncers of all jobs: one connection each, kept from question to question.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime

from diloco.transport import Tls
from diloco.v1 import syncer_pb2
from diloco_operator.syncer_client import SyncerClient
from diloco_operator.workqueue import Key

ASK_SECONDS = 1.5
"""What a silent syncer costs one thread, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """How a job's syncer is dialled; another one makes a new connection."""

    endpoint: str
    tls: Tls | None
    server_name: str
    """Name that the syncer's certificate must have; without TLS of no meaning."""


@dataclass(slots=True)
class _Known:
    address: Address
    client: SyncerClient
    answered: datetime | None


class Syncers:
    """Safe for use by many threads; one thread at a time asks for one job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Key, _Known] = {}

    def ask(self, key: Key, address: Address) -> syncer_pb2.StatusReply:
        """
        The status of this job's syncer, within ASK_SECONDS.

        Raises:
            DilocoError: it gave none; the message is the transport's or the syncer's.
        """
        return self._client(key, address).status(timeout_seconds=ASK_SECONDS)

    def answered(self, key: Key, at: datetime) -> None:
        """Remember when this job's syncer gave an answer."""
        with self._lock:
            if (known := self._known.get(key)) is not None:
                known.answered = at

    def last_answer(self, key: Key) -> datetime | None:
        """When this job's syncer last gave an answer; None: not since this process was started."""
        with self._lock:
            known = self._known.get(key)
            return known.answered if known is not None else None

    def forget(self, key: Key) -> None:
        """The job is gone: close the connection."""
        with self._lock:
            known = self._known.pop(key, None)
        if known is not None:
            known.client.close()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            keys = list(self._known)
        for key in keys:
            self.forget(key)

    def _client(self, key: Key, address: Address) -> SyncerClient:
        with self._lock:
            before = self._known.get(key)
            if before is not None and before.address == address:
                return before.client
            client = SyncerClient(
                address.endpoint, tls=address.tls, server_name=address.server_name
            )
            answered = before.answered if before is not None else None
            self._known[key] = _Known(address, client, answered)
        if before is not None:
            before.client.close()
        return client
