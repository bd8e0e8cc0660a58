"""
The socket between trainer and link: one JSON line per state; a newer line replaces an unsent one.

A peer that is stopped, slow or stuck costs the sender one failed system call.
"""

from __future__ import annotations

import contextlib
import select
import socket


class Pipe:
    """One end. Sending and receiving may each use one thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._sending = b""
        self._next = b""
        self._partial = b""

    def offer(self, line: bytes) -> None:
        """Make `line` (with its newline) the next to send, and send what the socket takes."""
        self._next = line
        self.flush()

    def flush(self) -> bool:
        """
        Send what the socket takes; True if nothing is left. Lines to a closed peer are discarded.
        """
        while self._sending or self._next:
            if not self._sending:
                self._sending, self._next = self._next, b""
            try:
                sent = self._sock.send(self._sending)
            except BlockingIOError:
                return False
            except OSError:
                self._sending = self._next = b""
                return True
            self._sending = self._sending[sent:]
        return True

    def newest(self) -> bytes | None:
        """
        The newest complete line since the last call; None if there is none.

        Raises:
            EOFError: the peer has closed the socket and every line was read.
        """
        closed = False
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                closed = True
                break
            self._partial += data
        complete, newline, rest = self._partial.rpartition(b"\n")
        if newline:
            self._partial = rest
            return complete.rpartition(b"\n")[2]
        if closed:
            raise EOFError
        return None

    def wait(self, timeout_seconds: float) -> bool:
        """Block until data arrives or the peer closes the socket; False after the timeout."""
        poll = (
            select.poll()
        )  # select.select takes no descriptor above 1023, which a program may have
        with contextlib.suppress(OSError, ValueError):
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(1000 * timeout_seconds))
        return True

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
