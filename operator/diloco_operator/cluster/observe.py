"""
Observes one job for a reconcile: its objects, its certificate and its syncer, all read each time.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from diloco.errors import DilocoError
from diloco.rpc.certificates import CertificateFacts, tls_facts
from diloco.rpc.connection_reasons import explain
from diloco.rpc.identity import server_name
from diloco.rpc.tls import Tls
from diloco_job import names
from diloco_job.types import DiLoCoJob
from diloco_operator.cluster.client import ApiError, Cluster, Json
from diloco_operator.cluster.stuck_events import StuckEvents
from diloco_operator.cluster.syncers import Address, Syncers
from diloco_operator.resources.operator_scope import OperatorScope, tls_secret
from diloco_operator.resources.queue_labels import asks_for_pod_groups
from diloco_operator.state.objects import controller_uid, identity
from diloco_operator.state.observation import (
    Answer,
    Failure,
    Observation,
    RegionFailure,
    Unreachable,
    answer_of,
)
from diloco_operator.state.pending_events import stuck_objects
from diloco_operator.state.queues import queued_uids
from diloco_operator.state.stored_job import StoredJob
from diloco_operator.workqueue import Key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Credentials:
    """The certificate of this cluster."""

    tls: Tls | None
    """None: it could not be read; `facts` has the reason."""
    facts: CertificateFacts
    secret: Json | None = None
    """Metadata of their Secret."""


class Observer:
    """Safe for use by many threads, with one thread per key at a time."""

    def __init__(
        self,
        cluster: Cluster,
        scope: OperatorScope,
        *,
        now: Callable[[], datetime],
        answered_late: Callable[[Key], object] = lambda _: None,
    ) -> None:
        """Call `answered_late` when a syncer that had been silent replies: observe its job."""
        self._cluster = cluster
        self._scope = scope
        self._now = now
        self._syncers = Syncers(answered_late)
        self._events = StuckEvents(cluster)
        self._silent_since: dict[Key, datetime] = {}

    def forget(self, key: Key) -> None:
        """The job was deleted."""
        self._syncers.forget(key)
        self._events.forget(key)
        self._silent_since.pop(key, None)

    def close(self) -> None:
        """Close the connections to syncers."""
        self._syncers.close()

    def observe(
        self, key: Key, raw: Json, *, stored: StoredJob | None = None, newest: bool = False
    ) -> Observation:
        """
        Observe everything around the job whose object is `raw`.

        Args:
            key: the job's.
            raw: as read now.
            stored: the same, if it was parsed already.
            newest: read everything from the store, which is expensive; otherwise see `Cluster._of_job`.

        Raises:
            ApiError: the API server did not answer, or denied access.
        """
        stored = stored or StoredJob.parse(raw)
        job = stored.job
        if job is None:
            # Another controller's syncer is not contacted either.
            return Observation(stored=stored)
        uses_certificates = job.spec.tls.mode == "CertManager"
        children = self._cluster.children(
            *key,
            certificates=uses_certificates,
            policies=self._scope.network_policies is not None,
            pod_groups=asks_for_pod_groups(raw),
            newest=newest,
        )
        children += self._unlabelled_claim(key, job, children)
        pods = self._cluster.pods(*key, newest=newest)
        credentials = self._credentials(key, job)
        own = _own(raw, children)
        stuck = stuck_objects(raw, children, pods, self._now())
        return Observation(
            stored=stored,
            children=children,
            pods=pods,
            events=self._events.about(key, stuck),
            workloads=self._workloads(key, pods),
            syncer=self._ask(key, job, own, credentials),
            last_answer=self._syncers.last_answer(key),
            certificate=credentials.facts if credentials else None,
            secret=credentials.secret if credentials else None,
        )

    def _workloads(self, key: Key, pods: tuple[Json, ...]) -> tuple[Json, ...]:
        """Kueue's explanations, which are read only while pods wait for it."""
        uids = queued_uids(pods)
        return self._cluster.workloads(key.namespace, uids) if uids else ()

    def report_failures(
        self, key: Key, job: DiLoCoJob, failures: Iterable[Failure | RegionFailure]
    ) -> None:
        """
        Report failures to the syncer; a later reconcile repeats what did not arrive.

        Raises:
            ApiError: the API server did not answer, or denied access.
        """
        address = self._address(key, job, self._credentials(key, job))
        if not isinstance(address, Address):
            return
        try:
            for failure in failures:
                self._syncers.report_failure(key, address, failure)
        except DilocoError as error:
            log.info("could not report the failure to the syncer: %s", error)

    def _credentials(self, key: Key, job: DiLoCoJob) -> _Credentials | None:
        name = tls_secret(job)
        if not name:
            return None
        try:
            secret = self._cluster.get("Secret", key.namespace, name)
        except ApiError as error:
            if error.status != 403:
                raise
            return _no_credentials(
                "CertificateUnreadable",
                f"the operator may not read Secret {name} (rbac.tlsSecretNamespaces of its chart)",
            )
        if secret is None:
            return _no_credentials(
                "CertificateMissing", f"Secret {name} does not exist in namespace {key.namespace}"
            )
        data = secret.get("data") or {}
        certificate, private, authority = (
            _decoded(data.get(file, "")) for file in ("tls.crt", "tls.key", "ca.crt")
        )
        facts = tls_facts(certificate, authority, self._now(), job=key.name, key_pem=private)
        if facts.problem:
            facts = replace(facts, problem=f"Secret {name}: {facts.problem}")
        tls = Tls(certificate=certificate, key=private, authority=authority)
        return _Credentials(tls=tls, facts=facts, secret={"metadata": secret["metadata"]})

    def _unlabelled_claim(
        self, key: Key, job: DiLoCoJob, children: tuple[Json, ...]
    ) -> tuple[Json, ...]:
        """The syncer's claim if it lost its label, or if a person restored it without one."""
        kind, name = "PersistentVolumeClaim", names.syncer_name(key.name)
        if not self._scope.has_syncer(job) or (kind, name) in map(identity, children):
            return ()
        claim = self._cluster.get(kind, key.namespace, name)
        return () if claim is None else (claim,)

    def _ask(
        self,
        key: Key,
        job: DiLoCoJob,
        own: tuple[Json, ...],
        credentials: _Credentials | None,
    ) -> Answer | Unreachable | None:
        """The syncer's answer; None: it is not running or has no address."""
        if self._scope.has_syncer(job) and not _is_serving(job, own):
            return None
        address = self._address(key, job, credentials)
        if not isinstance(address, Address):
            return address
        try:
            reply = self._syncers.ask(key, address)
        except DilocoError as error:
            since = self._silent_since.setdefault(key, self._now())
            reason = explain(str(error)) or "NoAnswer"
            return Unreachable(reason=reason, message=str(error), silent_since=since)
        at = self._now()
        self._silent_since.pop(key, None)
        self._syncers.answered(key, at)
        return answer_of(reply, at)

    def _address(
        self, key: Key, job: DiLoCoJob, credentials: _Credentials | None
    ) -> Address | Unreachable | None:
        """How to dial the syncer; None: the manifest has no address."""
        endpoint = self._scope.syncer_address(job, key.namespace)
        if not endpoint:
            return None
        if credentials is not None and credentials.tls is None:
            facts = credentials.facts
            return Unreachable(reason=facts.reason, message=facts.problem)
        tls = credentials.tls if credentials else None
        return Address(
            endpoint=endpoint,
            tls=tls,
            server_name=server_name(key.name),
            proxy=self._scope.proxy_to_syncer(job),
        )


def _no_credentials(reason: str, problem: str) -> _Credentials:
    return _Credentials(tls=None, facts=CertificateFacts(reason=reason, problem=problem))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _own(raw: Json, children: tuple[Json, ...]) -> tuple[Json, ...]:
    """
    The children of this job, and those without a controller, which it adopts.

    Those of a former job of the same name stay until the garbage collector has deleted them, and the
    answer of that job's syncer does not count.
    """
    uid = raw["metadata"].get("uid", "")
    return tuple(child for child in children if controller_uid(child) in ("", uid))


def _is_serving(job: DiLoCoJob, own: tuple[Json, ...]) -> bool:
    name = names.syncer_name(job.metadata.name)
    return any(
        (child.get("status") or {}).get("readyReplicas")
        for child in own
        if identity(child) == ("Deployment", name)
    )
