"""
The socket between trainer and link: one JSON line per state, the newest wins, nobody waits.

Each side offers its whole state; what has not begun to leave is replaced by what is newer. So a
peer that is stopped, slow or stuck costs the other side nothing but one failed system call.
"""

from __future__ import annotations

import contextlib
import select
import socket


class Pipe:
    """One end. Offering and receiving may happen in two different threads, each in one only."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._leaving = b""
        self._next = b""
        self._partial = b""

    def offer(self, line: bytes) -> None:
        """Make `line` (with its newline) the next to leave, and let leave what can."""
        self._next = line
        self.flush()

    def flush(self) -> bool:
        """
        Let leave what can; True when nothing is left. A peer that is gone swallows everything.
        """
        while self._leaving or self._next:
            if not self._leaving:
                self._leaving, self._next = self._next, b""
            try:
                sent = self._sock.send(self._leaving)
            except BlockingIOError:
                return False
            except OSError:
                self._leaving = self._next = b""
                return True
            self._leaving = self._leaving[sent:]
        return True

    def newest(self) -> bytes | None:
        """
        The newest complete line that arrived since the last call; None if there is none.

        Raises:
            EOFError: the peer is gone and every line was taken.
        """
        gone = False
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                gone = True
                break
            self._partial += data
        complete, newline, rest = self._partial.rpartition(b"\n")
        if newline:
            self._partial = rest
            return complete.rpartition(b"\n")[2]
        if gone:
            raise EOFError
        return None

    def wait(self, timeout_seconds: float) -> bool:
        """
        Block until something can be received, or the peer is gone; False when it took too long.
        """
        with contextlib.suppress(OSError, ValueError):
            return bool(select.select([self._sock], [], [], timeout_seconds)[0])
        return True

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
