"""
Takes part in a leader election: a thread with the clock and the requests for the Lease.

The client library has `kubernetes.leaderelection` as well. Its locks depend on the version of the
library, it measures with the wall clock, and a request that hangs keeps a leader from noticing that
its time is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from diloco_operator.cluster.client import ApiError, Cluster, Json
from diloco_operator.cluster.kinds import KINDS
from diloco_operator.leader.election import (
    Due,
    Election,
    Ended,
    Event,
    Found,
    Lead,
    Lease,
    NotBegun,
    Read,
    StandBy,
    Timing,
    Unanswered,
    Wake,
    Write,
    Written,
)

log = logging.getLogger(__name__)

STOP_SECONDS = 1.0
"""For a request that is under way when the process ends."""


class Candidate:
    """
    Call `start` once, and `stop` at the end.

    Args:
        cluster: for the requests of the Lease alone; a request must not take longer than the rest of
            the lease.
        namespace: of the Lease.
        name: of the Lease.
        identity: unique among the candidates.
        timing: equal for all candidates.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        identity: str,
        timing: Timing = Timing(),  # noqa: B008 (frozen)
    ) -> None:
        self._cluster = cluster
        self._namespace, self._name = namespace, name
        self._election = Election(identity, timing)
        self._timing = timing
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def may_write(self) -> bool:
        """Whether this process is the leader at this moment."""
        return self._election.may_write(time.monotonic())

    def start(self, *, lead: Callable[[bool], object], stand_by: Callable[[], object]) -> None:
        """
        Take part from now on.

        Args:
            lead: called when this process becomes the leader, with whether no other has led since it did.
                If it raises, `stand_by` is called, and this process takes part again when another one had
                the time to lead.
            stand_by: called soon after it ceased to be; `may_write` is False at the exact time.
        """
        self._lead, self._stand_by = lead, stand_by
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        self._thread.start()

    def stop(self, *, release: bool) -> None:
        """
        Take part no longer.

        Args:
            release: this process no longer writes anything, so that another may lead at once.
        """
        self._stopped.set()
        if self._thread is None:
            return
        self._thread.join(STOP_SECONDS)
        if release and not self._thread.is_alive():
            self._drive(Ended())

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                wake = self._drive(Due())
            except Exception:
                log.exception("unexpected error in the leader election")
                wake = time.monotonic() + self._timing.retry_seconds
            self._stopped.wait(max(0.0, wake - time.monotonic()))

    def _drive(self, event: Event | None) -> float:
        """Handle an event and the answers that follow from it; when the next one is due."""
        wake = time.monotonic()
        while event is not None:
            decisions, event = self._election.handle(event, time.monotonic()), None
            for decision in decisions:
                match decision:
                    case Read() | Write():
                        event = self._request(decision)
                    case Lead(again=again):
                        event = self._begin(again)
                    case StandBy(reason=reason):
                        log.warning("standing by: %s", reason)
                        self._stand_by()
                    case Wake(at=at):
                        wake = at
        return wake

    def _begin(self, again: bool) -> Event | None:
        """Lead; an event if that fails, so that another candidate may: this one would only hold the Lease."""
        log.info("leading: this operator holds Lease %s", self._name)
        try:
            self._lead(again)
        except Exception:
            log.exception("unexpected error at the begin of leading; another replica may lead now")
            return NotBegun()
        return None

    def _request(self, request: Read | Write) -> Event:
        try:
            if isinstance(request, Write):
                return Written(_lease(self._cluster.put(self._body(request.lease))))
            found = self._cluster.get("Lease", self._namespace, self._name)
            return Found(None if found is None else _lease(found))
        except ApiError as error:
            # 409: another candidate was faster, which the next read shows.
            level = logging.INFO if error.status == 409 else logging.WARNING
            log.log(level, "Lease %s: %s", self._name, error)
            return Unanswered()

    def _body(self, lease: Lease) -> Json:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        version = {"resourceVersion": lease.version} if lease.version else {}
        return {
            "apiVersion": KINDS["Lease"].api_version,
            "kind": "Lease",
            "metadata": {"namespace": self._namespace, "name": self._name, **version},
            "spec": {
                "holderIdentity": lease.holder,
                "leaseDurationSeconds": lease.seconds,
                "acquireTime": lease.acquired or now,
                "renewTime": now,
                "leaseTransitions": lease.transitions,
            },
        }


def _lease(body: Mapping[str, Any]) -> Lease:
    spec = body.get("spec") or {}
    return Lease(
        holder=str(spec.get("holderIdentity") or ""),
        seconds=int(spec.get("leaseDurationSeconds") or 0),
        acquired=str(spec.get("acquireTime") or ""),
        renewed=str(spec.get("renewTime") or ""),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=str(body["metadata"].get("resourceVersion") or ""),
    )
