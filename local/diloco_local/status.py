"""
The content of status.json (docs/manifest.md, "Status").

Pure: facts in, one JSON object out. The progress display shows this object and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from diloco.runtime.formatting import wall_text
from diloco.v1 import syncer_pb2 as pb
from diloco_job.plan import LearnerPlan, Plan
from diloco_local.events import Outcome, Phase, Role, State
from diloco_local.policy import Policy, Process
from diloco_local.problems import Problem

REACHABLE_SECONDS = 5.0
"""The syncer is polled once a second; without a reply for this long it counts as unavailable."""

CONDITION_REACHABLE_SECONDS = 30.0
"""For the condition SyncerReachable; as in a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The input of a status."""

    plan: Plan
    policy: Policy
    pids: Mapping[str, int | None]
    """Of the processes that run."""
    supervisor_pid: int
    endpoint: str
    """"" until the syncer served for the first time."""
    reply: pb.StatusReply | None
    """The syncer's latest reply; None before the first."""
    reply_age_seconds: float
    started: str
    completed: str | None
    now: datetime
    """Wall clock, UTC."""
    problems: Mapping[str, Problem] = field(default_factory=dict)
    """What is wrong with the work of processes that run, by name."""


Status = dict[str, Any]


def build(facts: RunFacts, previous: Mapping[str, Any] | None = None) -> Status:
    """The current status; `previous` provides the transition times of conditions."""
    reply = facts.reply or pb.StatusReply()
    reported = {learner.name: learner for learner in reply.learners}
    learners = [
        _learner(facts, learner, reported.get(learner.name)) for learner in facts.plan.learners
    ]
    steps = facts.plan.spec.steps
    desired, training = len(learners), sum(learner["state"] == "Training" for learner in learners)
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
            "ready": sum(learner["pid"] is not None for learner in learners),
            "training": training,
            "summary": f"{training}/{desired}",
        },
        "regions": _regions(facts, learners, reported),
        "sync": _sync(reply, facts.plan.spec.quorum, facts.policy.waiting_for),
        "evaluation": {"step": reply.eval_step, "loss": reply.eval_loss}
        if reply.eval_step or reply.eval_loss
        else None,
        "model": {"path": reply.model_path, "sha256": reply.model_sha256}
        if reply.model_path
        else None,
        "startTime": facts.started,
        "completionTime": facts.completed,
        "lastSyncTime": _ago(facts, facts.reply_age_seconds if facts.reply else -1.0),
        "supervisor": {"pid": facts.supervisor_pid},
        "processes": [*_others(facts), *learners],
        "conditions": _conditions(facts, learners, previous or {}),
    }


def is_complete(reply: pb.StatusReply) -> bool:
    """Whether the final step is done; the model may not be on disk yet."""
    return reply.state == "Complete" or 0 < reply.steps <= reply.step


def _state(facts: RunFacts, *, desired: int, training: int) -> str:
    policy = facts.policy
    if policy.outcome is not None:
        return policy.outcome.value
    if policy.phase is Phase.WARMING:
        return "Pending"
    if facts.reply is None:
        return "Starting"
    if any(name in facts.problems for name in policy.processes if "/" in name):
        return "Degraded"
    if training < desired or facts.reply_age_seconds > REACHABLE_SECONDS:
        return "Degraded" if facts.reply.merges else "Starting"
    return "Training"


def _learner(facts: RunFacts, learner: LearnerPlan, reported: pb.LearnerStatus | None) -> Status:
    process = facts.policy.processes[learner.name]
    state = process.state.value
    if process.state is State.RUNNING:
        state = "Starting" if reported is None or reported.state == "Gone" else reported.state
    reported = reported or pb.LearnerStatus()
    is_training, detail = state == "Training", reported.detail if state == "Ejected" else ""
    if problem := facts.problems.get(learner.name):
        ejected = f"; ejected: {detail}" if detail else ""
        state, detail = problem.kind, f"{problem.text}{ejected}"
    return {
        **_process(facts, process),
        "state": state,
        "region": learner.region,
        "incarnation": reported.incarnation,
        "step": reported.local_step,
        "tokens": reported.tokens,
        "tokensPerSecond": reported.tokens_per_second if is_training else 0.0,
        "loss": reported.loss if reported.has_loss else None,
        "staleness": reported.staleness,
        "merges": reported.merges,
        "recovery": _recovery(reported),
        "detail": detail,
    }


