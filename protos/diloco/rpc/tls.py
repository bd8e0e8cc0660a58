"""
The files of mutual TLS: read, checked, and read again when they are replaced.

`identity` names what a certificate proves, `connection_reasons` why a connection failed.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError

log = logging.getLogger(__name__)

FILES = ("tls.crt", "tls.key", "ca.crt")
_READS = 5

_HOSTNAME_MISMATCH = 62
"""X509_V_ERR_HOSTNAME_MISMATCH of OpenSSL."""


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


def fault_of(directory: Path) -> str:
    """
    Why a server would refuse the certificate in these files; "": it would not, or unreadable.

    A server that refuses a certificate does not report why (TLS 1.3), so the client verifies it
    itself, in a handshake in memory.
    """
    found = _handshake(directory, server_name="")
    where = directory / FILES[0]
    return (
        f"the certificate in {where} is refused by its own {FILES[2]}: {found[1]}" if found else ""
    )


def lacks_name(directory: Path, server_name: str) -> bool:
    """Whether clients that verify this DNS name would refuse the certificate in these files for lack of it alone."""
    found = _handshake(directory, server_name=server_name)
    return found is not None and found[0] == _HOSTNAME_MISMATCH


def _handshake(directory: Path, *, server_name: str) -> tuple[int, str] | None:
    """
    Code and message with which one end refuses the certificate in these files; None: neither does, or unreadable.

    Args:
        directory: both ends have these files.
        server_name: what the client verifies; "": the server alone verifies its client.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not server_name:
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        server.verify_mode = ssl.CERT_REQUIRED
    certificate, key, authority = (directory / name for name in FILES)
    try:
        for context in (server, client):
            context.load_cert_chain(certificate, key, password="")
            context.load_verify_locations(authority)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(
                to_client, to_server, server_side=False, server_hostname=server_name or None
            ),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for end in ends * 2:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_code, error.verify_message
    except (OSError, ValueError):
        return None
    return None


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
