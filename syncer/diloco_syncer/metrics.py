"""
The syncer's Prometheus metrics, derived from the same events that go into events.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from diloco.telemetry import register
from diloco_syncer.core.engine import Engine


class Metrics:
    """
    Counts what the runner logs. With port 0 nothing is served and nothing counted.

    Names and meanings: diloco/telemetry.py.
    """

    def __init__(self, port: int) -> None:
        self._on = port != 0
        if not self._on:
            return
        registry = CollectorRegistry()
        self._metrics: Mapping[str, Any] = register("syncer", registry)
        self._tokens: dict[str, int] = {}
        start_http_server(port, registry=registry)

    def event(self, event: str, fields: Mapping[str, Any], engine: Engine) -> None:
        """Take one line of the audit."""
        if not self._on:
            return
        if event == "merge":
            self._merge(fields, engine)
        elif event == "refuse":
            self._metrics["diloco_refused_total"].labels(reason=fields["reason"]).inc()
        elif event == "snapshot" and fields.get("ok"):
            self._metrics["diloco_snapshot_seconds"].observe(fields["seconds"])

    def sent(self, region: str, size: int) -> None:
        """Bulk bytes to one region; "" for observers."""
        if self._on:
            self._metrics["diloco_wire_bytes_total"].labels(direction="down", region=region).inc(
                size
            )

    def received(self, region: str, size: int) -> None:
        """Bulk bytes from one region."""
        if self._on:
            self._metrics["diloco_wire_bytes_total"].labels(direction="up", region=region).inc(size)

    def _merge(self, fields: Mapping[str, Any], engine: Engine) -> None:
        metrics = self._metrics
        metrics["diloco_global_step"].set(engine.step)
        metrics["diloco_merges_total"].inc()
        metrics["diloco_merge_members"].observe(len(fields["members"]))
        metrics["diloco_quorum_wait_seconds"].observe(fields["quorumSeconds"])
        metrics["diloco_grace_seconds"].observe(fields["graceSeconds"])
        metrics["diloco_sync_seconds"].observe(fields["syncSeconds"])
        states: Counter[tuple[str, str]] = Counter()
        tokens: Counter[str] = Counter()
        for member in engine.members:
            for state in ("Training", "Joining", "Gone"):
                states[(member.region, state)] += state == member.state
            tokens[member.region] += member.total_tokens
            metrics["diloco_learner_staleness_steps"].labels(learner=member.name).set(
                engine.staleness(member)
            )
        for (region, state), count in states.items():
            metrics["diloco_learners"].labels(region=region, state=state).set(count)
        for region, total in tokens.items():
            counter = metrics["diloco_tokens_total"].labels(region=region)
            counter.inc(total - self._tokens.get(region, 0))
            self._tokens[region] = total
