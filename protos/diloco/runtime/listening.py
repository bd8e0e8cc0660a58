"""HTTP servers of the standard library that listen on all addresses, of IPv4 and of IPv6."""

from __future__ import annotations

import socket
import socketserver


class AllAddresses(socketserver.TCPServer):
    """
    Base of a server for clients of both families, before the server's own class.

    A pod has addresses of one family or of both. Where this machine has no IPv6, it is IPv4 alone.
    """

    allow_reuse_address = True

    def __init__(self, port: int, handler: type[socketserver.BaseRequestHandler]) -> None:
        """
        Listen; port 0: any free port.

        Raises:
            OSError: the port is not available.
        """
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
