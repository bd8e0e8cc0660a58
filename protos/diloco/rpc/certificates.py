"""
What a certificate allows and what is wrong with it, for status and messages. Pure.

Its names allow (diloco.rpc.identity): URI names the regions that its holder may act for, the DNS name
`<job>-syncer` the syncer's role. `diloco_cli.authority` issues certificates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from diloco.rpc.identity import regions_of

USAGES = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
"""One certificate serves both ends: a cluster has one Secret."""

RENEWAL_DAYS = 30
"""The end of a certificate is announced this long before, but not before a tenth of its validity is left."""

_NO_EXTENSION = (
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    ValueError,
)
"""The extension is missing or cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """The names in a certificate, and its first problem, if any."""

    regions: tuple[str, ...] = ()
    """Regions that its holder may represent, sorted."""
    server_names: tuple[str, ...] = ()
    """DNS names and IP addresses; the syncer's has `<job>-syncer`."""
    reason: str = ""
    """CertificateUnreadable, CertificateExpired, CertificateNotYetValid,
    CertificateOfOtherAuthority, CertificateUsage or KeyOfOtherCertificate; "": no problem."""
    problem: str = ""
    """The problem in one sentence, with what to do."""
    renewal: str = ""
    """That it ends soon, in one sentence; "": it does not, or it has a problem."""


def tls_facts(
    cert_pem: bytes,
    ca_pem: bytes,
    now: datetime,
    *,
    job: str | None = None,
    key_pem: bytes | None = None,
) -> CertificateFacts:
    """
    Content of the Secret's tls.crt, verified with its ca.crt. Never raises.

    Args:
        cert_pem: tls.crt: the certificate, then any intermediate ones.
        ca_pem: ca.crt: one or more authorities.
        now: the present time, with a time zone.
        job: count only regions of this job; None: of any.
        key_pem: tls.key, which must match the certificate; None: not checked.
    """
    chain, authorities = certificates(cert_pem), certificates(ca_pem)
    if not chain or not authorities:
        file = "ca.crt" if chain else "tls.crt"
        return CertificateFacts(
            reason="CertificateUnreadable",
            problem=f"{file} holds no certificate in PEM; create the Secret again (diloco certs)",
        )
    leaf = chain[0]
    names, path = _names(leaf), _path(chain, authorities)
    reason, problem = _wrong(leaf, path, now, key_pem)
    return CertificateFacts(
        regions=regions_of(names.get_values_for_type(x509.UniformResourceIdentifier), job),
        server_names=(
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        ),
        reason=reason,
        problem=problem,
        renewal="" if reason else _ends_soon(path, now),
    )


def _ends_soon(path: Sequence[x509.Certificate], now: datetime) -> str:
    for certificate in path:
        ends = certificate.not_valid_after_utc
        tenth = (ends - certificate.not_valid_before_utc) / 10
        if ends - now < min(timedelta(days=RENEWAL_DAYS), tenth):
            return f"{_subject(certificate, path[0])} expires on {day(ends)}"
    return ""


def _subject(certificate: x509.Certificate, leaf: x509.Certificate) -> str:
    authority = f"its authority ({certificate.subject.rfc4514_string()})"
    return "the certificate" if certificate is leaf else authority


def _wrong(
    leaf: x509.Certificate,
    path: Sequence[x509.Certificate],
    now: datetime,
    key_pem: bytes | None,
) -> tuple[str, str]:
    for certificate in path or (leaf,):
        subject = _subject(certificate, leaf)
        if certificate.not_valid_after_utc <= now:
            return (
                "CertificateExpired",
                f"{subject} expired on {day(certificate.not_valid_after_utc)}; renew it (diloco certs) and "
                "apply the Secret: running processes reload it",
            )
        if certificate.not_valid_before_utc > now:
            return (
                "CertificateNotYetValid",
                f"{subject} is not valid before {day(certificate.not_valid_before_utc)}; check the clocks",
            )
    if not path:
        return (
            "CertificateOfOtherAuthority",
            f"tls.crt was issued by {leaf.issuer.rfc4514_string()}, which is not in ca.crt; both "
            "must come from the authority of the job",
        )
    if key_pem is not None and not is_key_of(key_pem, leaf):
        return "KeyOfOtherCertificate", "tls.key is not the key of tls.crt; replace both together"
    if not set(USAGES) <= _usages(leaf):
        return (
            "CertificateUsage",
            "the certificate is not for both ends of a connection; it needs the usages "
            "client auth and server auth",
        )
    return "", ""


def certificates(pem: bytes) -> list[x509.Certificate]:
    """All certificates of a PEM file, in order; empty when it holds none."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):
        return []


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _NO_EXTENSION:
        return x509.SubjectAlternativeName([])


def _usages(certificate: x509.Certificate) -> set[x509.ObjectIdentifier]:
    try:
        return set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except _NO_EXTENSION:
        return set(USAGES)  # without the extension every usage is allowed


def _path(
    chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> list[x509.Certificate]:
    """From the certificate up to an authority, both included; empty: there is none."""
    path = [chain[0]]
    for _ in chain:
        for issuer in authorities:
            if path[-1] == issuer:
                return path
            if _issued(path[-1], issuer):
                return [*path, issuer]
        above = next(
            (certificate for certificate in chain[1:] if _issued(path[-1], certificate)), None
        )
        if above is None:
            return []
        path.append(above)
    return []


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def is_key_of(key_pem: bytes, certificate: x509.Certificate) -> bool:
    """Whether this is the certificate's key, unencrypted."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        return key.public_key() == certificate.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False


def day(moment: datetime) -> str:
    """A moment as messages show it."""
    return f"{moment:%Y-%m-%d %H:%M} UTC"
