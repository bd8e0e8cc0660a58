"""Composition root of the operator: settings → queue → watches; signals; exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from diloco.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from diloco_operator import handlers, logs
from diloco_operator.cluster import ApiError, Cluster, connect
from diloco_operator.health import Health, HealthServer
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import Reconciler
from diloco_operator.settings import Settings
from diloco_operator.workqueue import WorkQueue

log = logging.getLogger("diloco_operator")

STOP_SECONDS = 3.0
"""For reconciles that run; kopf has 1 s more. Whatever is cut off is done again by the next life."""
CRD_SECONDS = 5.0
LEVELS_MOST = 15_000
"""An API server stores objects 10 000 levels deep, and the JSON parser calls itself for each."""


def main() -> int:
    """Run until SIGTERM; 0 when asked to end, 2 for a usage error, 1 when the watches ended."""
    try:
        given = Settings.from_environment()
        logs.configure(json=given.json_logs)
        # One such job would end all watches; `fields` refuses it once it is read.
        sys.setrecursionlimit(LEVELS_MOST)
        return _run(given)
    except ConfigError as error:
        print(f"diloco-operator: {error}", file=sys.stderr)
        return EXIT_USAGE


def _run(given: Settings) -> int:
    ended = threading.Event()
    asked: list[str] = []

    def ask(number: int, _: object) -> None:
        asked.append(signal.Signals(number).name)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    configuration = connect()
    cluster = Cluster(configuration, manager=given.view.manager, connections=given.threads + 1)
    metrics = Metrics()
    metrics.serve(given.metrics_port)
    reconciler = Reconciler(
        cluster, given.view, metrics=metrics, reporter=given.pod, faults=given.faults
    )
    queue = WorkQueue(reconciler.reconcile, threads=given.threads)
    health = Health(queue)
    resync = handlers.Resync(
        cluster, queue, health, namespaces=given.namespaces, every_seconds=given.resync_seconds
    )
    queue.start()
    server = HealthServer(health, given.health_port)
    log.info(
        "operator of %s in %s",
        f"region {given.view.region}" if given.view.region else "all regions",
        ", ".join(given.namespaces) or "all namespaces",
        extra={"healthPort": server.port, "server": configuration.host},
    )
    if _await_crd(cluster, given, ended):
        resync.start()
        watches = handlers.Watches(
            handlers.registry(queue, health, configuration),
            namespaces=given.namespaces,
            ended=ended.set,
        )
        watches.start()
        ended.wait()
        log.info("ending: %s", asked[0] if asked else "the watches ended")
        resync.stop()
        queue.stop(STOP_SECONDS)
        watches.stop(1.0)
    return EXIT_DONE if asked else 1


def _await_crd(cluster: Cluster, given: Settings, ended: threading.Event) -> bool:
    """
    Wait until jobs can be listed; whether they can.

    kopf looks once which kinds there are, and would never watch one made later.
    """
    said = ""
    while not ended.is_set():
        try:
            next(iter(cluster.jobs(given.namespaces[:1])), None)
            return True
        except ApiError as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting for the API server and the CRD (diloco crd): %s", said)
        ended.wait(CRD_SECONDS)
    return False


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A reconcile that hangs in a request would keep the interpreter alive.
    os._exit(code)
