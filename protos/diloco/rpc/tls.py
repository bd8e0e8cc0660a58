"""
Mutual TLS: identity in certificates, the files they come from, and why a connection was refused.

The certificate alone proves identity: its URI names list the regions that its holder may act for,
the DNS name `<job>-syncer` makes its holder the syncer. Clients verify that DNS name whatever
address they dial, so node ports, load balancers and IP addresses need no names of their own.
"""

from __future__ import annotations

import contextlib
import logging
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError

log = logging.getLogger(__name__)

FILES = ("tls.crt", "tls.key", "ca.crt")
_READS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """One end of mutual TLS, in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes

    @classmethod
    def load(cls, directory: Path | None) -> Tls | None:
        """
        Read tls.crt, tls.key and ca.crt; None without a directory.

        Raises:
            ConfigError: a file is missing, unreadable or not PEM, or the key is not that of the
                certificate; the message names it.
        """
        if directory is None:
            return None
        found = cls.read(directory)
        for _ in range(_READS):
            problem = _misfit(directory)
            # Files may be replaced between two reads: only what did not change meanwhile is judged.
            before, found = found, cls.read(directory)
            if found == before:
                if problem:
                    raise ConfigError(problem)
                return found
        raise ConfigError(f"TLS: {directory}: the files keep changing; replace them all at once")

    @classmethod
    def read(cls, directory: Path) -> Tls:
        """
        Read the three files without checking that they match.

        Raises:
            ConfigError: as `load`, but a mismatch of the files is not checked.
        """
        certificate, key, authority = (_pem(directory / name) for name in FILES)
        return cls(certificate=certificate, key=key, authority=authority)


class TlsFiles:
    """A directory of certificate files that may be replaced at any time."""

    def __init__(self, directory: Path, known: Tls | None = None) -> None:
        """
        Nothing is read yet.

        Args:
            directory: holds tls.crt, tls.key and ca.crt.
            known: the content that was read before.
        """
        self._directory = directory
        self._known = known
        self._last_error = ""

    def renewed(self) -> Tls | None:
        """
        The content, if it has changed since the last call; None: unchanged.

        Raises:
            ConfigError: the files changed and cannot be used; raised once per problem, keep using the known ones.
        """
        try:
            if Tls.read(self._directory) == self._known:
                return None
            found = Tls.load(self._directory)
        except ConfigError as error:
            if str(error) == self._last_error:
                return None
            self._last_error = str(error)
            raise
        self._last_error = ""
        self._known = found
        return found

    def renewed_or_warn(self) -> Tls | None:
        """As `renewed`, but files that cannot be used are logged and the previous ones stay in use."""
        try:
            return self.renewed()
        except ConfigError as error:
            log.warning("%s; the previous certificate stays in use", error)
            return None


def server_name(job: str) -> str:
    """The DNS name in the certificate of a job's syncer; the only one that clients verify."""
    return f"{job}-syncer"


def region_uri(job: str, region: str) -> str:
    """
    The URI name that lets the holder of a certificate act for a region of a job.

    >>> region_uri("stdlib-gpt", "eu")
    'diloco://stdlib-gpt/region/eu'
    """
    return f"diloco://{job}/region/{region}"


def observer_uri(job: str) -> str:
    """
    The URI name that lets the holder of a certificate observe a job: its status, model and scores.

    >>> observer_uri("stdlib-gpt")
    'diloco://stdlib-gpt/observer'
    """
    return f"diloco://{job}/observer"


def regions_of(names: Iterable[str], job: str | None = None) -> tuple[str, ...]:
    """The regions named by URI names, sorted; of the given job, or of any."""
    found = (re.fullmatch(r"diloco://([-a-z0-9]+)/region/([-a-z0-9]+)", name) for name in names)
    return tuple(sorted({name[2] for name in found if name and job in (None, name[1])}))


