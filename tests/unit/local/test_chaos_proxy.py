"""The proxies between learners and the syncer, with real sockets and a real gRPC channel."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import grpc
import pytest

from diloco.rpc.channels import channel
from diloco_local.chaos.proxy import MAX_CONNECTIONS, Proxies
from diloco_local.faults import Fault, Kind

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 60.0
SILENT_SECONDS = 0.3


def fault(kind, *, amount=0.0, bandwidth=0.0):
    return Fault(
        number=1, kind=kind, target="eu/0", at=0, until=9, amount=amount, bandwidth=bandwidth
    )


class Echo:
    """Sends back what it receives."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._answers = []
        self._thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._answers.append(threading.Thread(target=self._answer, args=(connection,)))
                self._answers[-1].start()

    @staticmethod
    def _answer(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._thread, *self._answers):
            thread.join(DEADLINE_SECONDS)


@pytest.fixture
def echo():
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxies(echo):
    running = Proxies(["eu/0", "us/0"])
    yield running
    running.close()
    running.close()


def connect(proxies, echo, learner="eu/0"):
    host, _, port = proxies.endpoint(learner, echo.endpoint).rpartition(":")
    connection = socket.create_connection((host, int(port)), DEADLINE_SECONDS)
    connection.settimeout(DEADLINE_SECONDS)
    return connection


def receive(connection, count):
    found = b""
    while len(found) < count and (data := connection.recv(count - len(found))):
        found += data
    return found


def test_bytes_pass_in_both_directions_and_the_end_of_a_connection_is_passed_on(proxies, echo):
    data = bytes(range(256)) * 4096
    with connect(proxies, echo) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        assert receive(connection, len(data)) == data
        sender.join()
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_a_cut_closes_open_and_new_connections_of_one_learner_until_it_is_undone(proxies, echo):
    with connect(proxies, echo) as cut, connect(proxies, echo, "us/0") as other:
        for connection in (cut, other):
            connection.sendall(b"before")
            assert receive(connection, 6) == b"before"
        proxies.set_fault("eu/0", fault(Kind.CUT))
        for connection in (cut, connect(proxies, echo)):
            with connection, contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
        other.sendall(b"meanwhile")
        assert receive(other, 9) == b"meanwhile"
        proxies.set_fault("eu/0", None)
        with connect(proxies, echo) as again:
            again.sendall(b"after")
            assert receive(again, 5) == b"after"


def test_a_hang_passes_nothing_and_keeps_connections_open(proxies, echo):
    with connect(proxies, echo) as connection:
        connection.sendall(b"before")
        assert receive(connection, 6) == b"before"
        proxies.set_fault("eu/0", fault(Kind.HANG))
        with connect(proxies, echo) as late:
            for silent in (connection, late):
                silent.sendall(b"during")
                silent.settimeout(SILENT_SECONDS)
                with pytest.raises(TimeoutError):
                    silent.recv(1)
                silent.settimeout(DEADLINE_SECONDS)
            proxies.set_fault("eu/0", None)
            for silent in (connection, late):
                assert receive(silent, 6) == b"during"


def test_connections_that_hang_are_limited_and_new_ones_pass_after_it(proxies, echo):
    proxies.set_fault("eu/0", fault(Kind.HANG))
    for _ in range(MAX_CONNECTIONS):
        with connect(proxies, echo) as abandoned:
            abandoned.sendall(b"during")
    with connect(proxies, echo) as refused, contextlib.suppress(ConnectionError):
        assert refused.recv(1) == b""
    proxies.set_fault("eu/0", None)
    deadline, answer = time.monotonic() + DEADLINE_SECONDS, b""
    while answer != b"after" and time.monotonic() < deadline:
        with connect(proxies, echo) as again, contextlib.suppress(ConnectionError):
            again.sendall(b"after")
            answer = receive(again, 5)
    assert answer == b"after"


def test_a_delay_takes_its_latency_in_both_directions_and_limits_the_bandwidth(proxies, echo):
    with connect(proxies, echo) as connection:
        proxies.set_fault("eu/0", fault(Kind.DELAY, amount=0.2, bandwidth=1e6))
        begun = time.monotonic()
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        assert time.monotonic() - begun >= 0.4
        begun, data = time.monotonic(), b"x" * 300_000
        connection.sendall(data)
        assert receive(connection, len(data)) == data
        assert time.monotonic() - begun >= 0.7, "0.2 s of latency twice, and 0.3 s for the bytes"


def test_corruption_inverts_bytes_of_connections_with_fragments_only(proxies, echo):
    data = bytes(20_000)
    with connect(proxies, echo) as control, connect(proxies, echo) as bulk:
        bulk.sendall(b"user-agent diloco-bulk grpc-python")
        receive(bulk, 34)
        proxies.set_fault("eu/0", fault(Kind.CORRUPT, amount=1000.0))
        control.sendall(data)
        assert receive(control, len(data)) == data
        assert proxies.flipped("eu/0") == 0
        bulk.sendall(data)
        damaged = receive(bulk, len(data))
        assert (damaged.count(0), damaged.count(0xFF)) == (len(data) - 1, 1)
        assert proxies.flipped("eu/0") == 1
        bulk.sendall(data)
        assert receive(bulk, len(data)) == data, "the next one is due 1000 s later"


def test_a_channel_for_fragments_is_recognized_by_what_it_sends(proxies, echo):
    """The syncer is not needed: the request with the user agent is the first that the client sends."""
    listener = socket.create_server(("127.0.0.1", 0))
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        proxies.endpoint("eu/0", target)
        with channel(proxies.endpoint("eu/0", target), tls=None, purpose="bulk") as wire:
            call = wire.unary_unary("/diloco.v1.Bulk/Upload")
            pending = call.future(bytes(50_000), timeout=DEADLINE_SECONDS)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE_SECONDS)
                connection.sendall(bytes.fromhex("000000040000000000"))  # the server's settings
                received = b""
                while b"diloco-bulk" not in received:
                    received += connection.recv(1 << 16)
            with pytest.raises(grpc.RpcError):
                pending.result()
    finally:
        listener.close()


def test_a_syncer_that_does_not_listen_closes_the_connection(proxies):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    host, _, own = proxies.endpoint("eu/0", f"127.0.0.1:{port}").rpartition(":")
    with socket.create_connection((host, int(own)), DEADLINE_SECONDS) as connection:
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
