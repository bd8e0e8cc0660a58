"""
Client channels: one TCP connection each for control messages and for bulk data.

Control and bulk are separate so that a slow transfer cannot delay a heartbeat. Options not set here
keep gRPC's defaults on purpose: none was measured to help, and some (`bdp_probe`) hurt.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Literal

import grpc

from diloco.rpc.tls import Tls, TlsFiles

log = logging.getLogger(__name__)


KEEPALIVE_SECONDS = 30
ACKNOWLEDGED_SECONDS = 10
PING_SECONDS = 60
"""
A ping follows this long after the last data. A peer whose machine acknowledges nothing is lost
ACKNOWLEDGED_SECONDS later (TCP_USER_TIMEOUT, which gRPC sets to the timeout of its keepalive), a process that
stops responding and does not answer the ping PING_SECONDS later: behind bulk data, an honest answer takes long.
"""
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
KEEPALIVE = [
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", ACKNOWLEDGED_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PING_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL = [
    *UNLIMITED,
    *KEEPALIVE,
    # Channels with equal arguments share one TCP connection unless each has its own pool.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC waits up to two minutes by default: far longer than a syncer takes to restart.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


Purpose = Literal["control", "bulk"]


def channel(
    target: str,
    *,
    tls: Tls | None,
    purpose: Purpose,
    server_name: str | None = None,
    reply_bytes: int | None = None,
    proxy: str = "",
) -> grpc.Channel:
    """
    A channel with a TCP connection of its own; it connects on first use and after every loss.

    Args:
        target: host:port to dial.
        tls: certificates; None: plain text.
        purpose: what the server sees as the user agent.
        server_name: name that the server's certificate must have; None: the host dialled.
        reply_bytes: largest reply of a server that is not trusted, which may not be compressed
            either; None: no limit.
        proxy: http://host:port of an HTTP proxy that passes TCP on (CONNECT); "": none, whatever
            the variables http_proxy and https_proxy are.
    """
    options = [*_CHANNEL, ("grpc.primary_user_agent", f"diloco-{purpose}")]
    options.append(("grpc.enable_http_proxy", int(bool(proxy))))
    if proxy:
        options.append(("grpc.http_proxy", proxy))
    if reply_bytes is not None:
        limits = {"grpc.max_receive_message_length": reply_bytes}
        limits["grpc.compression_enabled_algorithms_bitset"] = 1  # identity only
        options = [*(o for o in options if o[0] not in limits), *limits.items()]
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
        proxy: str = "",
    ) -> None:
        """
        As `channel`, with the certificates of a directory; None: plain text.

        Raises:
            ConfigError: the certificate files cannot be used.
        """
        tls = Tls.load(tls_dir)
        self._files = TlsFiles(tls_dir, tls) if tls_dir is not None else None
        self._make = partial(channel, target, purpose=purpose, server_name=server_name, proxy=proxy)
        self._renewing = threading.Lock()
        self.channel = self._make(tls=tls)

    def renew(self) -> bool:
        """
        Call when a connection was lost or refused; returns True if the channel was replaced.

        Calls on the previous channel are cancelled. Files that cannot be used are logged.
        """
        if self._files is None:
            return False
        with self._renewing:
            tls = self._files.renewed_or_warn()
            if tls is None:
                return False
            previous, self.channel = self.channel, self._make(tls=tls)
        previous.close()
        log.info("the certificate files changed; reconnecting with the new ones")
        return True

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()
