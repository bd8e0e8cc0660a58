"""
`diloco certs`: an authority for a job, and one Secret per cluster.

Except for `write_certs` and its helpers, no function does I/O; keys are random.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import NameOID

from diloco.errors import ConfigError
from diloco.rpc.certificates import USAGES, certificates, day, is_key_of
from diloco.rpc.identity import learner_server_name, observer_uri, region_uri, server_name
from diloco.runtime import files
from diloco_job.types import DiLoCoJob

AUTHORITY_DAYS = 3652
CERTIFICATE_DAYS = 365

_CLOCKS = timedelta(minutes=5)
"""How long before now certificates become valid: clocks of clusters differ."""

_PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """An authority with its key."""

    certificate: x509.Certificate
    key: CertificateIssuerPrivateKeyTypes
    bundle: bytes
    """ca.crt: its own certificate first, then other trusted ones."""

    @property
    def key_pem(self) -> bytes:
        """ca.key."""
        return _key_pem(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One certificate with its key, in PEM."""

    certificate: bytes
    key: bytes
    expires: datetime


def new_authority(job: str, now: datetime) -> Authority:
    """An authority that is valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(f"{job} diloco authority")
    certificate = (
        _builder(name, name, key.public_key(), now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate=certificate, key=key, bundle=certificate.public_bytes(_PEM))


def read_authority(bundle: bytes, key_pem: bytes, now: datetime) -> Authority:
    """
    An existing authority; the first certificate of its bundle signs.

    Raises:
        ConfigError: unreadable, expired, not an authority, or the key does not belong to the certificate.
    """
    found = certificates(bundle)
    if not found:
        raise ConfigError("ca.crt contains no certificate in PEM; give that of an authority")
    certificate = found[0]
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        is_authority = constraints.value.ca
    except (x509.ExtensionNotFound, ValueError):
        is_authority = False
    if not is_authority:
        raise ConfigError("the first certificate in ca.crt is not that of an authority")
    if not is_key_of(key_pem, certificate):
        raise ConfigError(
            "ca.key is not the key of the first certificate in ca.crt, or it is encrypted"
        )
    if certificate.not_valid_after_utc <= now:
        raise ConfigError(
            f"ca.crt expired on {day(certificate.not_valid_after_utc)}; move ca.crt and ca.key "
            "away to create a new authority"
        )
    key = serialization.load_pem_private_key(key_pem, password=None)
    return Authority(certificate=certificate, key=key, bundle=bundle)  # type: ignore[arg-type]


def issue(
    authority: Authority,
    *,
    job: str,
    regions: Sequence[str],
    server_names: Sequence[str],
    now: datetime,
    days: int = CERTIFICATE_DAYS,
    observer: bool = False,
) -> Issued:
    """
    A certificate with a new key, for both ends of a connection.

    Args:
        authority: signs; the certificate expires no later than its own.
        job: the job of the regions.
        regions: what the holder may act for.
        server_names: DNS names and IP addresses of the server.
        now: the present time.
        days: its validity.
        observer: the holder may read status and model and submit scores, without a region.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names = [
        *(x509.UniformResourceIdentifier(region_uri(job, region)) for region in regions),
        *([x509.UniformResourceIdentifier(observer_uri(job))] if observer else []),
        *map(_general_name, dict.fromkeys(server_names)),
    ]
    issuer = authority.certificate
    expires = min(now + timedelta(days=days), issuer.not_valid_after_utc)
    common_name = "/".join([job, *regions]) if len(regions) == 1 else job
    certificate = (
        _builder(_named(common_name), issuer.subject, key.public_key(), now, expires)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(USAGES), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return Issued(
        certificate=certificate.public_bytes(_PEM), key=_key_pem(key),
        expires=certificate.not_valid_after_utc,
    )  # fmt: skip


def _general_name(name: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise ConfigError(f"--host {name}: {error}; give a DNS name or an IP address") from None


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _key_pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    expires: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, expires) - _CLOCKS)
        .not_valid_after(expires)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


