"""Ports that anybody may connect to: silent peers must not take the process's descriptors and threads."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from diloco.runtime import listening, metrics
from diloco_agent.probe_server import Server
from diloco_agent.probes import Answer
from diloco_operator.watch.health import Health, HealthServer
from diloco_operator.workqueue import WorkQueue

PATIENCE_SECONDS = 60.0


def probes() -> int:
    return Server(0, lambda path, query: Answer(ok=True, message="ok")).port


def operator_health() -> int:
    queue = WorkQueue(lambda key: None, threads=1)
    queue.start()
    return HealthServer(Health(queue), 0).port


def prometheus() -> int:
    return metrics.serve(0, CollectorRegistry())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("serve", "path"),
    [(probes, "/livez"), (operator_health, "/healthz"), (prometheus, "/metrics")],
    ids=["probes", "operator health", "metrics"],
)
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
