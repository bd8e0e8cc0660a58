"""
Servers answer clients of both families, since pods have IPv4, IPv6 or both, and silent peers must not take the
process's descriptors and threads.
"""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import pytest
from prometheus_client import CollectorRegistry

from diloco.rpc import servers
from diloco.runtime import listening, metrics
from diloco_agent.probe_server import Server
from diloco_agent.probes import Reply
from diloco_operator.watch.health import Health, HealthServer
from diloco_operator.workqueue import WorkQueue
from diloco_syncer import settings

PATIENCE_SECONDS = 60.0
HOSTS = ("127.0.0.1", "[::1]")
needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


def probes() -> int:
    return Server(0, lambda path, query: Reply(ok=True, message="ok")).port


def operator_health() -> int:
    queue = WorkQueue(lambda key: None, threads=1)
    queue.start()
    return HealthServer(Health(queue), 0).port


def prometheus() -> int:
    return metrics.serve(0, CollectorRegistry())


every_server = pytest.mark.parametrize(
    ("serve", "path"),
    [(probes, "/livez"), (operator_health, "/healthz"), (prometheus, "/metrics")],
    ids=["probes", "operator health", "metrics"],
)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@every_server
def test_silent_connections_are_bounded_and_a_new_one_is_answered(serve, path):
    port = serve()
    most = listening.MAX_CONNECTIONS
    before = descriptors()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(4 * most)]
    try:
        # One descriptor of each is this test's own.
        assert until(lambda: descriptors() <= before + len(silent) + most)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            assert answer.status == 200
        assert silent[0].recv(1) == b""
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("serve", [operator_health, prometheus])
def test_a_connection_that_stays_silent_is_closed(serve, monkeypatch):
    monkeypatch.setattr(listening, "CONNECTION_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", serve()), timeout=PATIENCE_SECONDS) as silent:
        assert silent.recv(1) == b""


@needs_ipv6
@pytest.mark.parametrize("host", HOSTS)
@every_server
def test_probes_health_and_metrics_answer_both_families(serve, path, host):
    with urllib.request.urlopen(f"http://{host}:{serve()}{path}", timeout=20) as answer:
        assert answer.status == 200


@pytest.fixture
def syncer_port() -> Iterator[int]:
    """A gRPC server at the address that syncers listen on by default."""
    given = settings.read(["--spec", "s", "--dir", "d"])
    server = servers.server(max_workers=1)
    port = servers.bind(server, given.listen.replace(":7070", ":0"), None)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait(10)


@needs_ipv6
@pytest.mark.parametrize("host", HOSTS)
def test_a_syncer_that_listens_on_0_0_0_0_answers_both_families(syncer_port, host):
    """gRPC treats it as the wildcard of all families."""
    with grpc.insecure_channel(f"{host}:{syncer_port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=20)


def test_without_ipv6_ipv4_is_served_alone(monkeypatch):
    monkeypatch.setattr(listening.socket, "has_dualstack_ipv6", lambda: False)
    with urllib.request.urlopen(f"http://127.0.0.1:{probes()}/livez", timeout=20) as answer:
        assert answer.status == 200