# ------------------------------------------------------------------------------ diloco certs


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One Secret that was written."""

    path: Path
    regions: tuple[str, ...]
    server: bool
    """Whether the syncer can use it."""
    expires: datetime

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "path": str(self.path), "regions": list(self.regions), "syncer": self.server,
            "expires": self.expires.isoformat(),
        }  # fmt: skip


def describe(directory: Path, written: Sequence[Written]) -> str:
    """What to do with the files, one line each."""
    lines = [
        f"kubectl apply -f {secret.path}  # "
        + (
            "or only this, if one cluster runs all regions"
            if secret is written[-1]
            else f"in the cluster of {_listed(secret.regions)}{' (syncer)' if secret.server else ''}"
        )
        for secret in written
    ]
    return "\n".join(
        [
            f"{directory}: valid until {day(written[-1].expires)}; run the same command again to renew",
            *lines,
            f"keep {directory / 'ca.key'} secret: its holder can join the job",
        ]
    )


def _listed(regions: Sequence[str]) -> str:
    return f"region{'s' if len(regions) > 1 else ''} {', '.join(regions)}"


def secret(name: str, namespace: str, issued: Issued, bundle: bytes) -> dict[str, Any]:
    """The Secret that pods mount; without a namespace, kubectl chooses it."""
    files = {"tls.crt": issued.certificate, "tls.key": issued.key, "ca.crt": bundle}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name} | ({"namespace": namespace} if namespace else {}),
        "type": "kubernetes.io/tls",
        "data": {file: base64.b64encode(data).decode() for file, data in files.items()},
    }


def write_certs(
    job: DiLoCoJob,
    directory: Path,
    *,
    now: datetime,
    days: int = CERTIFICATE_DAYS,
    namespace: str = "",
    hosts: Sequence[str] = (),
) -> list[Written]:
    """
    Write ca.crt, ca.key, a Secret per cluster, and all.yaml for one cluster with all regions.

    An existing authority in the directory is reused; certificates are always new.

    Args:
        job: provides regions with their clusters, the syncer's region and the Secret's name.
        directory: created if missing.
        now: the present time.
        days: validity of the certificates.
        namespace: of the Secrets; empty: the manifest's.
        hosts: additional names and addresses of the syncer; our programs need none.

    Raises:
        ConfigError: the job uses no Secret, or the authority in the directory is not usable.
    """
    name = _secret_name(job)
    namespace = namespace or job.metadata.namespace
    regions = tuple(region.name for region in job.spec.regions)
    clusters: dict[str, tuple[str, ...]] = {}
    for region in job.spec.regions:
        clusters[region.cluster_name] = (*clusters.get(region.cluster_name, ()), region.name)
    if "all" in clusters and len(clusters) > 1:
        raise ConfigError(
            "spec.regions: neither a region nor its cluster can be named all, because all.yaml is "
            "the Secret of all regions"
        )
    authority, contents = _authority(job.metadata.name, directory, now)
    written = []
    for file, own in [*clusters.items(), ("all", regions)]:
        server = job.spec.syncer_region in own
        names = [learner_server_name(job.metadata.name, region) for region in own]
        issued = issue(
            authority, job=job.metadata.name, regions=own, now=now, days=days,
            server_names=[*(_server_names(job, namespace, hosts) if server else ()), *names],
        )  # fmt: skip
        path = directory / f"{file}.yaml"
        document = secret(name, namespace, issued, authority.bundle)
        contents[path] = yaml.safe_dump(document, sort_keys=False).encode()
        written.append(Written(path=path, regions=own, server=server, expires=issued.expires))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, data in contents.items():
        files.replace(path, data, mode=0o644 if path.name == "ca.crt" else 0o600)
    return written


def _server_names(job: DiLoCoJob, namespace: str, hosts: Sequence[str]) -> list[str]:
    # Our clients verify only the first; the others are for other tools.
    service = server_name(job.metadata.name)
    endpoint = job.spec.syncer.endpoint.rpartition(":")[0].strip("[]")
    inside = [f"{service}.{namespace}.svc"] if namespace else []
    return [service, *inside, *([endpoint] if endpoint else []), *hosts]


def _secret_name(job: DiLoCoJob) -> str:
    tls = job.spec.tls
    if tls.mode == "CertManager":
        raise ConfigError(
            "spec.tls.mode: CertManager creates the certificates itself; "
            "diloco certs is for mode Secret"
        )
    if tls.mode == "Disabled":
        raise ConfigError(
            "spec.tls.mode: Disabled, so the certificates would be unused; set "
            f"tls: {{mode: Secret, secretName: {job.metadata.name}-tls}}"
        )
    return tls.secret_name


def _authority(job: str, directory: Path, now: datetime) -> tuple[Authority, dict[Path, bytes]]:
    """The authority in the directory, or a new one with its files."""
    certificate, key = directory / "ca.crt", directory / "ca.key"
    exist = [file.exists() for file in (certificate, key)]
    if all(exist):
        try:
            return read_authority(certificate.read_bytes(), key.read_bytes(), now), {}
        except ConfigError as error:
            raise ConfigError(f"{directory}: {error}") from None
    if any(exist):
        raise ConfigError(
            f"{directory}: one of ca.crt and ca.key is missing; restore it, or move the other one "
            "away to create a new authority (all clusters then need new Secrets)"
        )
    authority = new_authority(job, now)
    return authority, {key: authority.key_pem, certificate: authority.bundle}
