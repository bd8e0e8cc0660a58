"""
The operator's decisions for one job: an observation in, decisions out.

Pure. `cluster` observes, `decide` decides, `reconcile` carries out. Equal observations give equal
decisions, and once these are carried out there is nothing left to decide: a steady job costs no
write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from diloco_job.reasons import condition, event_type
from diloco_operator.decide import kept_pods, region_failures
from diloco_operator.decide import status as statuses
from diloco_operator.decide.changes import ObjectRef, changes, ending, releases_claim
from diloco_operator.decide.lost_nodes import force_times
from diloco_operator.decide.objections import is_tracked, objection
from diloco_operator.decide.phase import (
    Lifecycle,
    Phase,
    failure_to_report,
    is_expired,
    lifecycle_of,
    timeouts,
)
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import Object, is_deleting
from diloco_operator.state.observation import Failure, Observation, RegionFailure
from diloco_operator.state.previous_status import PreviousStatus

__all__ = [
    "Decisions",
    "JobEvent",
    "ObjectRef",
    "decide",
    "leave_to",
    "report_unreadable",
]

RUNNING_SECONDS = 30.0
"""Longest time between two reconciles of a running job."""

IDLE_SECONDS = 300.0
"""The same for a job that is suspended, finished or not accepted."""

JOINING_SECONDS = 5.0
"""The same while learners join: no event announces that they begin to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """A core/v1 Event about the job."""

    type: str
    """Normal | Warning."""
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What to do, in this order."""

    patch: tuple[dict[str, Any], ...] = ()
    """Fields of objects that others made, to apply (server-side, force) to the objects with these uids."""
    apply: tuple[dict[str, Any], ...] = ()
    """Children to apply (server-side, force), in order."""
    delete: tuple[ObjectRef, ...] = ()
    status: dict[str, Any] | None = None
    """The whole new status; None: it does not change."""
    events: tuple[JobEvent, ...] = ()
    requeue_seconds: float = RUNNING_SECONDS
    """When to reconcile again if no event arrives earlier."""
    failure_to_report: Failure | None = None
    """To report to the syncer, so that operators of other regions learn of it."""
    regions_to_report: tuple[RegionFailure, ...] = ()
    """The same about the own regions, to the syncer of another cluster."""
    fails: bool = False
    """
    The job fails because of its pods, until a person suspends it: to be decided again if the list of them
    may be old.
    """
    remove_job: bool = False
    """The job outlived spec.runPolicy.ttlSecondsAfterFinished: delete it."""


def decide(observation: Observation, scope: OperatorScope, now: datetime) -> Decisions:
    """
    Decide what to do for this job now; never raises for a job that the API server stores.

    Args:
        observation: of this reconcile.
        scope: the part of the job that this operator runs.
        now: wall clock, UTC.
    """
    stored = observation.stored
    if stored.ignored:
        return Decisions(requeue_seconds=IDLE_SECONDS)
    if stored.job is None:
        status = statuses.invalid(stored.raw, stored.problems, now)
        return _with_status(Decisions(requeue_seconds=IDLE_SECONDS), stored.raw, status, now)
    state = JobState.of(observation, stored.job, scope, now)
    refused = objection(state)
    if refused is not None and not is_tracked(state, refused):
        status = statuses.not_accepted(stored.raw, refused, now)
        return _with_status(Decisions(requeue_seconds=IDLE_SECONDS), stored.raw, status, now)
    lifecycle = lifecycle_of(state)
    due = changes(state, lifecycle) if refused is None else ending(state, lifecycle)
    # The garbage collector would delete it with the job, if the API server refuses this.
    is_releasing = any(releases_claim(state, want) for want in due.apply)
    decisions = Decisions(
        patch=due.patch,
        apply=due.apply,
        delete=due.delete,
        requeue_seconds=_requeue_seconds(state, lifecycle),
        failure_to_report=failure_to_report(state, lifecycle),
        regions_to_report=region_failures.to_report(state, lifecycle),
        fails=lifecycle.fails_by_pods,
        remove_job=is_expired(state, lifecycle) and not is_releasing,
    )
    status = statuses.build(state, lifecycle, refused=refused, waiting=due.waiting)
    return _with_status(decisions, stored.raw, status, now)


def leave_to(other: str, installation: str) -> Decisions:
    """What an installation of the operator does for a job that another one runs."""
    accepted = condition("Accepted", "OtherOperator", other=other, own=installation)
    event = JobEvent(type="Warning", reason=accepted.reason, message=accepted.message)
    return Decisions(events=(event,), requeue_seconds=IDLE_SECONDS)


def report_unreadable(raw: Object, message: str, now: datetime) -> Decisions:
    """The status of a job of which the operator may not read some objects: as before, and Refused."""
    refused = condition("Accepted", "Refused", refusals=message)
    status = statuses.not_accepted(raw, refused, now)
    return _with_status(Decisions(), raw, status, now)


def _with_status(
    decisions: Decisions, raw: Object, status: dict[str, Any], now: datetime
) -> Decisions:
    """Add the status, if it is worth a write, and its Events."""
    if not statuses.is_worth_writing(status, raw, now):
        return decisions
    return replace(decisions, status=status, events=_events(status, PreviousStatus.of(raw)))


def _events(status: dict[str, Any], previous: PreviousStatus) -> tuple[JobEvent, ...]:
    """One Event for each reason that a condition changed to."""
    events: dict[tuple[str, str], JobEvent] = {}
    for entry in status["conditions"]:
        kind, reason = entry["type"], entry["reason"]
        old = previous.conditions.get(kind, {})
        event = event_type(kind, reason)
        if event and (old.get("status"), old.get("reason")) != (entry["status"], reason):
            # Two conditions may change to the same reason with the same message.
            events.setdefault(
                (reason, entry["message"]),
                JobEvent(type=event, reason=reason, message=entry["message"]),
            )
    return tuple(events.values())


def _requeue_seconds(state: JobState, lifecycle: Lifecycle) -> float:
    # An operator that follows the syncer's region keeps asking: no event announces a resume there.
    idle = (lifecycle.finished and not lifecycle.follows) or not state.in_scope
    # Nor that a pod has not ended for long.
    idle = idle and not any(map(is_deleting, state.pods))
    seconds = [IDLE_SECONDS if idle else RUNNING_SECONDS]
    if lifecycle.phase is Phase.RUNNING and _is_joining(state):
        seconds.append(JOINING_SECONDS)
    times = [
        *timeouts(state, lifecycle),
        *force_times(state),
        *kept_pods.times(state, lifecycle),
    ]
    left = [(when - state.now).total_seconds() for when in times]
    return min([*seconds, *(max(1.0, wait) for wait in left if wait > 0)])


def _is_joining(state: JobState) -> bool:
    """All own learners are registered, but not all of them train yet; an ejected one may not for long."""
    if state.answer is None:
        return False
    learners = [learner for own in state.regions for learner in own.learners]
    joined = {
        learner.name
        for learner in state.answer.learners
        if learner.state in ("Training", "Ejected")
    }
    return all(learner.ready for learner in learners) and any(
        learner.name not in joined for learner in learners
    )
