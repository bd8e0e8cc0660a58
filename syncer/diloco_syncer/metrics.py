"""
The syncer's Prometheus metrics, derived from the events that go into events.jsonl and from the engine.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from diloco.runtime.metrics import register, serve
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.learner_limits import beyond
from diloco_syncer.core.learners import LearnerRecord

STATES = ("Training", "Joining", "Ejected", "Gone")


class Metrics:
    """
    Counts bytes for the status and, unless the port is 0, serves all metrics; thread-safe.

    Names and meanings: diloco/runtime/metric_table.py.
    """

    def __init__(self, port: int) -> None:
        self._lock = threading.Lock()
        self.merged_bytes = self.sent_bytes = 0
        """Bulk bytes of committed merges, and all that were sent."""
        self._on = port != 0
        if not self._on:
            return
        registry = CollectorRegistry()
        self._metrics: Mapping[str, Any] = register("syncer", registry)
        self._tokens: dict[str, int] = {}
        self._learners: set[str] = set()
        """Learners that have a series."""
        serve(port, registry)

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count one line of events.jsonl."""
        if event == "merge":
            self.merged_bytes += int(fields["bytesUp"])
        if not self._on:
            return
        metrics = self._metrics
        if event == "merge":
            metrics["diloco_merges_total"].inc()
            metrics["diloco_merge_members"].observe(len(fields["members"]))
            metrics["diloco_quorum_wait_seconds"].observe(fields["quorumSeconds"])
            metrics["diloco_grace_seconds"].observe(fields["graceSeconds"])
            metrics["diloco_sync_seconds"].observe(fields["syncSeconds"])
        elif event == "refuse":
            count = fields.get("count", 1)  # refusals that were only counted come as one event
            metrics["diloco_refused_total"].labels(reason=fields["reason"]).inc(count)
        elif event == "recovery":
            metrics["diloco_recoveries_total"].labels(source=fields["source"]).inc()
        elif event == "eject":
            metrics["diloco_ejections_total"].labels(reason=fields["reason"]).inc()
        elif event == "snapshot" and fields.get("ok"):
            metrics["diloco_snapshot_seconds"].observe(fields["seconds"])
        elif event == "copy" and fields.get("ok"):
            metrics["diloco_snapshot_copy_seconds"].observe(fields["seconds"])
            metrics["diloco_snapshot_copy_step"].set(fields["step"])
        elif event == "copy":
            metrics["diloco_snapshot_copy_failures_total"].inc()

    def sent(self, learner: str, size: int) -> None:
        """Count bulk bytes to a learner; "" for an observer."""
        with self._lock:
            self.sent_bytes += size
        self._wire("down", learner, size)

    def received(self, learner: str, size: int) -> None:
        """Count bulk bytes from a learner."""
        self._wire("up", learner, size)

    def _wire(self, direction: str, learner: str, size: int) -> None:
        if self._on:
            region = learner.partition("/")[0]
            counter = self._metrics["diloco_wire_bytes_total"]
            counter.labels(direction=direction, region=region).inc(size)

    def update(self, engine: Engine) -> None:
        """Set what depends on the state and not on events; called on the runner's thread."""
        if not self._on:
            return
        metrics = self._metrics
        metrics["diloco_global_step"].set(engine.step)
        states: Counter[tuple[str, str]] = Counter()
        tokens: Counter[str] = Counter()
        shown = {r.name for r in engine.learners if r.session is not None or _expected(engine, r)}
        for gone in self._learners - shown:
            metrics["diloco_learner_staleness_steps"].remove(gone)
        self._learners = shown
        for record in engine.learners:
            tokens[record.region] += record.total_tokens  # a counter never becomes smaller
            for state in STATES:
                states[(record.region, state)] += record.name in shown and state == record.state
            if record.name in shown:
                staleness = metrics["diloco_learner_staleness_steps"].labels(learner=record.name)
                staleness.set(engine.staleness(record))
        for (region, state), count in states.items():
            metrics["diloco_learners"].labels(region=region, state=state).set(count)
        for region, total in tokens.items():
            metrics["diloco_tokens_total"].labels(region=region).inc(
                total - self._tokens.get(region, 0)
            )
            self._tokens[region] = total


def _expected(engine: Engine, record: LearnerRecord) -> bool:
    """It may join; a learner that was removed from the job keeps its record, but no series."""
    return not beyond(record.name, engine.limits)
