"""
Registers and serves the Prometheus metrics of a component (`metric_table`).

`prometheus_client` is imported only when metrics are registered: a learner without a metrics port
does not need it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from diloco.runtime.listening import AllAddresses
from diloco.runtime.metric_table import METRICS, Component

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


def register(
    component: Component, registry: CollectorRegistry
) -> Mapping[str, Counter | Gauge | Histogram]:
    """
    Create the metrics of a component in the caller's registry; name → metric.

    Raises:
        ValueError: the registry has them already.
    """
    import prometheus_client

    made: dict[str, Counter | Gauge | Histogram] = {}
    for metric in METRICS:
        if metric.component != component:
            continue
        if metric.kind == "histogram":
            made[metric.name] = prometheus_client.Histogram(
                metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry
            )
        else:
            kind = (
                prometheus_client.Counter if metric.kind == "counter" else prometheus_client.Gauge
            )
            made[metric.name] = kind(metric.name, metric.help, metric.labels, registry=registry)
    return made


def serve(port: int, registry: CollectorRegistry) -> int:
    """
    Serve Prometheus on all addresses, until the process ends; returns the port.

    Args:
        port: 0: any free port.
        registry: what to serve.

    Raises:
        OSError: the port is not available.
    """
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    from prometheus_client import make_wsgi_app

    class Handler(WSGIRequestHandler):
        def log_message(self, *args: object) -> None:
            """Do not log scrapes."""

    class Server(AllAddresses, ThreadingMixIn, WSGIServer):
        daemon_threads = True

    server = Server(port, Handler)
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.port
