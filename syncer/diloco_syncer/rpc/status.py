"""
The state as a StatusReply, for people and controllers. Called on the runner's thread.
"""

from __future__ import annotations

import time

from diloco.rpc.tensor_info import to_proto
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.events import Recovered
from diloco_syncer.core.learners import LearnerRecord
from diloco_syncer.metrics import Metrics
from diloco_syncer.state import State

MOST_RECOVERIES = 1000
"""Learners up to which the status has how each began: its sentences would exceed the limit of a larger one."""


def reply(
    state: State, metrics: Metrics, request: pb.StatusRequest | None = None
) -> pb.StatusReply:
    """What `GetStatus` returns for a request; None: an empty one."""
    engine, now = state.engine, time.monotonic()
    scheduler = engine.scheduler
    last, layout, model = scheduler.last_merge_at, state.admission.layout, state.model
    if request is not None and request.without_model:
        layout = None
    learners = [learner_status(engine, record, now) for record in engine.learners]
    if len(learners) > MOST_RECOVERIES:
        for learner in learners:
            learner.ClearField("recovery")
    return pb.StatusReply(
        job=engine.spec.job,
        epoch=engine.epoch,
        step=engine.step,
        steps=engine.spec.steps,
        tokens=engine.tokens,
        spec_hash=engine.spec.hash,
        state=phase(state),
        merges=scheduler.merges,
        bytes_up=metrics.merged_bytes,
        bytes_down=metrics.sent_bytes,
        quorum_seconds=scheduler.grace.quorum_seconds or 0.0,
        grace_seconds=scheduler.last_window_seconds,
        sync_seconds=scheduler.grace.sync_seconds or 0.0,
        quorum=engine.spec.quorum,
        last_members=scheduler.last_members,
        seconds_since_merge=-1.0 if last is None else now - last,
        learners=learners,
        model_path=model.path if model else "",
        model_sha256=model.sha256 if model else "",
        snapshot_step=engine.durable_step,
        tensors=[to_proto(t) for t in (layout.tensors if layout else ())],
        waiting_for=engine.waiting_for(),
        differing=[
            pb.LearnerSpec(learner=name, spec_hash=spec_hash)
            for name, spec_hash in sorted(state.admission.differing.items())
        ],
        eval_step=state.evaluation[0],
        eval_loss=state.evaluation[1],
        failure=_failure(state.failure),
        region_failures=[
            pb.RegionFailure(region=region, reason=reason, message=message, learners=learners)
            for region, (reason, message, learners) in sorted(state.region_failures.items())
            if region in engine.limits  # a region that is no longer in the job has not failed
        ],
        tied_constants=[to_proto(t) for t in (layout.constants if layout else ()) if t.aliases],
        copies=_copies(state),
        unchanged=not scheduler.parameters_changed,
    )


def _copies(state: State) -> pb.SnapshotCopies | None:
    found = state.copies()
    if found is None:
        return None
    known = found.step >= 0
    return pb.SnapshotCopies(
        url=found.url, has_step=known, step=found.step if known else 0, problem=found.problem,
        lasting=found.lasting,
    )  # fmt: skip


def phase(state: State) -> str:
    """The state of the job in a word."""
    engine = state.engine
    if engine.complete:
        return "Complete"
    if not engine.initialised:
        return "Initialising"
    return "Waiting" if engine.waiting_for() else "Training"


def _failure(failure: tuple[str, str] | None) -> pb.Failure | None:
    return pb.Failure(reason=failure[0], message=failure[1]) if failure else None


def learner_status(engine: Engine, record: LearnerRecord, now: float) -> pb.LearnerStatus:
    """One learner, as of `now` (monotonic)."""
    report = record.report
    gone = record.session is None
    step_seconds = record.step_seconds or 0.0
    tokens_per_second = 0.0
    if report is not None and step_seconds > 0 and record.step_tokens:
        tokens_per_second = record.step_tokens / step_seconds
    return pb.LearnerStatus(
        name=record.name,
        region=record.region,
        state=record.state,
        incarnation=record.incarnation,
        local_step=record.local_step,
        global_step=report.global_step if report else 0,
        tokens=record.total_tokens,
        tokens_per_second=tokens_per_second,
        loss=report.loss if report is not None and report.loss is not None else 0.0,
        has_loss=report is not None and report.loss is not None,
        staleness=engine.staleness(record),
        seconds_since_heard=-1.0 if gone else now - record.last_seen,
        merges=record.merges,
        step_seconds=step_seconds,
        sync_seconds=report.sync_seconds if report else 0.0,
        restarts=record.restarts,
        detail=_ejection(record, now),
        recovery=_recovery(record.recovery),
    )


def _recovery(found: Recovered | None) -> pb.Recovery | None:
    if found is None:
        return None
    return pb.Recovery(
        source=found.source, peer=found.peer, step=found.state_step, age=found.age, bytes=found.bytes,
        seconds=found.seconds, problem=found.problem,
    )  # fmt: skip


def _ejection(record: LearnerRecord, now: float) -> str:
    """Why the rounds continue without the learner and when it is probed next; empty if they do not."""
    ejection = record.ejection
    if ejection is None or not record.training:
        return ""
    if ejection.probe is not None:
        return f"{ejection.reason}; a probe is in progress"
    left = ejection.probe_at - now
    when = f"next probe in {left:.0f} s" if left >= 0.5 else "a probe is due"
    return f"{ejection.reason}; {when}"
