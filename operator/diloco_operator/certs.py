"""
What a certificate allows and what is wrong with it, for status and messages. Pure.

What a certificate allows is in its names (diloco.tls): URI names for the regions that its holder may
speak for, the DNS name `<job>-syncer` for the syncer. `authority.py` makes certificates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from diloco.tls import regions_of

USAGES = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
"""One certificate serves both ends: a cluster has one Secret."""

_NO_EXTENSION = (
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    ValueError,
)
"""It is not there, or cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """What a certificate says, and what is wrong with it whatever it is used for."""

    expires: datetime | None
    """UTC; None: it cannot be read."""
    regions: tuple[str, ...]
    """Its holder may speak for these, sorted."""
    server_names: tuple[str, ...]
    """DNS names and IP addresses; the syncer's has `<job>-syncer`."""
    reason: str = ""
    """CertificateUnreadable, CertificateExpired, CertificateNotYetValid,
    CertificateOfOtherAuthority, CertificateUsage or KeyOfOtherCertificate; "": nothing."""
    problem: str = ""
    """The same in words, with what to do."""


def tls_facts(
    cert_pem: bytes,
    ca_pem: bytes,
    now: datetime,
    *,
    job: str | None = None,
    key_pem: bytes | None = None,
) -> CertificateFacts:
    """
    What the Secret's tls.crt says, held against its ca.crt. Never raises.

    Args:
        cert_pem: tls.crt: the certificate, then any intermediate ones.
        ca_pem: ca.crt: one or more authorities.
        now: the present time, with a time zone.
        job: count only regions of this job; None: of any.
        key_pem: tls.key, to hold against the certificate; None: not looked at.
    """
    chain, authorities = certificates(cert_pem), certificates(ca_pem)
    if not chain or not authorities:
        file = "ca.crt" if chain else "tls.crt"
        return CertificateFacts(
            expires=None,
            regions=(),
            server_names=(),
            reason="CertificateUnreadable",
            problem=f"{file} holds no certificate in PEM; make the Secret anew (diloco certs)",
        )
    leaf = chain[0]
    names = _names(leaf)
    reason, problem = _wrong(chain, authorities, now, key_pem)
    return CertificateFacts(
        expires=leaf.not_valid_after_utc,
        regions=regions_of(names.get_values_for_type(x509.UniformResourceIdentifier), job),
        server_names=(
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        ),
        reason=reason,
        problem=problem,
    )


def _wrong(
    chain: Sequence[x509.Certificate],
    authorities: Sequence[x509.Certificate],
    now: datetime,
    key_pem: bytes | None,
) -> tuple[str, str]:
    leaf = chain[0]
    path = _path(chain, authorities)
    for one in path or (leaf,):
        who = (
            "the certificate" if one is leaf else f"its authority ({one.subject.rfc4514_string()})"
        )
        if one.not_valid_after_utc <= now:
            return (
                "CertificateExpired",
                f"{who} expired on {day(one.not_valid_after_utc)}; renew it (diloco certs) and "
                "apply the Secret: running processes take it up by themselves",
            )
        if one.not_valid_before_utc > now:
            return (
                "CertificateNotYetValid",
                f"{who} begins on {day(one.not_valid_before_utc)}; look at the clocks",
            )
    if not path:
        return (
            "CertificateOfOtherAuthority",
            f"tls.crt was issued by {leaf.issuer.rfc4514_string()}, which is not in ca.crt; both "
            "must come from the one authority of the job",
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
    """From the certificate up to an authority, both included; empty: there is no way."""
    path = [chain[0]]
    for _ in chain:
        for issuer in authorities:
            if path[-1] == issuer:
                return path
            if _issued(path[-1], issuer):
                return [*path, issuer]
        above = next((one for one in chain[1:] if _issued(path[-1], one)), None)
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
