"""
What people and programs are told about a run: the content of status.json (job.md section 3).

Pure: facts in, one JSON object out. The progress display shows this object and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from diloco.v1 import syncer_pb2 as pb
from diloco_operator.local.events import Outcome, Phase, Role, State
from diloco_operator.local.policy import Policy, Process
from diloco_operator.local.rundir import wall_text
from diloco_operator.plan import LearnerPlan, Plan

REACHABLE_SECONDS = 5.0
"""The syncer is asked once a second; this long without an answer and it counts as away."""

CONDITION_REACHABLE_SECONDS = 30.0
"""`SyncerReachable` says what it says in a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything a status is made of."""

    plan: Plan
    policy: Policy
    pids: Mapping[str, int | None]
    """Of the processes that are alive."""
    supervisor_pid: int
    endpoint: str
    """"" until the syncer served for the first time."""
    reply: pb.StatusReply | None
    """The syncer's last answer; None before the first."""
    silence_seconds: float
    """Since that answer."""
    started: str
    completed: str | None
    now: datetime
    """Wall clock, UTC."""


Status = dict[str, Any]


def build(facts: Facts, previous: Mapping[str, Any] | None = None) -> Status:
    """The status of this moment; `previous` keeps the times at which conditions turned."""
    reply = facts.reply or pb.StatusReply()
    heard = {one.name: one for one in reply.learners}
    learners = [_learner(facts, one, heard.get(one.name)) for one in facts.plan.learners]
    steps = facts.plan.spec.steps
    desired, training = len(learners), sum(one["state"] == "Training" for one in learners)
    return {
        "job": facts.plan.spec.job,
        "state": _state(facts, desired=desired, training=training),
        "message": facts.policy.message,
        "step": reply.step,
        "steps": steps,
        "progress": f"{reply.step}/{steps}",
        "tokens": reply.tokens,
        "epoch": reply.epoch,
        "specHash": facts.plan.spec.hash,
        "syncer": {
            "endpoint": facts.endpoint,
            "region": facts.plan.syncer.region,
            "lastMergeTime": _ago(facts, _since_merge(facts, reply)),
        },
        "learners": {
            "desired": desired,
            "ready": sum(one["pid"] is not None for one in learners),
            "training": training,
            "summary": f"{training}/{desired}",
        },
        "regions": _regions(facts, learners, heard),
        "sync": _sync(reply, facts.plan.spec.quorum),
        "evaluation": {"step": reply.eval_step, "loss": reply.eval_loss}
        if reply.eval_step or reply.eval_loss
        else None,
        "model": {"path": reply.model_path, "sha256": reply.model_sha256}
        if reply.model_path
        else None,
        "startTime": facts.started,
        "completionTime": facts.completed,
        "lastSyncTime": _ago(facts, facts.silence_seconds if facts.reply else -1.0),
        "supervisor": {"pid": facts.supervisor_pid},
        "processes": [*_others(facts), *learners],
        "conditions": _conditions(facts, learners, previous or {}),
    }


def is_complete(reply: pb.StatusReply) -> bool:
    """The final step is done; the model may still be on its way to the disk."""
    return reply.state == "Complete" or 0 < reply.steps <= reply.step


def _state(facts: Facts, *, desired: int, training: int) -> str:
    policy = facts.policy
    if policy.outcome is not None:
        return policy.outcome.value
    if policy.phase is Phase.WARMING:
        return "Pending"
    if facts.reply is None:
        return "Starting"
    if training < desired or facts.silence_seconds > REACHABLE_SECONDS:
        return "Degraded" if facts.reply.merges else "Starting"
    return "Training"


def _learner(facts: Facts, learner: LearnerPlan, heard: pb.LearnerStatus | None) -> Status:
    process = facts.policy.processes[learner.name]
    state = process.state.value
    if process.state is State.RUNNING:
        state = "Starting" if heard is None or heard.state == "Gone" else heard.state
    said = heard or pb.LearnerStatus()
    return {
        **_process(facts, process),
        "state": state,
        "region": learner.region,
        "incarnation": said.incarnation,
        "step": said.local_step,
        "tokens": said.tokens,
        "tokensPerSecond": said.tokens_per_second if state == "Training" else 0.0,
        "loss": said.loss if said.has_loss else None,
        "staleness": said.staleness,
        "merges": said.merges,
    }


