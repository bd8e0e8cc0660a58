"""
One job, once: read everything, decide (pure), carry out, write the status, tell about it.

Level-triggered: nothing is taken from the event that led here. Killed at any point, the next
reconcile reads what is there and ends in the same state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from diloco_operator.cluster import JOB_LABEL, ApiError, Cluster, Json
from diloco_operator.decide import Decisions, EventOf, decide
from diloco_operator.logs import about
from diloco_operator.manifests import APPLIED
from diloco_operator.metrics import Metrics
from diloco_operator.observed import (
    Observed,
    Refusal,
    controller_uid,
    identity,
)
from diloco_operator.reading import Reader
from diloco_operator.settings import Faults
from diloco_operator.view import View
from diloco_operator.workqueue import Key, RetryError

log = logging.getLogger(__name__)

COMPONENT = "diloco-operator"


@dataclass(slots=True)
class _Outcome:
    """What carrying out met."""

    foreign: list[str]
    refusals: list[Refusal]


class Reconciler:
    """`reconcile(key)` for the work queue; each key on one thread at a time."""

    def __init__(
        self,
        cluster: Cluster,
        view: View,
        *,
        metrics: Metrics,
        decide: Callable[[Observed, View, datetime], Decisions] = decide,
        reporter: str = COMPONENT,
        faults: Faults = Faults(),  # noqa: B008 (frozen)
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._metrics = metrics
        self._decide = decide
        self._reporter = reporter
        self._faults = faults
        self._now = now
        self._reader = Reader(cluster, view, now=now)
        # Applies that changed nothing, so that they are not sent again: by key and child.
        self._idle: dict[Key, dict[tuple[str, str], str]] = {}

    def reconcile(self, key: Key) -> float | None:
        """
        Bring one job to where its manifest wants it; seconds until it should be looked at again.

        Returns:
            None: the job is gone.

        Raises:
            RetryError: the API server is away or refused something; what can be said is said.
        """
        begun = time.monotonic()
        result = "error"
        with about(key):
            try:
                again = self._reconcile(key)
                result = "ok" if again is not None else "gone"
            except _RefusedError:
                result = "refused"
                raise
            except ApiError as error:
                raise RetryError(str(error)) from None
            finally:
                self._metrics.reconciled(result, time.monotonic() - begun)
        return again

    def close(self) -> None:
        """Close the connections to syncers."""
        self._reader.close()

    def _reconcile(self, key: Key) -> float | None:
        raw = self._cluster.job(*key)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            # Children go with their owner: the garbage collector needs no help, and no finalizer.
            self._forget(key)
            return None
        observed = self._reader.read(key, raw)
        self._faults.reached("after-read")
        decisions = self._decide(observed, self._view, self._now())
        met = self._apply(key, observed, decisions)
        self._delete(key, decisions, met)
        self._faults.reached("after-delete")
        if met.foreign or met.refusals:
            # Said by the same pure function, so that a status is always the whole truth.
            observed = replace(observed, foreign=tuple(met.foreign), refusals=tuple(met.refusals))
            said = self._decide(observed, self._view, self._now())
            decisions = replace(decisions, status=said.status, events=said.events)
        self._say(key, observed, decisions)
        if decisions.remove_job:
            self._remove(key, observed)
        if met.refusals:
            raise _RefusedError("; ".join(f"{one.child}: {one.message}" for one in met.refusals))
        return decisions.again_seconds

    def _forget(self, key: Key) -> None:
        self._reader.forget(key)
        self._idle.pop(key, None)
        self._metrics.state(key, None)

    def _apply(self, key: Key, observed: Observed, decisions: Decisions) -> _Outcome:
        met = _Outcome(foreign=[], refusals=[])
        live = {identity(child): child for child in observed.children}
        before = self._idle.get(key, {})
        idle: dict[tuple[str, str], str] = {}
        for number, body in enumerate(decisions.apply, start=1):
            kind, name = identity(body)
            try:
                child = live.get((kind, name)) or self._cluster.get(kind, key.namespace, name)
                if child is not None and not _ours(child, observed.job):
                    met.foreign.append(f"{kind} {name}")
                    continue
                if child is not None and before.get((kind, name)) == (mark := _mark(body, child)):
                    idle[(kind, name)] = mark
                    continue
                after = self._cluster.apply(body)
            except ApiError as error:
                if error.ending:
                    # The job goes with its namespace; a word about it could not be written either.
                    raise _RefusedError(error.message) from None
                if not _is_to_be_said(error):
                    raise
                met.refusals.append(Refusal(child=f"{kind} {name}", message=error.message))
                continue
            if child is not None and _version(child) == _version(after):
                idle[(kind, name)] = _mark(body, after)
            self._wrote("applied", kind, name)
            self._faults.reached(f"after-apply-{number}")
        self._idle[key] = idle
        return met

    def _delete(self, key: Key, decisions: Decisions, met: _Outcome) -> None:
        for ref in decisions.delete:
            try:
                if self._cluster.delete(ref.kind, key.namespace, ref.name, uid=ref.uid):
                    self._wrote("deleted", ref.kind, ref.name)
            except ApiError as error:
                if not _is_to_be_said(error):
                    raise
                met.refusals.append(Refusal(child=f"{ref.kind} {ref.name}", message=error.message))

    def _say(self, key: Key, observed: Observed, decisions: Decisions) -> None:
        status = decisions.status
        if status is not None:
            self._faults.reached("before-status")
            self._cluster.put_status(observed.job, status)
            self._metrics.wrote("DiLoCoJob")
            self._faults.reached("after-status")
        now = self._now()
        for event in decisions.events:
            log.info("%s: %s", event.reason, event.message, extra={"type": event.type})
            try:
                self._cluster.event(_event(observed.job, event, now, self._reporter))
            except ApiError as error:
                log.warning(
                    "Event %s is lost (the condition says the same): %s", event.reason, error
                )
            else:
                self._metrics.wrote("Event")
        shown = status if status is not None else observed.job.get("status") or {}
        self._metrics.state(key, shown.get("state") or "Pending")

    def _remove(self, key: Key, observed: Observed) -> None:
        metadata = observed.job["metadata"]
        # The version as well: somebody may raise spec.steps at this very moment.
        removed = self._cluster.delete(
            "DiLoCoJob", *key, uid=metadata["uid"], resource_version=metadata["resourceVersion"]
        )
        if removed:
            self._wrote("deleted", "DiLoCoJob", key.name)

    def _wrote(self, did: str, kind: str, name: str) -> None:
        log.info("%s %s %s", did, kind, name)
        self._metrics.wrote(kind)


class _RefusedError(RetryError):
    """The API server refused a child; the status says so."""


def _is_to_be_said(error: ApiError) -> bool:
    """Somebody has to be told: the same request will not help at once."""
    # 500 is also the answer to fields of a wrong type ("expected list, got x") and for an admission
    # webhook that is away.
    return error.refused or error.status == 500


def _version(child: Mapping[str, Any]) -> tuple[str, str]:
    return child["metadata"]["uid"], child["metadata"]["resourceVersion"]


def _ours(child: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Controlled by this very job, or left over without a controller and labelled as the job's."""
    if controller := controller_uid(child):
        return controller == str(job["metadata"]["uid"])
    labels: Mapping[str, str] = child["metadata"].get("labels") or {}
    return labels.get(JOB_LABEL) == str(job["metadata"]["name"])


_PASSING = ("resourceVersion", "managedFields", "generation")


def _mark(body: Json, child: Mapping[str, Any]) -> str:
    """What was applied to what: changes when either does, but not with the child's status."""
    metadata = {k: v for k, v in child["metadata"].items() if k not in _PASSING}
    rest = {k: v for k, v in child.items() if k not in ("status", "metadata")}
    wanted = (body["metadata"].get("annotations") or {}).get(APPLIED, "")
    content = json.dumps([wanted, metadata, rest], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _event(job: Mapping[str, Any], event: EventOf, now: datetime, reporter: str) -> Json:
    metadata = job["metadata"]
    at = now.isoformat(timespec="seconds").replace("+00:00", "Z")
    unique = f"{metadata['uid']} {event.reason} {metadata.get('generation')} {at}"
    digest = hashlib.sha256(unique.encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": metadata["namespace"], "name": f"{metadata['name']}.{digest}"},
        "involvedObject": {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            **{name: metadata[name] for name in ("namespace", "name", "uid", "resourceVersion")},
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:1024],
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": reporter,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
