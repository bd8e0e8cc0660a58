"""
One connection between two machines of a learner: messages with a kind, three numbers and some bytes.

Small messages, such as plans, go between two parts of a bulk transfer. A peer that sends nothing for SILENT_SECONDS
has failed: at least each second, a message shows that it is there.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

VERSION = 2
"""Another one after each change of what is sent; the ranks compare it when they meet."""

BEAT_SECONDS = 1.0

SILENT_SECONDS = 15.0
"""As the agents of a learner's pods (docs/adr/0020): a busy machine may be silent for seconds."""

LEAVE_SECONDS = 2.0
"""How long to wait for the last messages to be sent."""

HELLO_SECONDS = 5.0
"""A peer that is silent is dropped."""

WELCOME_SECONDS = 0.5
"""The first machine serves one peer at a time: untrusted ones must not keep the others out. Those dial again."""

SMALL_BYTES = 1 << 14
"""A message of so many bytes is sent in one call."""

MAX_BYTES = 16 << 20
"""Of one message: a plan of many fragments is the largest."""

SECRET_BYTES = 32

CLOSED = "the connection was closed"

_MAGIC = b"dilocorl"
_HELLO = struct.Struct(f"<8sII{SECRET_BYTES}s")  # magic, version, machine, secret
_HEAD = struct.Struct("<IIQQQ")  # kind, bytes, three numbers


class Kind(IntEnum):
    """What a message is."""

    BEAT = 1
    """The sender is there; from the first machine, with the rows of all ranks."""
    PLAN = 2
    """First machine: the plan of a boundary."""
    ROWS = 3
    """Further machine: the rows of its ranks."""
    PART = 4
    """Further machine: (boundary, unit, place in the list), and bytes that its ranks copied."""
    RESULT = 5
    """First machine: (generation, unit, place in the list), and bytes of an inbox or of the constants."""
    STORED = 6
    """Further machine: (generation, unit) is complete here."""
    LEFT = 7
    """The ranks of the sender have left the job; nothing follows."""
    FAILED = 8
    """All ranks are to end, with this sentence."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message; the meaning of its numbers depends on its kind."""

    kind: Kind
    numbers: tuple[int, int, int] = (0, 0, 0)
    data: bytes | bytearray = b""