def _others(facts: Facts) -> list[Status]:
    return [_process(facts, one) for one in facts.policy.of(Role.SYNCER, Role.EVALUATOR)]


def _process(facts: Facts, process: Process) -> Status:
    return {
        "name": process.name,
        "role": process.role.value,
        "state": process.state.value,
        "pid": facts.pids.get(process.name),
        "restarts": process.restarts,
    }


def _regions(
    facts: Facts, learners: list[Status], heard: Mapping[str, pb.LearnerStatus]
) -> list[Status]:
    regions = []
    for name in facts.plan.spec.learners:
        mine = [one for one in learners if one["region"] == name]
        seen = [
            heard[one["name"]].seconds_since_heard
            for one in mine
            if one["name"] in heard and heard[one["name"]].seconds_since_heard >= 0
        ]
        regions.append(
            {
                "name": name,
                "desired": len(mine),
                "ready": sum(one["pid"] is not None for one in mine),
                "training": sum(one["state"] == "Training" for one in mine),
                "restarts": sum(one["restarts"] for one in mine),
                "lastSeenTime": _ago(facts, min(seen) + facts.silence_seconds if seen else -1.0),
            }
        )
    return regions


def _sync(reply: pb.StatusReply, quorum: int) -> Status:
    return {
        "merges": reply.merges,
        "quorum": reply.quorum or quorum,
        "lastMembers": reply.last_members,
        "quorumSeconds": reply.quorum_seconds,
        "graceSeconds": reply.grace_seconds,
        "syncSeconds": reply.sync_seconds,
        "bytesUp": reply.bytes_up,
        "bytesDown": reply.bytes_down,
        "snapshotStep": reply.snapshot_step,
        "waitingFor": reply.waiting_for,
    }


def _conditions(facts: Facts, learners: list[Status], previous: Mapping[str, Any]) -> list[Status]:
    policy, reply = facts.policy, facts.reply
    active = policy.outcome is None
    reachable = reply is not None and facts.silence_seconds <= CONDITION_REACHABLE_SECONDS
    serving = active and reply is not None and facts.silence_seconds <= REACHABLE_SECONDS
    training = sum(one["state"] == "Training" for one in learners)
    quorum = facts.plan.spec.quorum
    same_spec = reply is None or reply.spec_hash in ("", facts.plan.spec.hash)
    rows = (
        ("Accepted", True, "Valid", ""),
        ("SyncerReady", serving, "Serving" if serving else "NotServing", ""),
        ("SyncerReachable", reachable, "Answered" if reachable else "NoAnswer", ""),
        (
            "LearnersReady",
            training == len(learners),
            "AllTraining" if training == len(learners) else "SomeNotTraining",
            f"{training} of {len(learners)} learners are training",
        ),
        (
            "QuorumMet",
            serving and training >= quorum,
            "EnoughLearners" if serving and training >= quorum else "TooFewLearners",
            f"{training} learners are training, the quorum is {quorum}",
        ),
        ("SpecConsistent", same_spec, "SameHash" if same_spec else "OtherHash", ""),
        *(
            (
                outcome.value,
                policy.outcome is outcome,
                outcome.value if policy.outcome is outcome else f"Not{outcome.value}",
                policy.message if policy.outcome is outcome else "",
            )
            for outcome in (Outcome.SUSPENDED, Outcome.COMPLETE, Outcome.FAILED)
        ),
    )
    before = {one["type"]: one for one in previous.get("conditions", ())}
    now = wall_text(facts.now)
    conditions = []
    for kind, truth, reason, message in rows:
        value = "True" if truth else "False"
        old = before.get(kind)
        since = old["lastTransitionTime"] if old and old["status"] == value else now
        conditions.append(
            {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message,
                "lastTransitionTime": since,
            }
        )
    return conditions


def _since_merge(facts: Facts, reply: pb.StatusReply) -> float:
    return reply.seconds_since_merge + facts.silence_seconds if reply.merges else -1.0


def _ago(facts: Facts, seconds: float) -> str | None:
    return wall_text(facts.now - timedelta(seconds=seconds)) if seconds >= 0 else None
