"""A second address of this machine, through which connections can be slowed down, stopped and cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping


class Tunnel:
    """
    Forwards ports of `host` to the same ports of 127.0.0.1; a context manager.

    Args:
        ports: and the bytes per second that each direction takes; 0: as many as there are.
    """

    host = "127.0.0.2"

    def __init__(self, ports: Mapping[int, int]) -> None:
        self._ports = ports
        self._listeners: list[socket.socket] = []
        self._pairs: dict[int, list[socket.socket]] = {port: [] for port in ports}
        self._still: set[int] = set()

    def __enter__(self) -> Tunnel:
        for port in self._ports:
            listener = socket.create_server((self.host, port))
            self._listeners.append(listener)
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for port in self._ports:
            self.cut(port)
            for sock in self._pairs[port]:
                sock.close()

    def cut(self, port: int) -> None:
        """Close all connections of a port."""
        for sock in self._pairs[port]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def still(self, port: int) -> None:
        """From now on, nothing gets through, and no connection is closed."""
        self._still.add(port)

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                near.close()
                continue
            self._pairs[port] += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(*ends, port), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, port: int) -> None:
        rate = self._ports[port]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 12 if rate else 1 << 16):
                while port in self._still:
                    time.sleep(0.05)
                if rate:
                    time.sleep(len(data) / rate)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
