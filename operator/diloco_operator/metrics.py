"""The operator's Prometheus metrics; `diloco.runtime.metric_table` defines their names."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from diloco.errors import ConfigError
from diloco.runtime.metrics import register, serve
from diloco_operator.workqueue import Key


class Metrics:
    """Counts reconciles and writes of this process; safe for use by many threads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics: Mapping[str, Any] = register("operator", self.registry)
        self._lock = threading.Lock()
        self._states: dict[Key, str] = {}
        self._warnings: dict[Key, frozenset[tuple[str, str]]] = {}
        self._leads = True

    def serve(self, port: int) -> None:
        """
        Serve Prometheus on all addresses; port 0: serve nothing.

        Raises:
            ConfigError: the port is in use.
        """
        if not port:
            return
        try:
            serve(port, self.registry)
        except OSError as error:
            raise ConfigError(
                f"DILOCO_METRICS_PORT: {port}: {error.strerror}; set a free port, or 0 for none"
            ) from None

    def reconciled(self, result: str, seconds: float) -> None:
        """A reconcile ended with result "ok", "gone", "refused" or "error"."""
        self._metrics["diloco_operator_reconcile_seconds"].labels(result=result).observe(seconds)

    def wrote(self, kind: str) -> None:
        """The API server accepted a write; kind DiLoCoJob is the job's status."""
        self._metrics["diloco_operator_writes_total"].labels(kind=kind).inc()

    def queued(self, seconds: float) -> None:
        """A job that was due for this long is being reconciled."""
        self._metrics["diloco_operator_queue_seconds"].observe(seconds)

    def measure_depth(self, depth: Callable[[], int]) -> None:
        """Read the depth of the queue at each scrape."""
        self._metrics["diloco_operator_queue_depth"].set_function(depth)

    def leader(self, *, leads: bool) -> None:
        """Whether this process is the leader; of several, only the leader reports states of jobs."""
        with self._lock:
            self._leads = leads
            self._metrics["diloco_operator_leader"].set(leads)
            if not leads:
                self._states.clear()
                self._metrics["diloco_operator_job_state"].clear()
                self._metrics["diloco_operator_jobs"].clear()
                self._warnings.clear()
                self._metrics["diloco_operator_job_warning"].clear()

    def state(
        self, key: Key, state: str | None, *, warnings: Iterable[tuple[str, str]] = ()
    ) -> None:
        """
        The job's state after its last reconcile; None: the job was deleted.

        Args:
            key: the job's.
            state: its state.
            warnings: its conditions whose reasons need action, with these reasons.
        """
        by_job = self._metrics["diloco_operator_job_state"]
        with self._lock:
            if self._leads:
                self._warn(key, frozenset(warnings))
            before = self._states.get(key)
            if not self._leads or before == state:
                return
            if before is not None:
                del self._states[key]
                by_job.remove(*key, before)
            if state is not None:
                self._states[key] = state
                by_job.labels(*key, state).set(1)
            gauge = self._metrics["diloco_operator_jobs"]
            gauge.clear()
            for name, count in Counter(self._states.values()).items():
                gauge.labels(state=name).set(count)

    def _warn(self, key: Key, found: frozenset[tuple[str, str]]) -> None:
        gauge, before = self._metrics["diloco_operator_job_warning"], self._warnings.pop(key, found)
        for ended in before - found:
            gauge.remove(*key, *ended)
        for warning in found:
            gauge.labels(*key, *warning).set(1)
        if found:
            self._warnings[key] = found
