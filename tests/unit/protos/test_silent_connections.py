"""Connections that are silent after their handshake: the server closes them, with its own options made shorter."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from diloco.rpc import channels, servers
from diloco_testing.network.echo_server import echo_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, ACK, PING, GOAWAY = 4, 1, 6, 7
MAX_CONCURRENT_STREAMS = 3
IDLE, KEEPALIVE = "grpc.max_connection_idle_ms", "grpc.keepalive_time_ms"
UNACKNOWLEDGED, UNANSWERED = "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"


def frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame of stream 0."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, 0) + payload


class Peer:
    """An HTTP/2 connection without any call."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.address = self._socket.getsockname()
        self._socket.sendall(PREFACE + frame(SETTINGS))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Type, flags and payload of what the server sends, until it closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while header := self._read(9):
                size, kind, flags = int.from_bytes(header[:3]), header[3], header[4]
                yield kind, flags, self._read(size)

    def answer(self, payload: bytes) -> None:
        """Answer a ping."""
        self._socket.sendall(frame(PING, ACK, payload))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._socket.recv(size - len(data))):
            data += more
        return data


@contextlib.contextmanager
def serving(monkeypatch, **changes: int) -> Iterator[int]:
    """A server with these options instead of its own."""
    assert changes.keys() <= dict(servers._SERVER).keys()
    options = [(name, changes.get(name, value)) for name, value in servers._SERVER]
    monkeypatch.setattr(servers, "_SERVER", options)
    with echo_server() as port:
        yield port


def test_a11_a_connection_without_a_call_is_closed_although_its_peer_answers(monkeypatch):
    with serving(monkeypatch, **{IDLE: 1000}) as port, Peer(port) as peer:
        begun, seen = time.monotonic(), []
        for kind, flags, payload in peer.frames():
            seen.append(kind)
            if kind == PING and not flags & ACK:
                peer.answer(payload)
        assert GOAWAY in seen
        assert time.monotonic() - begun < 15


def test_a11_a_connection_whose_peer_stands_still_is_closed_after_a_ping(monkeypatch):
    with serving(monkeypatch, **{KEEPALIVE: 1000, UNANSWERED: 1000}) as port, Peer(port) as peer:
        begun = time.monotonic()
        *before, (last, _, reason) = peer.frames()
        assert PING in [kind for kind, _, _ in before], "the server asks before it closes"
        assert last == GOAWAY
        assert b"ping_timeout" in reason
        assert 1.5 < time.monotonic() - begun < 15


def test_a11_a_half_open_connection_is_closed_when_a_ping_is_not_acknowledged(monkeypatch):
    """The kernel does it, at this limit of the server's socket: packets cannot be lost on this machine."""
    with serving(monkeypatch) as port, Peer(port) as peer:
        next(peer.frames())
        with accepted(peer) as connection:
            limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit == channels.ACKNOWLEDGED_SECONDS * 1000


def accepted(peer: Peer) -> socket.socket:
    """A copy of the server's end of this connection: the server is in this process."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            each = socket.socket(fileno=os.dup(int(number)))
            try:
                name = each.getpeername()  # of a Unix socket: a text
                if isinstance(name, tuple) and name[1] == peer.address[1]:
                    return each.dup()
            finally:
                each.close()
    raise AssertionError("the server has not accepted the connection")


def test_a_peer_that_answers_keeps_its_connection(monkeypatch):
    with serving(monkeypatch, **{KEEPALIVE: 1000, UNANSWERED: 1000}) as port, Peer(port) as peer:
        answered = 0
        for kind, flags, payload in peer.frames():
            if kind == PING and not flags & ACK:
                peer.answer(payload)
                answered += 1
            if answered == 3:
                break
        assert answered == 3


def test_a_client_of_ours_connects_again_with_its_next_call_after_it_was_idle(monkeypatch):
    with serving(monkeypatch, **{IDLE: 500}) as port:
        with channels.channel(f"127.0.0.1:{port}", tls=None, purpose="control") as channel:
            call = channel.unary_unary("/test/Call")
            assert call(b"a", timeout=20) == b"a"
            with Peer(port) as peer:
                list(peer.frames())  # as long as that takes, the other was idle too
            assert call(b"b", timeout=20) == b"b"


def test_a_connection_carries_so_many_calls_at_a_time(monkeypatch):
    with serving(monkeypatch) as port, Peer(port) as peer:
        settings = next(
            payload for kind, flags, payload in peer.frames() if kind == SETTINGS and not flags
        )
    values = dict(struct.iter_unpack(">HI", settings))
    assert values[MAX_CONCURRENT_STREAMS] == servers.CONNECTION_STREAMS == 128, "as documented"


@pytest.mark.parametrize(
    ("option", "milliseconds"),
    [
        (IDLE, servers.IDLE_SECONDS * 1000),
        (KEEPALIVE, channels.KEEPALIVE_SECONDS * 1000),
        (UNACKNOWLEDGED, channels.ACKNOWLEDGED_SECONDS * 1000),
        (UNANSWERED, channels.PING_SECONDS * 1000),
    ],
)
def test_the_limits_are_those_that_are_documented(option, milliseconds):
    assert dict(servers._SERVER)[option] == milliseconds
    documented = (600, 30, 10, 60)
    assert documented == (
        servers.IDLE_SECONDS, channels.KEEPALIVE_SECONDS, channels.ACKNOWLEDGED_SECONDS,
        channels.PING_SECONDS,
    )  # fmt: skip