# Messages of gRPC 1.80 to 1.85, measured in tests/integration/test_tls.py; the first match counts.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "CertificateExpired",
        r"certificate has expired",
        "the certificate of the syncer or of its authority has expired: renew the Secret there",
    ),
    (
        "CertificateNotYetValid",
        r"certificate is not yet valid",
        "the syncer's certificate is not valid yet: check the clocks of both clusters",
    ),
    (
        "CertificateOfOtherAuthority",
        r"CERTIFICATE_VERIFY_FAILED",
        "the syncer's certificate was not issued by the authority in our ca.crt: the Secrets of all "
        "clusters must come from the same authority",
    ),
    (
        "CertificateNotForSyncer",
        r"Hostname Verification Check failed",
        "the certificate of the server at this address lacks the DNS name <job>-syncer: check the "
        "address and the Secret of the syncer's region",
    ),
    (
        "PlainText",
        r"WRONG_VERSION_NUMBER|Trying to connect an http1|Failed parsing HTTP/2",
        "the server at this address did not negotiate TLS: check the address, and spec.tls of the "
        "job in both clusters",
    ),
    (
        "ConnectionClosed",
        r"Handshake read failed \((Socket closed|.*reset)",
        "the connection was closed before the handshake: by a load balancer without a running "
        "syncer, or by a syncer that is starting",
    ),
    (
        "HandshakeRefused",
        # TLS 1.3: a client has finished its handshake when the server checks its certificate.
        r"failed to connect.*(Socket closed|Connection reset by peer)",
        "the syncer accepted the connection and closed it: it requires TLS with a valid certificate "
        "of its authority; check tls.crt here, and the log of the syncer",
    ),
    (
        "ConnectionRefused",
        r"Connection refused",
        "nothing listens at this address: the syncer is not running, or the address is wrong",
    ),
    (
        "NameUnknown",
        r"lookup failed|DNS resolution|errors resolving|Domain name not found",
        "the host name of the syncer cannot be resolved here: check spec.syncer.endpoint and DNS",
    ),
    (
        "Unreachable",
        r"[Nn]o route to host|[Uu]nreachable",
        "the address cannot be reached from here: check routes and firewalls",
    ),
    (
        "DialTimeout",
        # The time limit of a connection shows as the shutdown of the step that it waited for.
        r"Deadline Exceeded|DEADLINE_EXCEEDED|[Tt]imed out|[Tt]imeout|Endpoint closing"
        r"|handshaker shutdown",
        "no answer within the deadline: check firewalls and the network between the clusters",
    ),
)


def explain(details: str) -> str:
    """
    The stable reason for gRPC's description of a failed connection; "": not known.

    Pure. Takes gRPC's details, or the message of the UnavailableError made of them.
    """
    return next((reason for reason, pattern, _ in _REASONS if re.search(pattern, details)), "")


def advice(reason: str) -> str:
    """What a reason means and what to do, in one sentence; "" for an unknown reason."""
    return next((text for known, _, text in _REASONS if known == reason), "")


def fault_of(directory: Path) -> str:
    """
    Why a server would refuse the certificate in these files; "": it would not, or unreadable.

    A server that refuses a certificate does not report why (TLS 1.3), so the client verifies it
    itself, in a handshake in memory.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    certificate, key, authority = (directory / name for name in FILES)
    try:
        for context in (server, client):
            context.load_cert_chain(certificate, key, password="")
        server.load_verify_locations(authority)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(to_client, to_server, server_side=False),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for end in ends * 2:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return f"the certificate in {certificate} is refused by its own {FILES[2]}: {error.verify_message}"
    except OSError:
        return ""
    return ""


def _pem(file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"TLS: {file}: {error.strerror}; the directory must hold tls.crt, tls.key and ca.crt"
        ) from None
    if b"-----BEGIN" not in data:
        raise ConfigError(f"TLS: {file}: {len(data)} bytes without a PEM block; expected one")
    return data


def _misfit(directory: Path) -> str:
    """How these files do not match; "": key, certificate and authority can be used."""
    certificate, key, authority = (directory / name for name in FILES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # Without a password OpenSSL prompts on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return f"TLS: {certificate} and {key} do not match ({reason}); replace both together"
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return f"TLS: {authority}: holds no certificate of an authority ({reason})"
    return ""
