"""
Mutual TLS: whose certificate it is, the files it comes from, and why a connection was refused.

Identity is in the certificate, not in what a peer says about itself: URI names say for which
regions its holder may speak, the DNS name `<job>-syncer` makes it the syncer's. Clients verify that
one name whatever address they dial, so node ports, load balancers and IP addresses need no names of
their own.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError

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
        The three files as they are.

        Raises:
            ConfigError: as `load`, but that they fit each other is not looked at.
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
            known: what was read there before.
        """
        self._directory = directory
        self._known = known
        self._said = ""

    def renewed(self) -> Tls | None:
        """
        What is there now, if it differs from what was known; None: nothing new.

        Raises:
            ConfigError: the files changed and cannot be used (said once); go on with what is known.
        """
        try:
            if Tls.read(self._directory) == self._known:
                return None
            found = Tls.load(self._directory)
        except ConfigError as error:
            if str(error) == self._said:
                return None
            self._said = str(error)
            raise
        self._said = ""
        self._known = found
        return found


def server_name(job: str) -> str:
    """The DNS name in the certificate of a job's syncer; the only one that clients verify."""
    return f"{job}-syncer"


def region_uri(job: str, region: str) -> str:
    """
    The URI name that lets the holder of a certificate speak for a region of a job.

    >>> region_uri("stdlib-gpt", "eu")
    'diloco://stdlib-gpt/region/eu'
    """
    return f"diloco://{job}/region/{region}"


def regions_of(names: Iterable[str], job: str | None = None) -> tuple[str, ...]:
    """The regions that URI names stand for, sorted; of one job, or of any."""
    found = (re.fullmatch(r"diloco://([-a-z0-9]+)/region/([-a-z0-9]+)", name) for name in names)
    return tuple(sorted({one[2] for one in found if one and job in (None, one[1])}))


# As gRPC 1.80 to 1.85 says it, measured in tests/integration/test_tls.py; the first that is found.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "CertificateExpired",
        r"certificate has expired",
        "the syncer's certificate, or its authority's, is no longer good: renew the Secret there",
    ),
    (
        "CertificateNotYetValid",
        r"certificate is not yet valid",
        "the syncer's certificate begins later: look at the clocks of both clusters",
    ),
    (
        "CertificateOfOtherAuthority",
        r"CERTIFICATE_VERIFY_FAILED",
        "the syncer's certificate is not from the authority in our ca.crt: the Secrets of all "
        "clusters must come from one authority",
    ),
    (
        "CertificateNotForSyncer",
        r"Hostname Verification Check failed",
        "whoever answered there has a certificate without the DNS name <job>-syncer: look at the "
        "address, and at the Secret of the syncer's region",
    ),
    (
        "PlainText",
        r"WRONG_VERSION_NUMBER|Trying to connect an http1|Failed parsing HTTP/2",
        "whoever answered there does not speak TLS with us: look at the address, and at spec.tls "
        "of the job in both clusters",
    ),
    (
        "ConnectionClosed",
        r"Handshake read failed \((Socket closed|.*reset)",
        "something there closed the connection before a word: a load balancer without a syncer "
        "behind it, or a syncer that is just starting",
    ),
    (
        "HandshakeRefused",
        # TLS 1.3: a client has finished its handshake when the server looks at its certificate.
        r"failed to connect.*(Socket closed|Connection reset by peer)",
        "the syncer took the connection and closed it: it wants TLS with a certificate of its "
        "authority that is good now; look at tls.crt here, and at the log of the syncer",
    ),
    (
        "ConnectionRefused",
        r"Connection refused",
        "nothing listens there: the syncer is not up, or the address is not its own",
    ),
    (
        "NameUnknown",
        r"lookup failed|DNS resolution|errors resolving|Domain name not found",
        "the name of the syncer's address is not known here: look at spec.syncer.endpoint and DNS",
    ),
    (
        "Unreachable",
        r"[Nn]o route to host|[Uu]nreachable",
        "there is no way to this address from here: look at routes and firewalls",
    ),
    (
        "DialTimeout",
        # The connection's own time limit shows as the shutdown of whatever it waited for.
        r"Deadline Exceeded|DEADLINE_EXCEEDED|[Tt]imed out|[Tt]imeout|Endpoint closing"
        r"|handshaker shutdown",
        "no answer in time: look at the network between the clusters and at firewalls",
    ),
)


def explain(details: str) -> str:
    """
    A stable reason for what gRPC says about a connection that did not come about; "": none known.

    Pure. Takes gRPC's details, or the text of the UnavailableError made of them.
    """
    return next((reason for reason, pattern, _ in _REASONS if re.search(pattern, details)), "")


def advice(reason: str) -> str:
    """What such a reason means and what to do, in one sentence; "" for a reason not known."""
    return next((text for known, _, text in _REASONS if known == reason), "")


def fault_of(directory: Path) -> str:
    """
    What a server would hold against the certificate in these files; "": nothing, or unreadable.

    A server that refuses a certificate does not tell its client why (TLS 1.3), so the client shows
    it to itself first: a handshake in memory.
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
    """Why these files are no pair of certificate and key with an authority; "": they are."""
    certificate, key, authority = (directory / name for name in FILES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # A password that is never asked for: without it OpenSSL asks on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        said = getattr(error, "reason", None) or error
        return f"TLS: {certificate} and {key} are no pair ({said}); replace both together"
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        said = getattr(error, "reason", None) or error
        return f"TLS: {authority}: holds no certificate of an authority ({said})"
    return ""
