"""
Channels, servers, and how errors travel: the one way in which programs of a job talk gRPC.

Control messages and bulk data each get a channel of their own with its own TCP connection, so that
a slow transfer cannot make a heartbeat late. Options not set here are left at gRPC's defaults on
purpose: none was measured to help, and some (`bdp_probe`) hurt.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import grpc

from diloco.errors import (
    ALL_ERRORS,
    ConfigError,
    DamagedError,
    DilocoError,
    MismatchError,
    NotFiniteError,
    ProtocolError,
    StaleEpochError,
    StaleIncarnationError,
    StorageError,
    UnauthorisedError,
    UnavailableError,
    UnknownLearnerError,
)
from diloco.tls import Tls as Tls
from diloco.tls import TlsFiles, advice, explain

log = logging.getLogger(__name__)

REASON_KEY = "diloco-reason"
"""Trailing metadata that carries `DilocoError.reason`."""

_MESSAGE_BYTES = 2000  # gRPC refuses trailers above 8 KiB, and percent-encoding may triple this
_SMALL_BUFFER_BYTES = 16 << 20
_KEEPALIVE_SECONDS = 30
_ENDLESS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", _KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL = [
    *_ENDLESS,
    *_KEEPALIVE,
    # Channels with equal arguments share one TCP connection unless each has its own pool.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC waits up to two minutes by default: far longer than a syncer takes to come back.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
]
_SERVER = [
    *_ENDLESS,
    *_KEEPALIVE,
    # By default a second server binds the same port silently and takes half of the connections.
    ("grpc.so_reuseport", 0),
    # By default a client that pings every 30 s without calls is sent away (too_many_pings).
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


Purpose = Literal["control", "bulk"]


def channel(
    target: str, *, tls: Tls | None, purpose: Purpose, server_name: str | None = None
) -> grpc.Channel:
    """
    A channel with a TCP connection of its own; it connects when first used, and again after every
    loss.

    Args:
        target: host:port to dial.
        tls: certificates; None: plain text.
        purpose: what the server sees as the user agent.
        server_name: name that the server's certificate must have; None: the host dialled.
    """
    options = [*_CHANNEL, ("grpc.primary_user_agent", f"diloco-{purpose}")]
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    return grpc.secure_channel(target, credentials, options=options)


class Connection:
    """One channel to one server, replaced when the certificate files have changed."""

    def __init__(
        self,
        target: str,
        *,
        tls_dir: Path | None,
        purpose: Purpose,
        server_name: str | None = None,
    ) -> None:
        """
        As `channel`, with the certificates of a directory; None: plain text.

        Raises:
            ConfigError: the certificate files cannot be used.
        """
        tls = Tls.load(tls_dir)
        self._files = TlsFiles(tls_dir, tls) if tls_dir is not None else None
        self._make = partial(channel, target, purpose=purpose, server_name=server_name)
        self._renewing = threading.Lock()
        self.channel = self._make(tls=tls)

    def renew(self) -> bool:
        """
        Call when a connection was lost or refused: True when there is another channel now.

        Calls on the channel before it are cancelled. Files that cannot be used are warned about.
        """
        if self._files is None:
            return False
        with self._renewing:
            tls = _renewed(self._files)
            if tls is None:
                return False
            before, self.channel = self.channel, self._make(tls=tls)
        before.close()
        log.info("the certificate files changed: dialling with what is there now")
        return True

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()


def _renewed(files: TlsFiles) -> Tls | None:
    try:
        return files.renewed()
    except ConfigError as error:
        log.warning("%s; going on with the certificate that was there before", error)
        return None


def server(handlers: Sequence[grpc.GenericRpcHandler] = (), *, max_workers: int) -> grpc.Server:
    """
    A server that is not bound yet.

    Args:
        handlers: generic handlers; generated `add_…_to_server` functions work as well.
        max_workers: threads. Every open stream holds one: too few, and streams wait for each other
            for ever.
    """
    threads = ThreadPoolExecutor(max_workers, thread_name_prefix="grpc")
    return grpc.server(threads, handlers=list(handlers), options=_SERVER)


def bind(server: grpc.Server, address: str, tls: Tls | None, *, tls_dir: Path | None = None) -> int:
    """
    Listen on host:port (port 0: any free one) and return the port.

    With TLS, clients must present a certificate of the same authority.

    Args:
        server: not bound yet.
        address: host:port.
        tls: certificates; None: plain text.
        tls_dir: where they come from: new connections use what lies there then; None: always `tls`.

    Raises:
        ConfigError: not host:port, the port is in use or not allowed, or the host is not of this
            machine.
    """
    _probe(address)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _server_credentials(tls, tls_dir))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from None
    if not port:
        raise ConfigError(f"cannot listen on {address}: give a free port of this machine")
    return port


def _server_credentials(tls: Tls, tls_dir: Path | None) -> grpc.ServerCredentials:
    def configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(tls.key, tls.certificate)], root_certificates=tls.authority
        )

    files = TlsFiles(tls_dir, tls) if tls_dir is not None else None

    def look() -> grpc.ServerCertificateConfiguration | None:
        # gRPC asks before each handshake; None: as before.
        found = _renewed(files) if files is not None else None
        if found is None:
            return None
        log.info("the certificate files changed: new connections get what is there now")
        return configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        configuration(tls),
        look,  # type: ignore[arg-type]  # the stub forgets None
        require_client_authentication=True,
    )


_STATUS: dict[type[DilocoError], grpc.StatusCode] = {
    DilocoError: grpc.StatusCode.INTERNAL,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    StaleIncarnationError: grpc.StatusCode.ABORTED,
    StaleEpochError: grpc.StatusCode.ABORTED,
    UnknownLearnerError: grpc.StatusCode.NOT_FOUND,
    DamagedError: grpc.StatusCode.DATA_LOSS,
    NotFiniteError: grpc.StatusCode.OUT_OF_RANGE,
    MismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    UnauthorisedError: grpc.StatusCode.PERMISSION_DENIED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    StorageError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_BY_REASON = {error.reason: error for error in ALL_ERRORS}
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def status_of(error: DilocoError) -> grpc.StatusCode:
    """The gRPC status of an error; a subclass without an entry has its parent's."""
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def abort(context: grpc.ServicerContext, error: DilocoError) -> NoReturn:
    """
    End the call with the error's status, message and reason, from which `error_of` makes it anew.
    """
    context.set_trailing_metadata(((REASON_KEY, error.reason),))
    message = str(error).encode()[:_MESSAGE_BYTES].decode(errors="ignore")
    context.abort(status_of(error), message)
    raise error  # not reached: abort raises


