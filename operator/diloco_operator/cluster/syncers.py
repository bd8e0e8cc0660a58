"""
Connections to the syncers of all jobs: one each, kept between status requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from diloco.errors import UnavailableError
from diloco.rpc.status_client import StatusRequest, SyncerClient
from diloco.rpc.tls import Tls
from diloco.v1 import syncer_pb2
from diloco_operator.state.observation import Failure, RegionFailure
from diloco_operator.workqueue import Key

ASK_SECONDS = 1.5
"""Longest time that a status request may block a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """How to dial a job's syncer; a new address opens a new connection."""

    endpoint: str
    tls: Tls | None
    server_name: str
    """Name that the syncer's certificate must have; ignored without TLS."""
    proxy: str = ""
    """HTTP proxy on the way; "": none."""


@dataclass(slots=True)
class _Known:
    address: Address
    client: SyncerClient
    answered: datetime | None
    unanswered: UnavailableError | None = None
    """The last request had no answer in time; None: it had one, or another error."""
    request: StatusRequest | None = None
    """Under way, while no thread waits for it."""


class Syncers:
    """Safe for use by many threads, with one thread per key at a time."""

    def __init__(self, answered_late: Callable[[Key], object] = lambda _: None) -> None:
        """Call `answered_late` when a syncer replies again for which no thread waited."""
        self._answered_late = answered_late
        self._lock = threading.Lock()
        self._known: dict[Key, _Known] = {}

    def ask(self, key: Key, address: Address) -> syncer_pb2.StatusReply:
        """
        The status of this job's syncer, within ASK_SECONDS.

        A syncer that did not answer the last request is asked again, but not waited for: a silent one
        blocks a thread once, however often its job is reconciled.

        Raises:
            DilocoError: the request failed; the message is the transport's or the syncer's.
        """
        known = self._known_at(key, address)
        request = known.request
        if request is None or request.timed_out():
            request = known.client.request(timeout_seconds=ASK_SECONDS)
            if known.unanswered is not None:
                known.request = request
                request.when_answered(lambda: self._answered_late(key))
        if known.unanswered is not None and not request.ended():
            raise known.unanswered
        known.request = None
        try:
            reply = request.reply()
        except UnavailableError as error:
            known.unanswered = error if request.timed_out() else None
            raise
        known.unanswered = None
        return reply

    def report_failure(self, key: Key, address: Address, failure: Failure | RegionFailure) -> None:
        """
        Report to this job's syncer that the job or a region failed, within ASK_SECONDS.

        Raises:
            DilocoError: the request failed; the message is the transport's or the syncer's.
        """
        client, timeout = self._known_at(key, address).client, ASK_SECONDS
        reason, message = failure.reason, failure.message
        if isinstance(failure, RegionFailure):
            client.region_failed(
                failure.region,
                reason,
                message,
                learners=failure.learners,
                timeout_seconds=timeout,
            )
        else:
            client.failed(reason, message, timeout_seconds=timeout)

    def answered(self, key: Key, at: datetime) -> None:
        """Record the time of an answer of this job's syncer."""
        with self._lock:
            if (known := self._known.get(key)) is not None:
                known.answered = at

    def last_answer(self, key: Key) -> datetime | None:
        """Time of the syncer's last answer; None: none since this process started."""
        with self._lock:
            known = self._known.get(key)
            return known.answered if known is not None else None

    def known(self) -> frozenset[Key]:
        """The jobs with a connection."""
        with self._lock:
            return frozenset(self._known)

    def forget(self, key: Key) -> None:
        """The job was deleted: close the connection."""
        with self._lock:
            known = self._known.pop(key, None)
        if known is not None:
            known.client.close()

    def close(self) -> None:
        """Close all connections."""
        for key in self.known():
            self.forget(key)

    def _known_at(self, key: Key, address: Address) -> _Known:
        with self._lock:
            previous = self._known.get(key)
            if previous is not None and previous.address == address:
                return previous
            client = SyncerClient(
                address.endpoint,
                tls=address.tls,
                server_name=address.server_name,
                proxy=address.proxy,
            )
            answered = previous.answered if previous is not None else None
            known = self._known[key] = _Known(address, client, answered)
        if previous is not None:
            previous.client.close()
        return known
