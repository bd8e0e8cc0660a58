"""HTTP servers of the standard library that listen on all addresses, of IPv4 and of IPv6."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
from typing import Any

CONNECTION_SECONDS = 10.0
"""A connection that is silent for longer is closed."""

MAX_CONNECTIONS = 32
"""Open at the same time; the oldest makes room for a new one."""


class AllAddresses(socketserver.TCPServer):
    """
    Base of a server for clients of both families, before the server's own class.

    A pod has addresses of one family or of both. Where this machine has no IPv6, it is IPv4 alone.
    Any client may connect: the number of connections and their silence are bounded, because each
    holds a descriptor, and mostly a thread, of a process that has other things to do.
    """

    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS
    """With the usual 5, a burst of connections waits for seconds: the kernel drops what does not fit."""

    def __init__(self, port: int, handler: type[socketserver.BaseRequestHandler]) -> None:
        """
        Listen; port 0: any free port.

        Raises:
            OSError: the port is not available.
        """
        self._connections: dict[socket.socket, None] = {}
        """Oldest first."""
        self._connections_lock = threading.Lock()
        self.address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        super().__init__(("", port), handler)

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.socket.getsockname()[1])

    def server_bind(self) -> None:
        """Bind, also where the system reserves IPv6 sockets for IPv6 (net.ipv6.bindv6only)."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; a handler with a `timeout` replaces the limit."""
        connection, address = super().get_request()
        connection.settimeout(CONNECTION_SECONDS)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, if necessary instead of the oldest."""
        with self._connections_lock:
            while len(self._connections) >= MAX_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):  # its thread closes it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._connections[request] = None
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        """Close a connection."""
        with self._connections_lock:
            self._connections.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep silent about peers that are gone or were."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
