"""
The names under which a job is observed: every metric, and the format of log lines.

One table (`METRICS`) holds every metric of every component; nothing else in the project names one.
`prometheus_client` is imported only when somebody registers metrics: a learner without a metrics
port does not need it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Component = Literal["syncer", "learner", "operator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric as Prometheus knows it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    component: Component
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Histograms only."""


_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_LEARNERS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1000.0)

METRICS: tuple[Metric, ...] = (
    Metric(name="diloco_global_step", kind="gauge", component="syncer", help="Global step t."),
    Metric(
        name="diloco_merges_total",
        kind="counter",
        component="syncer",
        help="Merges that were committed.",
    ),
    Metric(
        name="diloco_merge_members",
        kind="histogram",
        component="syncer",
        help="Learners in a merge.",
        buckets=_LEARNERS,
    ),
    Metric(
        name="diloco_quorum_wait_seconds",
        kind="histogram",
        component="syncer",
        help="Time from the launch of a round until its quorum reported.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_grace_seconds",
        kind="histogram",
        component="syncer",
        help="Grace window that a round was given.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_sync_seconds",
        kind="histogram",
        component="syncer",
        help="Time from the first pull of a round until its merge was committed.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_learners",
        kind="gauge",
        component="syncer",
        help="Learners by region and state.",
        labels=("region", "state"),
    ),
    Metric(
        name="diloco_learner_staleness_steps",
        kind="gauge",
        component="syncer",
        help="Global steps since the learner was last in a merge.",
        labels=("learner",),
    ),
    Metric(
        name="diloco_wire_bytes_total",
        kind="counter",
        component="syncer",
        help="Bulk bytes received (up) and sent (down).",
        labels=("direction", "region"),
    ),
    Metric(
        name="diloco_refused_total",
        kind="counter",
        component="syncer",
        help="Messages and transfers that were refused.",
        labels=("reason",),
    ),
    Metric(
        name="diloco_snapshot_seconds",
        kind="histogram",
        component="syncer",
        help="Time to make a snapshot durable.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_tokens_total",
        kind="counter",
        component="syncer",
        help="Tokens trained on, as reported.",
        labels=("region",),
    ),
    Metric(
        name="diloco_learner_steps_total",
        kind="counter",
        component="learner",
        help="Optimizer steps of this process.",
    ),
    Metric(
        name="diloco_learner_tokens_total",
        kind="counter",
        component="learner",
        help="Tokens trained on by this process.",
    ),
    Metric(
        name="diloco_learner_loss", kind="gauge", component="learner", help="Newest training loss."
    ),
    Metric(
        name="diloco_learner_step_seconds",
        kind="histogram",
        component="learner",
        help="Duration of an optimizer step, without learner.step().",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_learner_sync_seconds_total",
        kind="counter",
        component="learner",
        help="Time taken from the training loop by learner.step().",
    ),
    Metric(
        name="diloco_learner_restarts_total",
        kind="counter",
        component="learner",
        help="Earlier lives of this learner.",
    ),
    Metric(
        name="diloco_operator_reconcile_seconds",
        kind="histogram",
        component="operator",
        help="Duration of a reconciliation.",
        labels=("result",),
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_operator_jobs",
        kind="gauge",
        component="operator",
        help="Jobs by state.",
        labels=("state",),
    ),
    Metric(
        name="diloco_operator_writes_total",
        kind="counter",
        component="operator",
        help="Objects created, changed or deleted.",
        labels=("kind",),
    ),
)


def register(
    component: Component, registry: CollectorRegistry
) -> Mapping[str, Counter | Gauge | Histogram]:
    """
    Make the metrics of one component in a registry of the caller's; name → metric.

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


def configure_logging(*, json: bool, name: str, stream: TextIO | None = None) -> None:
    """
    Send all log records of this process to standard error, one line each; call once, in `__main__`.

    Fields given as `log.info("merged", extra={"step": 7})` become key=value pairs or JSON members.
    A trace stays within its line, with newlines written as \\n, so that lines of several processes
    can be mixed.

    Args:
        json: JSON objects instead of key=value.
        name: the process as people know it: "syncer", "eu/0".
        stream: instead of standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Lines(json=json, name=name))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _Lines(logging.Formatter):
    def __init__(self, *, json: bool, name: str) -> None:
        super().__init__()
        self._json = json
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the record holds."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(fields, default=str, ensure_ascii=False)
        return " ".join(f"{key}={_plain(value)}" for key, value in fields.items())


def _plain(value: object) -> str:
    """A value that ends at the next space; quoted as JSON where it would not."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if not text or any(c in ' "=\\' or not c.isprintable() for c in text):
        return json.dumps(text, ensure_ascii=False)
    return text
