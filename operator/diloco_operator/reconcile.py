"""
Reconciles one job: observe, decide (pure), carry out, write the status, post Events.

Level-triggered: a reconcile uses nothing of the event that caused it. Killed at any point, the next
reconcile observes what exists and reaches the same state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from diloco.runtime.backoff import Backoff
from diloco_job.reasons import event_type
from diloco_operator.cluster.client import ApiError, Cluster, Json, NotLeaderError
from diloco_operator.cluster.observe import Observer
from diloco_operator.decide.decisions import (
    Decisions,
    JobEvent,
    decide,
    leave_to,
    report_unreadable,
)
from diloco_operator.decide.drift import applied, is_changed
from diloco_operator.decide.phase import FOLLOWS
from diloco_operator.logs import job_context
from diloco_operator.metrics import Metrics
from diloco_operator.refusals import Refusals
from diloco_operator.repairs import Repairs, describe, other_writer
from diloco_operator.resources import APPLIED
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.settings import Faults
from diloco_operator.state.objects import Object, identity, is_deleting, is_own
from diloco_operator.state.observation import Observation, Refusal
from diloco_operator.state.previous_status import PreviousStatus
from diloco_operator.state.stored_job import StoredJob, claimed_by
from diloco_operator.workqueue import BACKOFF_SECONDS, Key, RetryError

log = logging.getLogger(__name__)

COMPONENT = "diloco-operator"

MAX_EVENTS, KEPT_SECONDS = 10, 3600.0
"""Events of one reason about one job in the time for which an API server keeps an Event."""

REMIND_SECONDS = 3000.0
"""Between two Events about a job of another installation: API servers keep an Event for an hour."""


_Request = tuple[str, str, str]
"""What to do, and with which child: its kind and name."""


@dataclass(slots=True)
class _Outcome:
    """What carrying out the decisions revealed."""

    foreign: list[Object] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    refused_requests: set[_Request] = field(default_factory=set)
    """Of the refusals."""
    unanswered: set[str] = field(default_factory=set)
    """Kinds of which a write had no answer in time, as with an admission webhook that hangs."""

    def refused(self, request: _Request, message: str) -> None:
        """Record a refusal, of now or before."""
        _, kind, name = request
        self.refusals.append(Refusal(child=f"{kind} {name}", message=message))
        self.refused_requests.add(request)

    def skips(self, kind: str) -> bool:
        """
        Whether the next object of this kind would only wait as well.

        After a second kind it is the server that does not answer: the status shows whether it does.
        """
        return kind in self.unanswered or len(self.unanswered) > 1


class Reconciler:
    """`reconcile(key)` for the work queue; each key on one thread at a time."""

    def __init__(
        self,
        cluster: Cluster,
        scope: OperatorScope,
        *,
        metrics: Metrics,
        decide: Callable[[Observation, OperatorScope, datetime], Decisions] = decide,
        answered_late: Callable[[Key], object] = lambda _: None,
        progressed: Callable[[Key], object] = lambda _: None,
        installation: str = "",
        reporter: str = COMPONENT,
        faults: Faults = Faults(),  # noqa: B008 (frozen)
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """
        Carry out the decisions of `decide`.

        Args:
            cluster: the API server.
            scope: the part of each job that this operator runs.
            metrics: of this process.
            decide: maps an observation to decisions.
            answered_late: called when a syncer that had been silent replies: reconcile its job.
            progressed: called before each write to a child: a job may have hundreds.
            installation: of this operator, recorded in each job; jobs of other installations are left
                alone. "": nothing is recorded, and no job is left alone.
            reporter: name of this process, for Events.
            faults: to inject.
            now: wall clock, UTC.
        """
        self._cluster = cluster
        self._scope = scope
        self._metrics = metrics
        self._decide = decide
        self._progressed = progressed
        self._installation = installation
        self._reporter = reporter
        self._faults = faults
        self._now = now
        self._observer = Observer(cluster, scope, now=now, answered_late=answered_late)
        # Of the jobs about which something is known: another job of the same name starts with nothing known.
        self._uids: dict[Key, str] = {}
        # Fingerprints of applies that changed nothing and are not repeated: by key and child.
        self._unchanged: dict[Key, dict[tuple[str, str], str]] = {}
        self._repairs: dict[Key, Repairs] = {}
        self._refusals: dict[Key, Refusals] = {}
        # Jitter spreads the requests of many jobs; it needs no secure randomness.
        self._rng = random.Random()  # noqa: S311
        # When Events were posted, by key and reason.
        self._posted: dict[Key, dict[str, list[datetime]]] = {}
        # Jobs of other installations about which an Event was posted: uid, installation and time.
        self._left: dict[Key, tuple[str, str, datetime]] = {}

    def reconcile(self, key: Key) -> float | None:
        """
        Bring the cluster to the state that the job's manifest describes.

        Returns:
            Seconds until the next reconcile; None: the job was deleted.

        Raises:
            RetryError: the API server did not answer, or the job's namespace is being deleted. A child
                that it refuses does not end the reconcile: the status reports it.
        """
        started = time.monotonic()
        result = "error"
        with job_context(key):
            try:
                requeue, refused = self._reconcile(key)
                result = "refused" if refused else "ok" if requeue is not None else "gone"
            except _RefusedError:
                result = "refused"
                raise
            except ApiError as error:
                raise RetryError(f"{error}{_advice(error)}") from None
            finally:
                self._metrics.reconciled(result, time.monotonic() - started)
        return requeue

    def forget(self, *, but: Collection[Key]) -> None:
        """Forget all jobs but these, which are being reconciled: this process stands by."""
        # A job of which the first write failed is only in some of them.
        known = {*list(self._uids), *list(self._left)}
        for key in known.difference(but):
            self._forget(key)
            self._left.pop(key, None)

    def close(self) -> None:
        """Close the connections to syncers."""
        self._observer.close()

    def _reconcile(self, key: Key) -> tuple[float | None, bool]:
        """When to reconcile again, and whether the API server refuses a child."""
        raw = self._cluster.job(*key)
        if raw is None or is_deleting(raw):
            # The garbage collector deletes children with their owner; no finalizer is needed.
            self._forget(key)
            self._left.pop(key, None)
            if all(other.namespace != key.namespace for other in list(self._uids)):
                self._cluster.forget(key.namespace)
            return None, False
        uid = str(raw["metadata"]["uid"])
        if self._uids.get(key, uid) != uid:
            self._forget(key)
        self._uids[key] = uid
        owner = claimed_by(raw)
        if self._installation and owner not in ("", self._installation):
            return self._leave(key, raw, owner), False
        try:
            observation = self._observer.observe(key, raw)
        except ApiError as error:
            if error.status == 403:
                # The conditions would show what was known before, for as long as this lasts. Also of a
                # job without an installation: another one that may read its objects claims it.
                self._report(key, raw, report_unreadable(raw, str(error), self._now()))
            raise
        if self._installation and not owner and self._runs(observation.stored):
            # Before any other write: of two installations, one gets a conflict here.
            self._cluster.claim(raw, self._installation)
            self._metrics.wrote("DiLoCoJob")
        self._faults.reached("after-read")
        decisions = self._decide(observation, self._scope, self._now())
        if decisions.fails:
            # Not because of pods that a list from a cache still shows, such as those before a suspension.
            observation = self._observer.observe(key, raw, stored=observation.stored, newest=True)
            decisions = self._decide(observation, self._scope, self._now())
        outcome = _Outcome()
        self._begin_repairs(key, raw)
        refusals = self._refusals.setdefault(key, Refusals(Backoff(*BACKOFF_SECONDS, self._rng)))
        self._patch(key, decisions, outcome)
        self._apply(key, observation, decisions, outcome)
        self._delete(key, decisions, outcome)
        refusals.end(self._now(), refused=outcome.refused_requests)
        self._faults.reached("after-delete")
        contested = self._contested(key)
        if outcome.foreign or outcome.refusals or contested:
            # The same pure function reports them, so that the status is always complete.
            observation = replace(
                observation,
                foreign=tuple(outcome.foreign),
                refusals=tuple(outcome.refusals),
                contested=contested,
            )
            report = self._decide(observation, self._scope, self._now())
            decisions = replace(decisions, status=report.status, events=report.events)
        self._report(key, raw, decisions)
        failure = decisions.failure_to_report
        failures = (*((failure,) if failure else ()), *decisions.regions_to_report)
        if failures and observation.stored.job is not None:
            self._observer.report_failures(key, observation.stored.job, failures)
        if decisions.remove_job:
            self._remove(key, raw)
        if outcome.unanswered:
            raise _RefusedError(
                "; ".join(f"{refusal.child}: {refusal.message}" for refusal in outcome.refusals)
            )
        again = refusals.seconds(self._now())
        seconds = decisions.requeue_seconds
        return seconds if again is None else min(seconds, again), bool(outcome.refusals)

    def _begin_repairs(self, key: Key, raw: Object) -> None:
        is_new = key not in self._repairs
        repairs, generation = (
            self._repairs.setdefault(key, Repairs()),
            raw["metadata"].get("generation"),
        )
        repairs.begin(generation)
        previous = PreviousStatus.of(raw)
        is_current = previous.status.get("observedGeneration") == generation
        if is_new and is_current and previous.reason("Accepted") == "Contested":
            repairs.resume(previous.message("Accepted"), self._now())

    def _contested(self, key: Key) -> tuple[str, ...]:
        """Children that another writer changes or deletes again after each repair, with its name."""
        found = self._repairs[key].contested(self._now())
        return tuple(sorted(describe(child, writer) for child, writer in found))

    def _runs(self, stored: StoredJob) -> bool:
        """Whether this operator runs some part of the job."""
        job, scope = stored.job, self._scope
        return job is not None and (bool(scope.own_regions(job)) or scope.has_syncer(job))

    def _leave(self, key: Key, raw: Json, owner: str) -> float:
        """
        Write nothing about another installation's job but an Event, again before it expires.

        Nor that, about a job for which an operator has nothing to do until its manifest changes.
        """
        self._forget(key)
        decisions = leave_to(owner, self._installation)
        if _needs_no_operator(raw):
            self._left.pop(key, None)
            return decisions.requeue_seconds
        uid, now = str(raw["metadata"]["uid"]), self._now()
        *reported, at = self._left.get(key, ("", "", now))
        if reported != [uid, owner] or now - at >= timedelta(seconds=REMIND_SECONDS):
            self._left[key] = (uid, owner, now)
            self._post(key, raw, decisions)
        self._metrics.state(key, "OtherOperator")
        return decisions.requeue_seconds

    def _forget(self, key: Key) -> None:
        self._uids.pop(key, None)
        self._observer.forget(key)
        self._unchanged.pop(key, None)
        self._repairs.pop(key, None)
        self._refusals.pop(key, None)
        self._posted.pop(key, None)
        self._metrics.state(key, None)

    def _patch(self, key: Key, decisions: Decisions, outcome: _Outcome) -> None:
        for body in decisions.patch:
            kind, name = identity(body)
            request: _Request = ("patch", kind, name)
            content = json.dumps(body, sort_keys=True)
            if self._is_held_back(key, request, content, outcome):
                continue
            self._progressed(key)
            try:
                self._cluster.apply(body)
                self._wrote("patched", kind, name)
            except ApiError as error:
                if error.status == 409:
                    continue  # its object is gone: that of its name has another uid
                self._failed(key, request, content, outcome, error)

    def _apply(
        self, key: Key, observation: Observation, decisions: Decisions, outcome: _Outcome
    ) -> None:
        job, owner = observation.stored.raw, observation.stored.raw["metadata"]
        own = {
            "uid": owner["uid"],
            "job": owner["name"],
            "volume": PreviousStatus.of(job).volume_uid,
        }
        live = {identity(child): child for child in observation.children}
        previous, repairs = self._unchanged.get(key, {}), self._repairs[key]
        unchanged: dict[tuple[str, str], str] = {}
        for number, body in enumerate(decisions.apply, start=1):
            kind, name = identity(body)
            request: _Request = ("apply", kind, name)
            # A person who changes the manifest may have ended the cause, wherever it was.
            content = (owner.get("generation"), applied(body))
            if self._is_held_back(key, request, content, outcome):
                continue
            self._progressed(key)
            try:
                child = live.get((kind, name)) or self._cluster.get(kind, key.namespace, name)
                if child is not None and not is_own(child, **own):
                    outcome.foreign.append(child)
                    continue
                if child is not None:
                    fingerprint = _fingerprint(body, child)
                    if previous.get((kind, name)) == fingerprint:
                        unchanged[kind, name] = fingerprint
                        continue
                # Another writer may also have deleted it, or restored all of its own copy.
                is_repair = repairs.restores((kind, name), applied(body)) or (
                    child is not None and not is_changed(child, body)
                )
                if is_repair and repairs.must_wait((kind, name), self._now()):
                    continue
                after = self._cluster.apply(body)
            except ApiError as error:
                if error.namespace_terminating:
                    # The job goes with its namespace; its status could not be written either.
                    raise _RefusedError(error.message) from None
                self._failed(key, request, content, outcome, error)
                continue
            if child is not None and _version(child) == _version(after):
                unchanged[kind, name] = _fingerprint(body, after)
            elif not is_repair:
                repairs.forget((kind, name))
            else:
                repairs.record((kind, name), other_writer(child, COMPONENT), self._now())
            repairs.applied((kind, name), applied(body))
            self._wrote("applied", kind, name)
            self._faults.reached(f"after-apply-{number}")
        self._unchanged[key] = unchanged

    def _delete(self, key: Key, decisions: Decisions, outcome: _Outcome) -> None:
        for ref in decisions.delete:
            request: _Request = ("delete", ref.kind, ref.name)
            if self._is_held_back(key, request, ref, outcome):
                continue
            self._progressed(key)
            try:
                deleted = self._cluster.delete(
                    ref.kind, key.namespace, ref.name, uid=ref.uid, force=ref.force
                )
                if deleted:
                    self._repairs[key].forget((ref.kind, ref.name))
                    verb = "deleted by force" if ref.force else "deleted"
                    self._wrote(verb, ref.kind, ref.name)
            except ApiError as error:
                self._failed(key, request, ref, outcome, error)

    def _is_held_back(
        self, key: Key, request: _Request, content: Hashable, outcome: _Outcome
    ) -> bool:
        """
        Whether not to send the request: the server refused it not long ago, or would not answer.

        In either case, a former refusal counts until the server has decided again.
        """
        refusals, skips = self._refusals[key], outcome.skips(request[1])
        message = refusals.last(request, content)
        if not skips:
            message = refusals.waits(request, content, self._now())
        if message is not None:
            outcome.refused(request, message)
        return skips or message is not None

    def _failed(
        self, key: Key, request: _Request, content: Hashable, outcome: _Outcome, error: ApiError
    ) -> None:
        """
        Record a failed request, which a condition reports.

        Raises:
            ApiError: nothing can be written, the status neither.
        """
        if isinstance(error, NotLeaderError) or error.status == 401:
            raise error
        # 500 is also the answer to a field of the wrong type ("expected list, got x") and to an
        # admission webhook that is unavailable.
        if not (error.refused or error.status == 500):
            # Without the client's error, which differs each time: a change would be a write.
            message = error.message if error.status else "no answer from the API server"
            outcome.unanswered.add(request[1])
        else:
            message = error.message
            log.warning("the API server refuses to %s %s %s: %s", *request, message)
            self._refusals[key].record(request, content, message)
        outcome.refused(request, message)

    def _report(self, key: Key, raw: Object, decisions: Decisions) -> None:
        status = decisions.status
        if status is not None:
            self._faults.reached("before-status")
            self._cluster.put_status(raw, status)
            self._metrics.wrote("DiLoCoJob")
            self._faults.reached("after-status")
        self._post(key, raw, decisions)
        current = PreviousStatus.of(raw if status is None else {"status": status})
        # A job that ended is shown as such, but here there is nothing that a person could do about it.
        elsewhere = current.reason("Accepted") == "RegionNotInSpec"
        state = "" if elsewhere else current.status.get("state")
        self._metrics.state(key, state or "Pending", warnings=_warnings(current))

    def _post(self, key: Key, raw: Object, decisions: Decisions) -> None:
        now = self._now()
        for event in decisions.events:
            log.info("%s: %s", event.reason, event.message, extra={"type": event.type})
            if self._is_flood(key, event.reason, now):
                continue
            try:
                self._cluster.event(_event(raw, event, now, self._reporter))
            except ApiError as error:
                log.warning(
                    "cannot post Event %s; the condition has the same message: %s",
                    event.reason,
                    error,
                )
            else:
                self._metrics.wrote("Event")

    def _is_flood(self, key: Key, reason: str, now: datetime) -> bool:
        """Whether there are many Events of this reason: a condition may change back and forth for hours."""
        posted = self._posted.setdefault(key, {}).get(reason, [])
        recent = [at for at in posted if timedelta() <= now - at < timedelta(seconds=KEPT_SECONDS)]
        if len(recent) < MAX_EVENTS:
            self._posted[key][reason] = [*recent, now]
        return len(recent) >= MAX_EVENTS

    def _remove(self, key: Key, raw: Object) -> None:
        metadata = raw["metadata"]
        # With the version: spec.steps may be raised at the same moment.
        removed = self._cluster.delete(
            "DiLoCoJob", *key, uid=metadata["uid"], resource_version=metadata["resourceVersion"]
        )
        if removed:
            self._wrote("deleted", "DiLoCoJob", key.name)

    def _wrote(self, verb: str, kind: str, name: str) -> None:
        log.info("%s %s %s", verb, kind, name)
        self._metrics.wrote(kind)


def _needs_no_operator(raw: Json) -> bool:
    """Whether the job is at rest, for good or until its manifest changes, and its learners have stopped."""
    previous = PreviousStatus.of(raw)
    changed = previous.status.get("observedGeneration") != raw["metadata"].get("generation")
    # The status shows the end of a job before its pods are stopped, which the server may also refuse.
    if changed or not previous.is_at_rest or previous.part("learners").get("ready"):
        return False
    policy = raw["spec"].get("runPolicy") or {}
    ended = previous.is_true("Complete") or previous.is_true("Failed")
    is_removed_later = ended and policy.get("ttlSecondsAfterFinished") is not None
    follows = previous.is_true("Failed") and previous.reason("Failed") == FOLLOWS
    return not is_removed_later and not follows


def _warnings(status: PreviousStatus) -> Iterator[tuple[str, str]]:
    """The conditions whose reasons need action, with these reasons."""
    for kind, entry in status.conditions.items():
        if event_type(kind, str(entry.get("reason"))) == "Warning":
            yield kind, entry["reason"]


class _RefusedError(RetryError):
    """The API server refused a child; the status reports it."""


def _advice(error: ApiError) -> str:
    """What to do about an error that only an administrator can end."""
    if "dilocojobs" in str(error) and "field not declared in schema" in error.message:
        return (
            "; the CRD is older than this operator: upgrade it (diloco crd | kubectl apply "
            "--server-side -f -)"
        )
    return ""


def _version(child: Object) -> tuple[str, str]:
    return child["metadata"]["uid"], child["metadata"]["resourceVersion"]


_VOLATILE = ("resourceVersion", "managedFields", "generation")


def _fingerprint(body: Json, child: Object) -> str:
    """Hash of an apply and of its target; the child's status does not change it."""
    metadata = {k: v for k, v in child["metadata"].items() if k not in _VOLATILE}
    content = {k: v for k, v in child.items() if k not in ("status", "metadata")}
    applied = (body["metadata"].get("annotations") or {}).get(APPLIED, "")
    text = json.dumps([applied, metadata, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _event(job: Object, event: JobEvent, now: datetime, reporter: str) -> Json:
    metadata = job["metadata"]
    at = now.isoformat(timespec="seconds").replace("+00:00", "Z")
    unique = f"{metadata['uid']} {event.reason} {event.message} {metadata.get('generation')} {at}"
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