def _recovery(reported: pb.LearnerStatus) -> Status | None:
    """With which state its optimizers began; None: it began with the job, or has not stated it."""
    if not reported.HasField("recovery"):
        return None
    found = reported.recovery
    return {
        "source": found.source,
        "peer": found.peer,
        "step": found.step,
        "age": found.age,
        "bytes": found.bytes,
        "seconds": found.seconds,
        "problem": found.problem,
    }


def _others(facts: RunFacts) -> list[Status]:
    return [
        {**_process(facts, process), **_work(process, facts.problems.get(process.name))}
        for process in facts.policy.of(Role.SYNCER, Role.EVALUATOR)
    ]


def _work(process: Process, problem: Problem | None) -> Status:
    """State and detail of a process other than a learner."""
    if problem is None or process.state is not State.RUNNING:
        return {"state": process.state.value, "detail": ""}
    return {"state": problem.kind, "detail": problem.text}


def _process(facts: RunFacts, process: Process) -> Status:
    return {
        "name": process.name,
        "role": process.role.value,
        "state": process.state.value,
        "pid": facts.pids.get(process.name),
        "restarts": process.restarts,
    }


def _regions(
    facts: RunFacts, learners: list[Status], reported: Mapping[str, pb.LearnerStatus]
) -> list[Status]:
    regions = []
    for name in facts.plan.spec.learners:
        own = [learner for learner in learners if learner["region"] == name]
        ages = [
            reported[learner["name"]].seconds_since_heard
            for learner in own
            if learner["name"] in reported and reported[learner["name"]].seconds_since_heard >= 0
        ]
        regions.append(
            {
                "name": name,
                "desired": len(own),
                "ready": sum(learner["pid"] is not None for learner in own),
                "training": sum(learner["state"] == "Training" for learner in own),
                "restarts": sum(learner["restarts"] for learner in own),
                "lastSeenTime": _ago(facts, min(ages) + facts.reply_age_seconds if ages else -1.0),
            }
        )
    return regions


def _sync(reply: pb.StatusReply, quorum: int, run_waits_for: str) -> Status:
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
        "copies": _copies(reply),
        "waitingFor": reply.waiting_for or run_waits_for,
    }


def _copies(reply: pb.StatusReply) -> Status | None:
    """Of snapshots, in an object store."""
    if not reply.HasField("copies"):
        return None
    found = reply.copies
    step = found.step if found.has_step else None
    return {"url": found.url, "step": step, "problem": found.problem}


def _conditions(
    facts: RunFacts, learners: list[Status], previous: Mapping[str, Any]
) -> list[Status]:
    policy, reply = facts.policy, facts.reply
    active = policy.outcome is None
    reachable = reply is not None and facts.reply_age_seconds <= CONDITION_REACHABLE_SECONDS
    serving = active and reply is not None and facts.reply_age_seconds <= REACHABLE_SECONDS
    training = sum(learner["state"] == "Training" for learner in learners)
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
            f"{training} of {len(learners)} learners are training{_ejected(learners)}",
        ),
        (
            "QuorumMet",
            serving and training >= quorum,
            "EnoughLearners" if serving and training >= quorum else "TooFewLearners",
            f"{training} learners are training (quorum: {quorum})",
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
    before = {condition["type"]: condition for condition in previous.get("conditions", ())}
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


def _ejected(learners: list[Status]) -> str:
    names = ", ".join(learner["name"] for learner in learners if learner["state"] == "Ejected")
    return f"; ejected, because they do not deliver: {names}" if names else ""


def _since_merge(facts: RunFacts, reply: pb.StatusReply) -> float:
    return reply.seconds_since_merge + facts.reply_age_seconds if reply.merges else -1.0


def _ago(facts: RunFacts, seconds: float) -> str | None:
    return wall_text(facts.now - timedelta(seconds=seconds)) if seconds >= 0 else None
