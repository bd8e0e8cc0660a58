"""Composition root of the operator: settings, work queue, watches, signals, exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass

from kubernetes.client import Configuration

from diloco.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from diloco_operator import logs
from diloco_operator.cluster.client import ApiError, Cluster, connect
from diloco_operator.leader.candidate import Candidate
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import Reconciler
from diloco_operator.settings import Settings
from diloco_operator.watch import handlers
from diloco_operator.watch.crd_check import CrdCheck
from diloco_operator.watch.health import Health, HealthServer
from diloco_operator.workqueue import WorkQueue

log = logging.getLogger("diloco_operator")

STOP_SECONDS = 3.0
"""Time for running reconciles to end; the next process redoes interrupted ones."""
CRD_SECONDS = 5.0
LEASE_SECONDS = 3.0
"""Longest time of a request for the Lease; two fit into the time in which a leader must renew."""
RECURSION_LIMIT = 15_000
"""An API server stores objects up to 10 000 levels deep, and the JSON parser is recursive."""


def main() -> int:
    """Run until SIGTERM; exit code 0 after a signal, 2 for a usage error, 1 if the watches fail."""
    try:
        settings = Settings.from_environment()
        logs.configure(json=settings.json_logs)
        # Otherwise a single such job ends all watches; validation rejects it once it is parsed.
        sys.setrecursionlimit(RECURSION_LIMIT)
        return _run(settings)
    except ConfigError as error:
        print(f"diloco-operator: {error}", file=sys.stderr)
        return EXIT_USAGE


def _run(settings: Settings) -> int:
    ended = threading.Event()
    signals: list[str] = []

    def terminate(number: int, _: object) -> None:
        signals.append(signal.Signals(number).name)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, terminate)
    configuration = connect()
    parts = _assemble(settings, configuration)
    candidate, queue, work, health = parts.candidate, parts.queue, parts.work, parts.health
    if candidate is None:
        work.begin()
    else:
        work.pause()
    queue.start()
    server = HealthServer(health, settings.health_port)
    scope = settings.scope
    log.info(
        "operator of %s in %s",
        f"region {scope.region}" if scope.region else "all regions",
        ", ".join(settings.namespaces) or "all namespaces",
        extra={"healthPort": server.port, "server": configuration.host},
    )
    if _await_crd(parts.cluster, settings, ended):
        if candidate is not None:
            candidate.start(lead=work.begin, stand_by=work.pause)
        work.resync.start()
        watches = handlers.Watches(
            handlers.registry(queue, health, configuration, saw=parts.cluster.saw),
            namespaces=settings.namespaces,
            ended=ended.set,
        )
        watches.start()
        ended.wait()
        log.info("shutting down: %s", signals[0] if signals else "the watches ended")
        work.resync.stop()
        idle = queue.stop(STOP_SECONDS)
        if candidate is not None:
            candidate.stop(release=idle)
        watches.stop(1.0)
    return EXIT_DONE if signals else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What this process consists of, besides the watches."""

    cluster: Cluster
    candidate: Candidate | None
    queue: WorkQueue
    health: Health
    work: _Work


def _assemble(settings: Settings, configuration: Configuration) -> _Parts:
    """Make everything; only the metrics are served yet."""
    scope = settings.scope
    metrics = Metrics()
    metrics.serve(settings.metrics_port)
    candidate = _candidate(settings, configuration)
    cluster = Cluster(
        configuration,
        manager=scope.manager,
        connections=settings.threads + 1,
        may_write=candidate.may_write if candidate else lambda: True,
        progressed=lambda key: queue.progressed(key),
    )
    reconciler = Reconciler(
        cluster,
        scope,
        metrics=metrics,
        answered_late=lambda key: queue.add(key),
        progressed=lambda key: queue.progressed(key),
        installation="/".join(settings.installation or ()),
        reporter=settings.pod,
        faults=settings.faults,
    )
    queue = WorkQueue(reconciler.reconcile, threads=settings.threads, waited=metrics.queued)
    metrics.measure_depth(queue.depth)
    health = Health(queue)
    resync = handlers.Resync(
        cluster,
        queue,
        health,
        namespaces=settings.namespaces,
        every_seconds=settings.resync_seconds,
        then=CrdCheck(cluster, health).once,
    )
    work = _Work(cluster, queue, resync, metrics, reconciler)
    return _Parts(cluster=cluster, candidate=candidate, queue=queue, health=health, work=work)


@dataclass(frozen=True, slots=True)
class _Work:
    """What only the leader does; the watches run in every process."""

    cluster: Cluster
    queue: WorkQueue
    resync: handlers.Resync
    metrics: Metrics
    reconciler: Reconciler

    def begin(self, again: bool = False) -> None:
        """Reconcile; `again`: no other process has since this one did."""
        if not again:
            self.cluster.begin()
        self.reconciler.forget(but=self.queue.keys())
        self.metrics.leader(leads=True)
        self.queue.resume()
        self.resync.now()

    def pause(self) -> None:
        self.queue.pause()
        self.metrics.leader(leads=False)
        # Jobs that are deleted meanwhile are not reconciled here.
        self.reconciler.forget(but=self.queue.keys())


def _candidate(settings: Settings, configuration: Configuration) -> Candidate | None:
    """The election among the replicas; None: this process always leads."""
    if settings.installation is None:
        return None
    namespace, name = settings.installation
    requests = Cluster(
        configuration, manager=settings.scope.manager, only_try_seconds=LEASE_SECONDS
    )
    return Candidate(requests, namespace=namespace, name=name, identity=settings.pod)


def _await_crd(cluster: Cluster, settings: Settings, ended: threading.Event) -> bool:
    """
    Wait until jobs can be listed in a namespace; False if the operator should end instead.

    kopf discovers the served kinds only once and would never watch a CRD that is created later.
    """
    logged = ""
    while not ended.is_set():
        errors: list[str] = []
        # One that was deleted is refused forever, and must not stop the others.
        for namespace in settings.namespaces or ("",):
            try:
                next(iter(cluster.jobs((namespace,))), None)
                return True
            except ApiError as error:
                errors.append(str(error))
                if not error.status:
                    break  # it would not answer about the others either
        if (problem := "; ".join(errors)) != logged:
            logged = problem
            log.warning("waiting for the API server and the CRD (diloco crd): %s", logged)
        ended.wait(CRD_SECONDS)
    return False


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A reconcile that hangs in a request keeps the interpreter alive.
    os._exit(code)
