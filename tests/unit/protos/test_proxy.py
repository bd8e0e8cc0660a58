"""Connections through an HTTP proxy: only if one is named, whatever the environment contains."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from diloco.errors import UnavailableError
from diloco.rpc import servers
from diloco.rpc.status_client import SyncerClient
from diloco.v1 import syncer_pb2, syncer_pb2_grpc


class FakeSyncer(syncer_pb2_grpc.SyncerServicer):
    def GetStatus(self, request, context):  # noqa: N802
        return syncer_pb2.StatusReply(step=7)


@pytest.fixture
def syncer() -> Iterator[int]:
    """Port of a syncer."""
    server = servers.server(max_workers=2)
    syncer_pb2_grpc.add_SyncerServicer_to_server(FakeSyncer(), server)
    port = servers.bind(server, "127.0.0.1:0", None)
    server.start()
    yield port
    server.stop(None).wait(10)


class Proxy:
    """An HTTP proxy that connects every target to one port."""

    def __init__(self, port: int) -> None:
        self.asked: list[str] = []
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # A thread that waits in accept keeps a socket open that is only closed.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(4096)
        self.asked.append(head.split(b"\r\n")[0].decode())
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            ways = [
                threading.Thread(target=_copy, args=pair, daemon=True)
                for pair in ((client, server), (server, client))
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(syncer: int) -> Iterator[Proxy]:
    made = Proxy(syncer)
    yield made
    made.close()


def test_a_syncer_that_only_a_proxy_reaches_is_reached_through_it(proxy):
    """The name of the syncer means nothing on this side: the proxy resolves it."""
    with closing(SyncerClient("syncer.invalid:7070", proxy=proxy.url)) as client:
        assert client.status(timeout_seconds=20).step == 7
    assert proxy.asked == ["CONNECT syncer.invalid:7070 HTTP/1.1"]


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_of_the_environment_is_ignored(proxy, syncer, monkeypatch, name):
    monkeypatch.setenv(name, proxy.url)
    with closing(SyncerClient(f"127.0.0.1:{syncer}")) as client:
        assert client.status(timeout_seconds=20).step == 7
    with (
        closing(SyncerClient("syncer.invalid:7070")) as client,
        pytest.raises(UnavailableError),
    ):
        client.status(timeout_seconds=2)
    assert proxy.asked == []


def test_a_proxy_that_is_gone_is_an_error_and_never_a_direct_connection(proxy, syncer):
    proxy.close()
    with (
        closing(SyncerClient(f"127.0.0.1:{syncer}", proxy=proxy.url)) as client,
        pytest.raises(UnavailableError),
    ):
        client.status(timeout_seconds=2)
