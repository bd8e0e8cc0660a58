"""
Everything that one reconcile knows, read fresh: the job's objects, its certificate, its syncer.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from datetime import datetime

from diloco.errors import DilocoError
from diloco.tls import explain, server_name
from diloco.transport import Tls
from diloco_operator import names
from diloco_operator.api import DiLoCoJob
from diloco_operator.certs import tls_facts
from diloco_operator.cluster import ApiError, Cluster, Json
from diloco_operator.decide import managed_by, read_job
from diloco_operator.observed import (
    Answer,
    CertificateFacts,
    Observed,
    Silence,
    answer_of,
    identity,
)
from diloco_operator.syncers import Address, Syncers
from diloco_operator.view import View, tls_secret
from diloco_operator.workqueue import Key


class Reader:
    """Reads for one job at a time per key; safe for use by many threads."""

    def __init__(self, cluster: Cluster, view: View, *, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._view = view
        self._now = now
        self._syncers = Syncers()

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._syncers.forget(key)

    def close(self) -> None:
        """Close the connections to syncers."""
        self._syncers.close()

    def read(self, key: Key, raw: Json) -> Observed:
        """
        What there is around this job, which was read just before.

        Raises:
            ApiError: the API server did not answer, or does not allow it.
        """
        job, _ = read_job(raw)
        if job is None or managed_by(raw):
            # `decide` takes nothing else in; nobody is dialled where another controller says so.
            return Observed(job=raw)
        uses_certificates = job.spec.tls.mode == "CertManager"
        children = self._cluster.children(*key, certificates=uses_certificates)
        pods = self._cluster.pods(*key)
        tls, facts = self._certificate(key, job)
        return Observed(
            job=raw,
            children=children,
            pods=pods,
            syncer=self._ask(key, job, children, tls, facts),
            last_answer=self._syncers.last_answer(key),
            certificate=facts,
        )

    def _certificate(self, key: Key, job: DiLoCoJob) -> tuple[Tls | None, CertificateFacts | None]:
        name = tls_secret(job)
        if not name:
            return None, None
        try:
            found = self._cluster.get("Secret", key.namespace, name)
        except ApiError as error:
            if error.status != 403:
                raise
            problem = f"the operator may not read Secret {name} (rbac.tlsSecrets of its chart)"
            return None, CertificateFacts(reason="CertificateUnreadable", problem=problem)
        if found is None:
            problem = f"Secret {name} does not exist in namespace {key.namespace}"
            return None, CertificateFacts(reason="CertificateMissing", problem=problem)
        data = found.get("data") or {}
        certificate, private, authority = (
            _decoded(data.get(file, "")) for file in ("tls.crt", "tls.key", "ca.crt")
        )
        facts = tls_facts(certificate, authority, self._now(), job=key.name, key_pem=private)
        problem = f"Secret {name}: {facts.problem}" if facts.problem else ""
        return (
            Tls(certificate=certificate, key=private, authority=authority),
            CertificateFacts(
                reason=facts.reason,
                problem=problem,
                expires=facts.expires,
                regions=facts.regions,
                names=facts.server_names,
            ),
        )

    def _ask(
        self,
        key: Key,
        job: DiLoCoJob,
        children: tuple[Json, ...],
        tls: Tls | None,
        facts: CertificateFacts | None,
    ) -> Answer | Silence | None:
        """The syncer's answer; None: it cannot answer now, so it was not asked."""
        if self._view.has_syncer(job) and not _serves(job, children):
            return None
        endpoint = self._view.syncer_address(job, key.namespace)
        if not endpoint:
            return None
        if facts is not None and tls is None:
            return Silence(reason=facts.reason, message=facts.problem)
        address = Address(endpoint=endpoint, tls=tls, server_name=server_name(key.name))
        try:
            reply = self._syncers.ask(key, address)
        except DilocoError as error:
            return Silence(reason=explain(str(error)) or "NoAnswer", message=str(error))
        at = self._now()
        self._syncers.answered(key, at)
        return answer_of(reply, at)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _serves(job: DiLoCoJob, children: tuple[Json, ...]) -> bool:
    name = names.syncer_name(job.metadata.name)
    return any(
        (child.get("status") or {}).get("readyReplicas")
        for child in children
        if identity(child) == ("Deployment", name)
    )
