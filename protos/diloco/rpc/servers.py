"""
gRPC servers: options, listening addresses and certificates that are reloaded when their files change.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

import grpc

from diloco.errors import ConfigError
from diloco.rpc.channels import KEEPALIVE
from diloco.rpc.threads import Threads
from diloco.rpc.tls import Tls, TlsFiles

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20
"""
Most bytes of a message from a client. gRPC buffers a message before any of our code runs, so this is what
an untrusted peer may cost per stream; each service has smaller limits of its own.
"""

HANDSHAKE_SECONDS = 10
"""A connection without a finished handshake (TLS, HTTP/2 settings) is closed after this."""

IDLE_SECONDS = 600
"""A connection without a call is closed after this; clients connect again with their next call."""

CONNECTION_STREAMS = 128
"""Calls of one connection at a time; gRPC clients queue further ones."""

RESERVED_DESCRIPTORS = 256
"""Files that stay free for snapshots and logs however many connections come."""

MAX_DESCRIPTORS = 1 << 16
"""The limit of open files is raised to at most this."""

_SERVER = [
    *KEEPALIVE,
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # Bit 0: identity only. A compressed message could be a thousand times larger than what was sent.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
    ("grpc.max_concurrent_streams", CONNECTION_STREAMS),
    # By default a second server binds the same port silently and takes half of the connections.
    ("grpc.so_reuseport", 0),
    # By default a client that pings every 30 s without calls is disconnected (too_many_pings).
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


def server(handlers: Sequence[grpc.GenericRpcHandler] = (), *, max_workers: int) -> grpc.Server:
    """
    A server that is not bound yet.

    Args:
        handlers: generic handlers; generated `add_…_to_server` functions work as well.
        max_workers: threads. Every open stream holds one: with too few, streams wait for each other
            forever.
    """
    limit = ("grpc.max_allowed_incoming_connections", _most_connections())
    threads = Threads(max_workers, thread_name_prefix="grpc")
    return grpc.server(threads, handlers=list(handlers), options=[*_SERVER, limit])


def _most_connections() -> int:
    """As many as descriptors allow, after the soft limit is raised as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    usable = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)
    return max(usable // 2, usable - RESERVED_DESCRIPTORS)


def bind(server: grpc.Server, address: str, tls: Tls | None, *, tls_dir: Path | None = None) -> int:
    """
    Listen on host:port (port 0: any free one) and return the port.

    With TLS, clients must present a certificate of the same authority.

    Args:
        server: not bound yet.
        address: host:port.
        tls: certificates; None: plain text.
        tls_dir: where they come from; new connections use its current files. None: always `tls`.

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

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # gRPC calls this before each handshake; None: no change.
        found = files.renewed_or_warn() if files is not None else None
        if found is None:
            return None
        log.info("the certificate files changed; new connections use the new ones")
        return configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        configuration(tls),
        fetch,  # type: ignore[arg-type]  # the stub forgets None
        require_client_authentication=True,
    )


def _probe(address: str) -> None:
    """
    Find out exactly why an address cannot be bound.

    gRPC reports only the failure, and accepts "localhost" even if another program holds one of its
    two addresses.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"listen address: {address!r} is not host:port with a port in 0..65535")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"listen address: {host!r} cannot be resolved: {error.strerror}"
        ) from None
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
