"""
The Prometheus metrics of every component: names, kinds, labels and meanings. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Component = Literal["syncer", "learner", "operator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A Prometheus metric."""

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
        help="Committed merges.",
    ),
    Metric(
        name="diloco_merge_members",
        kind="histogram",
        component="syncer",
        help="Learners per merge.",
        buckets=_LEARNERS,
    ),
    Metric(
        name="diloco_quorum_wait_seconds",
        kind="histogram",
        component="syncer",
        help="Time from the start of a round until its quorum has reported.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_grace_seconds",
        kind="histogram",
        component="syncer",
        help="Grace window of a round.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_sync_seconds",
        kind="histogram",
        component="syncer",
        help="Time from the first pull of a round until its merge is committed.",
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
        help="Refused messages and transfers.",
        labels=("reason",),
    ),
    Metric(
        name="diloco_ejections_total",
        kind="counter",
        component="syncer",
        help="Ejections of learners that did not deliver.",
        labels=("reason",),
    ),
    Metric(
        name="diloco_recoveries_total",
        kind="counter",
        component="syncer",
        help="Learner processes that began after step 0, by the source of their optimizers' state.",
        labels=("source",),
    ),
    Metric(
        name="diloco_snapshot_seconds",
        kind="histogram",
        component="syncer",
        help="Time to make a snapshot durable.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_snapshot_copy_seconds",
        kind="histogram",
        component="syncer",
        help="Time to copy a snapshot to the object store.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_snapshot_copy_step",
        kind="gauge",
        component="syncer",
        help="Global step of the newest snapshot that this process copied to the object store.",
    ),
    Metric(
        name="diloco_snapshot_copy_failures_total",
        kind="counter",
        component="syncer",
        help="Failed attempts to copy a snapshot to the object store.",
    ),
    Metric(
        name="diloco_tokens_total",
        kind="counter",
        component="syncer",
        help="Tokens trained on, as reported by learners.",
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
        name="diloco_learner_loss", kind="gauge", component="learner", help="Latest training loss."
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
        help="Restarts of this learner.",
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
        help="Jobs by state; OtherOperator: another installation runs them.",
        labels=("state",),
    ),
    Metric(
        name="diloco_operator_job_state",
        kind="gauge",
        component="operator",
        help="1 for the current state of each job; OtherOperator: another installation runs it.",
        # Not `namespace`, which Prometheus sets to the operator's own.
        labels=("job_namespace", "job_name", "state"),
    ),
    Metric(
        name="diloco_operator_job_warning",
        kind="gauge",
        component="operator",
        help="1 for each condition of a job whose reason needs action.",
        labels=("job_namespace", "job_name", "condition", "reason"),
    ),
    Metric(
        name="diloco_operator_leader",
        kind="gauge",
        component="operator",
        help="1: this process reconciles jobs; 0: it stands by.",
    ),
    Metric(
        name="diloco_operator_queue_depth",
        kind="gauge",
        component="operator",
        help="Jobs that are due and wait for a thread.",
    ),
    Metric(
        name="diloco_operator_queue_seconds",
        kind="histogram",
        component="operator",
        help="Time from when a job is due until its reconciliation starts.",
        buckets=_SECONDS,
    ),
    Metric(
        name="diloco_operator_writes_total",
        kind="counter",
        component="operator",
        help="Objects created, changed or deleted.",
        labels=("kind",),
    ),
)
