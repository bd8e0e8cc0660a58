"""
Engine and Θ as a StatusReply, for people and controllers. Called on the runner's thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from diloco.fragments import Tensor
from diloco.v1 import syncer_pb2 as pb
from diloco_syncer.core.members import Member

if TYPE_CHECKING:
    from diloco_syncer.runner import Runner


def reply(runner: Runner) -> pb.StatusReply:
    """Everything `GetStatus` says."""
    engine, now = runner.engine, time.monotonic()
    if engine.complete and runner.finished.is_set():
        state = "Complete"
    elif not engine.initialised:
        state = "Initialising"
    else:
        state = "Waiting" if engine.waiting_for() else "Training"
    last = engine.last_merge_at
    return pb.StatusReply(
        job=runner.spec.job,
        epoch=engine.epoch,
        step=engine.step,
        steps=runner.spec.steps,
        tokens=engine.tokens,
        spec_hash=runner.spec.hash,
        state=state,
        merges=engine.merges,
        bytes_up=runner.bytes_up,
        bytes_down=runner.bytes_down,
        quorum_seconds=engine.grace.quorum_seconds or 0.0,
        grace_seconds=engine.last_window_seconds,
        sync_seconds=engine.grace.sync_seconds or 0.0,
        quorum=runner.spec.quorum,
        last_members=engine.last_members,
        seconds_since_merge=-1.0 if last is None else now - last,
        learners=[_learner(runner, m, now) for m in engine.members],
        model_path=runner.model[0],
        model_sha256=runner.model[1],
        snapshot_step=runner.snapshot_step,
        tensors=[_info(t) for t in (runner.layout.tensors if runner.layout else ())],
        waiting_for=engine.waiting_for(),
        differing=[
            pb.LearnerSpec(learner=name, spec_hash=spec_hash)
            for name, spec_hash in sorted(runner.differing.copy().items())
        ],
        eval_step=runner.evaluation[0],
        eval_loss=runner.evaluation[1],
    )


def _learner(runner: Runner, member: Member, now: float) -> pb.LearnerStatus:
    report = member.report
    gone = member.session is None
    step_seconds = member.step_seconds or 0.0
    tokens_per_second = 0.0
    if report is not None and step_seconds > 0 and member.step_tokens:
        tokens_per_second = member.step_tokens / step_seconds
    return pb.LearnerStatus(
        name=member.name,
        region=member.region,
        state=member.state,
        incarnation=member.incarnation,
        local_step=member.local_step,
        global_step=report.global_step if report else 0,
        tokens=member.total_tokens,
        tokens_per_second=tokens_per_second,
        loss=report.loss if report is not None and report.loss is not None else 0.0,
        has_loss=report is not None and report.loss is not None,
        staleness=runner.engine.staleness(member),
        seconds_since_heard=-1.0 if gone else now - member.heard,
        merges=member.merges,
        step_seconds=step_seconds,
        sync_seconds=report.sync_seconds if report else 0.0,
        restarts=member.restarts,
    )


def _info(tensor: Tensor) -> pb.TensorInfo:
    return pb.TensorInfo(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        embedding=tensor.embedding,
        aliases=tensor.aliases,
    )
