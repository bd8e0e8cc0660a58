"""
Which peer may act for which region, and which may observe the job: decided by its certificate, never
by what it states.

An authority may serve several jobs, so every call needs a certificate that names this one: a region of
it (`diloco://<job>/region/<region>`), the observer's role (`diloco://<job>/observer`) or the syncer's
DNS name (`<job>-syncer`). Any of them may read the status and the model and submit a score; only a
region's may act for its learners or report that they failed, and only the syncer's cluster may report
that the job failed.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from diloco.errors import UnauthorisedError
from diloco.rpc.identity import observer_uri, region_uri, regions_of, server_name
from diloco.runtime.formatting import shorten
from diloco_syncer.core.admission import MAX_REGION

_VERSION = 0xA0
"""Tag of the version in a certificate, which is absent in those of version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authorizer:
    """Checks every call that acts for a learner."""

    job: str
    tls: bool
    """Peers have certificates; without TLS, any peer may act for any learner."""

    def check(self, context: grpc.ServicerContext, learner: str) -> None:
        """
        Check that this peer may act for this learner ("<region>/<index>").

        Raises:
            UnauthorisedError: its certificate does not name the learner's region.
        """
        if not self.tls:
            return
        names = _names(context, "peer_uri")
        region = shorten(learner.partition("/")[0], MAX_REGION)
        if region_uri(self.job, region) in names:
            return
        allowed = regions_of(names, self.job)
        seen = f"region {', '.join(allowed)}" if allowed else "no region"
        raise UnauthorisedError(
            f"{shorten(learner, MAX_REGION + 10)} presented a certificate for {seen} of job {self.job}, "
            f"expected one with the URI name {region_uri(self.job, region)}: apply the Secret of region "
            f"{region} in its cluster (diloco certs writes one per region)"
        )

    def check_observer(self, context: grpc.ServicerContext) -> None:
        """
        Check that this peer belongs to the job, in any role.

        Raises:
            UnauthorisedError: its certificate does not name this job.
        """
        if not self.tls:
            return
        names = _names(context, "peer_uri")
        if (
            regions_of(names, self.job)
            or observer_uri(self.job) in names
            or server_name(self.job) in _names(context, "peer_dns")
        ):
            return
        raise UnauthorisedError(
            f"the certificate names no role in job {self.job}, expected a URI name "
            f"{region_uri(self.job, '<region>')} or {observer_uri(self.job)}: use the Secret of this job"
        )

    def check_region(self, context: grpc.ServicerContext, region: str) -> None:
        """
        Check that this peer may act for this region.

        Raises:
            UnauthorisedError: its certificate does not name the region.
        """
        if self.tls and region_uri(self.job, region) not in _names(context, "peer_uri"):
            shown = region_uri(self.job, shorten(region, MAX_REGION))
            raise UnauthorisedError(
                f"the certificate does not have the URI name {shown}: only the operator of a region "
                "may report that its learners failed"
            )

    def check_syncer(self, context: grpc.ServicerContext) -> None:
        """
        Check that this peer is the syncer's cluster.

        Raises:
            UnauthorisedError: its certificate does not have the syncer's name.
        """
        if self.tls and server_name(self.job) not in _names(context, "peer_dns"):
            raise UnauthorisedError(
                f"the certificate does not have the DNS name {server_name(self.job)}: only the "
                "operator of the syncer's region may report that the job failed"
            )


def _names(context: grpc.ServicerContext, kind: str) -> list[str]:
    found: Iterable[bytes] = context.auth_context().get(kind, ())  # type: ignore[assignment]
    return [name.decode(errors="replace") for name in found]


def certificate_serial(context: grpc.ServicerContext) -> str:
    """Serial number of the peer's certificate, hexadecimal; "": it has none."""
    found: Iterable[bytes] = context.auth_context().get("x509_pem_cert", ())  # type: ignore[assignment]
    for pem in found:
        return serial_of(ssl.PEM_cert_to_DER_cert(pem.decode()))
    return ""


def serial_of(der: bytes) -> str:
    """
    Serial number in a certificate: Certificate{TBSCertificate{[0] version, INTEGER serial, ...}, ...}.

    The images of the syncer have no library for it. gRPC has verified the certificate.
    """
    at = _enter(der, _enter(der, 0))
    if der[at] == _VERSION:
        at = _enter(der, at) + der[at + 1]
    start = _enter(der, at)
    return der[start : start + der[at + 1]].hex().lstrip("0") or "0"


def _enter(der: bytes, at: int) -> int:
    """Where the content of the element at this place begins."""
    length = der[at + 1]
    return at + 2 + (length & 0x7F if length & 0x80 else 0)