@contextmanager
def aborting(context: grpc.ServicerContext) -> Iterator[None]:
    """
    Every error of the body ends the call: ours as it is, any other as INTERNAL, with its trace in
    our log.
    """
    try:
        yield
    except DilocoError as error:
        abort(context, error)
    except Exception as error:
        # Once the call is over (the peer went away, or abort was called), nothing is left to tell.
        if context.is_active() and context.code() is None:  # type: ignore[attr-defined]
            log.exception("call ended by an unexpected error")
            abort(
                context,
                DilocoError(f"unexpected {type(error).__name__}; see the log of this program"),
            )
        raise


def error_of(error: grpc.RpcError) -> DilocoError:
    """
    The error that the peer sent, of the same class and with the same message.

    Anything else is UnavailableError where trying again may help (UNAVAILABLE, DEADLINE_EXCEEDED,
    CANCELLED), and ProtocolError where it cannot.
    """
    if not isinstance(error, grpc.Call):
        return UnavailableError(f"call ended without a status: {error!r}")
    code, details = error.code(), error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == REASON_KEY and value in _BY_REASON:
            return _BY_REASON[str(value)](details)
    if code in _PASSING:
        meaning = advice(explain(details)) if code is not grpc.StatusCode.CANCELLED else ""
        return UnavailableError(f"{code.name}: {details}{meaning and f'; {meaning}'}")
    return ProtocolError(f"{code.name if code else 'no status'}: {details}")


class Backoff:
    """
    How long to wait before the next try: exponential with full jitter.

    Pure but for `rng`. Full jitter, because all learners lose a syncer at the same moment.
    """

    def __init__(self, base_seconds: float, cap_seconds: float, rng: random.Random) -> None:
        self._base_seconds = base_seconds
        self._cap_seconds = cap_seconds
        self._rng = rng
        self._tries = 0

    def next(self) -> float:
        """Seconds to wait: uniform in 0 … min(cap, base · 2^tries)."""
        # 2^64 is beyond any cap; a larger exponent would overflow after days of trying.
        limit = min(self._cap_seconds, self._base_seconds * 2.0 ** min(self._tries, 64))
        self._tries += 1
        return self._rng.uniform(0.0, limit)

    def reset(self) -> None:
        """It worked: start small again."""
        self._tries = 0


def tune_malloc() -> bool:
    """
    Keep freed message buffers instead of giving them back to the kernel; call before threads start.

    A fresh page costs more than copying it: without this a stream of 1 MiB messages spends half of
    its time in page faults. Costs up to 512 MiB of memory that is kept though free.

    Returns:
        Whether it took effect: False outside glibc.
    """
    trim_threshold, mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(mmap_threshold, 32 << 20)) and bool(mallopt(trim_threshold, 512 << 20))


def tune_interpreter() -> None:
    """Let threads take turns every 0.5 ms: at 5 ms, one busy thread slows transfers 20 times."""
    sys.setswitchinterval(5e-4)


def kernel_warnings(settings: Path = Path("/proc/sys/net/ipv4")) -> list[str]:
    """Sentences on the TCP settings that will slow transfers between far regions; Linux only."""
    most = {name: _words(settings / name)[-1:] for name in ("tcp_wmem", "tcp_rmem")}
    said = [
        f"net.ipv4.{name} allows {int(size) >> 20} MiB per connection, about "
        f"{int(size) * 8 / 0.15 / 1e9:.1f} Gbit/s over 100 ms; "
        "raise its maximum to 64 MiB or more between far regions"
        for name, words in most.items()
        for size in words
        if int(size) < _SMALL_BUFFER_BYTES
    ]
    cubic = _words(settings / "tcp_congestion_control") == ["cubic"]
    if cubic and _words(settings / "tcp_slow_start_after_idle") == ["1"]:
        said.append(
            "net.ipv4.tcp_congestion_control is cubic and tcp_slow_start_after_idle is 1: every "
            "transfer starts slowly; set it to 0, or use bbr, between far regions"
        )
    return said


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _probe(address: str) -> None:
    """
    Say exactly why an address cannot be listened on.

    gRPC says only that it did not work, and takes "localhost" even if another program holds one of
    its two addresses.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"listen address: {address!r} is not host:port with a port in 0..65535")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"listen address: {host!r} is not known: {error.strerror}") from None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(place)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:
                continue  # a name with an IPv6 address on a machine without IPv6
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} of {host} is in use by another program; "
                    "stop it or choose another port"
                ) from None
            raise ConfigError(
                f"cannot listen on {address}: {os.strerror(error.errno or 0)}; "
                "give a free port of this machine"
            ) from None