class Relay:
    """
    One end of a connection, with a thread that sends and one that receives.

    Args:
        sock: connected, and greeted.
        handle: called for each message, in the receiving thread; a ValueError or IndexError of it is the peer's fault.
        lost: called once, with the reason, when the connection has failed before the peer left.
        beat: the bytes of the next BEAT.
    """

    def __init__(
        self, sock: socket.socket, *, handle: Callable[[Message], None], lost: Callable[[str], None],
        beat: Callable[[], bytes] = bytes,
    ) -> None:  # fmt: skip
        sock.settimeout(None)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._handle, self._lost, self._beat = handle, lost, beat
        self._small: deque[Message] = deque()
        self._bulk: deque[Iterator[Message]] = deque()
        self._changed = threading.Condition()
        self._handling = threading.Lock()
        """Held while a message is handled; what that writes to may be gone after `close`."""
        self._closing = self._ended = False
        self.left = False
        """The peer has left in order."""
        self._threads = [
            threading.Thread(target=self._send_all, name="diloco-relay-out", daemon=True),
            threading.Thread(target=self._receive_all, name="diloco-relay-in", daemon=True),
        ]

    def start(self) -> None:
        """Begin to send and to receive."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Send a small message before whatever is bulk; does not wait."""
        with self._changed:
            self._small.append(message)
            self._changed.notify_all()

    def send_bulk(self, messages: Iterator[Message]) -> None:
        """Send these messages, each of which is made when it is sent; does not wait."""
        with self._changed:
            self._bulk.append(messages)
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is small, and nothing more; returns when that is done, at the latest after LEAVE_SECONDS."""
        with self._handling, self._changed:
            self._closing = True
            self._bulk.clear()
            self._changed.notify_all()
        self._threads[0].join(LEAVE_SECONDS)
        # What the peer has sent is read until it closes its end: a reset could overtake the last message.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    # ------------------------------------------------------------ threads

    def _send_all(self) -> None:
        try:
            while (message := self._next()) is not None:
                head = _HEAD.pack(message.kind, len(message.data), *message.numbers)
                if len(message.data) > SMALL_BYTES:
                    self._sock.sendall(head)
                    self._sock.sendall(message.data)
                else:
                    self._sock.sendall(head + message.data)
        except OSError as error:
            self._fail(_reason(error))

    def _next(self) -> Message | None:
        """What to send next; None: nothing any longer."""
        due = time.monotonic() + BEAT_SECONDS
        while True:
            with self._changed:
                if self._small:
                    return self._small.popleft()
                if self._closing or self._ended:
                    return None
                job = self._bulk[0] if self._bulk else None
                if job is None:
                    self._changed.wait(max(0.0, due - time.monotonic()))
            if job is not None:
                if (message := next(job, None)) is not None:
                    return message
                with self._changed:
                    if self._bulk and self._bulk[0] is job:
                        self._bulk.popleft()
            elif time.monotonic() >= due:
                return Message(Kind.BEAT, data=self._beat())

    def _receive_all(self) -> None:
        try:
            while True:
                head = self._receive(_HEAD.size)
                kind, size, *numbers = _HEAD.unpack(head)
                if size > MAX_BYTES:
                    raise ValueError(f"a message of {size} bytes, expected at most {MAX_BYTES}")
                data = self._receive(size)
                first, second, third = numbers
                message = Message(Kind(kind), (first, second, third), data)
                self.left = self.left or message.kind is Kind.LEFT
                with self._handling:
                    if not self._closing:
                        self._handle(message)
        except (OSError, EOFError) as error:
            self._fail(_reason(error))
        except (ValueError, IndexError) as error:
            self._fail(f"it sent what was not expected: {error}")

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        view, found = memoryview(data), 0
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while found < size:
            if not poll.poll(1000 * SILENT_SECONDS):
                raise EOFError(f"nothing came for {SILENT_SECONDS:.0f} s")
            count = self._sock.recv_into(view[found:])
            if not count:
                raise EOFError(CLOSED)
            found += count
        return data

    def _fail(self, text: str) -> None:
        with self._handling:
            with self._changed:
                first = not (self._ended or self._closing or self.left)
                self._ended = True
                self._changed.notify_all()
            if first:
                self._lost(text)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _reason(error: OSError | EOFError) -> str:
    """Why a connection ended; which thread noticed it first makes no difference."""
    if isinstance(error, ConnectionError):
        return CLOSED
    return str(getattr(error, "strerror", None) or error)


# ---------------------------------------------------------------- how a connection begins


def greet(sock: socket.socket, machine: int, *, own: bytes, other: bytes) -> None:
    """
    Prove to the peer that this is a machine of the same learner, and let it prove the same.

    Args:
        sock: connected.
        machine: number of this one.
        own: secret that this end states.
        other: secret that the first machine states.

    Raises:
        OSError: the peer does not answer, or is not the first machine of this learner.
    """
    sock.settimeout(HELLO_SECONDS)
    sock.sendall(_HELLO.pack(_MAGIC, VERSION, machine, own))
    _check(sock, other)


def welcome(sock: socket.socket, *, own: bytes, other: bytes) -> int:
    """
    First machine: which machine connected.

    Raises:
        OSError: it is none of this learner.
    """
    machine = _check(sock, other, seconds=WELCOME_SECONDS)
    sock.settimeout(HELLO_SECONDS)
    sock.sendall(_HELLO.pack(_MAGIC, VERSION, 0, own))
    return machine


def _check(sock: socket.socket, secret: bytes, *, seconds: float = HELLO_SECONDS) -> int:
    data, deadline = b"", time.monotonic() + seconds
    while len(data) < _HELLO.size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        more = sock.recv(_HELLO.size - len(data))
        if not more:
            raise OSError("the connection was closed before it began")
        data += more
    magic, version, machine, found = _HELLO.unpack(data)
    if magic != _MAGIC or version != VERSION:
        raise OSError(
            f"it is no relay of this version: it began with {bytes(magic)!r}, version {version}"
        )
    if not hmac.compare_digest(found, secret):
        raise OSError("it does not know the secret of this learner")
    return int(machine)
