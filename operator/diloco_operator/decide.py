"""
What is to be done for one job: facts in, decisions out.

Pure. `decide(observed, view, now)` is the operator; the shell reads, asks it, and carries out. The
same facts give the same decisions, and once these are carried out there is nothing left to decide:
a steady job costs no write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from diloco_operator import status as statuses
from diloco_operator.api import DiLoCoJob
from diloco_operator.before import Before
from diloco_operator.children import ObjectRef, changes
from diloco_operator.course import Course, Phase, course, is_outlived, turns
from diloco_operator.observed import Object, Observed
from diloco_operator.reasons import event_type
from diloco_operator.situation import Situation
from diloco_operator.validate import rule_problems
from diloco_operator.view import View
from diloco_operator.words import say

__all__ = ["Decisions", "EventOf", "ObjectRef", "decide", "managed_by", "read_job"]

RUNNING_SECONDS = 30.0
"""A job that runs is looked at so often, whatever happens."""

RESTING_SECONDS = 300.0
"""A job that is suspended, finished or not accepted."""

SOON_SECONDS = 5.0
"""Something is about to change without telling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOf:
    """A core/v1 Event about the job."""

    type: str
    """Normal | Warning."""
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What is to be done, in this order."""

    apply: tuple[dict[str, Any], ...] = ()
    """Children to apply (server-side, force), in order."""
    delete: tuple[ObjectRef, ...] = ()
    status: dict[str, Any] | None = None
    """The whole new status; None: it stays as it is."""
    events: tuple[EventOf, ...] = ()
    again_seconds: float = RUNNING_SECONDS
    """Look again after so long, if nothing else happens."""
    remove_job: bool = False
    """The finished job outlived spec.runPolicy.ttlSecondsAfterFinished: delete it."""


def decide(observed: Observed, view: View, now: datetime) -> Decisions:
    """
    What is to be done for this job now; never raises for a job that the API server stores.

    Args:
        observed: what was read.
        view: what this operator was told.
        now: wall clock, UTC.
    """
    raw = observed.job
    if raw["metadata"].get("deletionTimestamp") or managed_by(raw):
        return Decisions(again_seconds=RESTING_SECONDS)
    job, problems = read_job(raw)
    if job is None:
        said = statuses.refused(raw, problems, now)
        return _told(raw, said, now, Decisions(again_seconds=RESTING_SECONDS))
    here = Situation.of(observed, job, view, now)
    stands = course(here)
    to_do = changes(here, stands)
    said = statuses.build(here, stands)
    decisions = Decisions(
        apply=to_do.apply,
        delete=to_do.delete,
        again_seconds=_again_seconds(here, stands),
        remove_job=is_outlived(here, stands),
    )
    return _told(raw, said, now, decisions)


def managed_by(raw: Object) -> str:
    """Another controller that looks after the job, whatever else stands in its spec."""
    spec = raw.get("spec")
    policy = spec.get("runPolicy") if isinstance(spec, Mapping) else None
    return str(policy.get("managedBy") or "") if isinstance(policy, Mapping) else ""


def read_job(raw: Object) -> tuple[DiLoCoJob | None, list[str]]:
    """The job of a live object, or everything that is wrong with it."""
    # Of its metadata only what is ours to judge: a newer API server may know more fields.
    metadata = {
        key: raw["metadata"][key] for key in ("name", "namespace") if key in raw["metadata"]
    }
    data = {key: raw[key] for key in ("apiVersion", "kind", "spec") if key in raw}
    try:
        job = DiLoCoJob.model_validate({**data, "metadata": metadata})
    except ValidationError as error:
        return None, [say(one) for one in error.errors(include_url=False)]
    problems = rule_problems(job)
    return (None, problems) if problems else (job, [])


def _told(raw: Object, said: dict[str, Any], now: datetime, decisions: Decisions) -> Decisions:
    """The decisions, with a status where it is worth a write and the Events that go with it."""
    if not statuses.is_news(said, raw, now):
        return decisions
    return replace(decisions, status=said, events=_events(said, Before.of(raw)))


def _events(said: dict[str, Any], before: Before) -> tuple[EventOf, ...]:
    """One Event for every reason that a condition turned to."""
    told: dict[str, EventOf] = {}
    for one in said["conditions"]:
        kind, reason = one["type"], one["reason"]
        old = before.conditions.get(kind, {})
        event = event_type(kind, reason)
        if event and (old.get("status"), old.get("reason")) != (one["status"], reason):
            # Two conditions may turn for one reason: told once.
            told.setdefault(reason, EventOf(type=event, reason=reason, message=one["message"]))
    return tuple(told.values())


def _again_seconds(now: Situation, course: Course) -> float:
    calm = RESTING_SECONDS if course.over or not now.concerned else RUNNING_SECONDS
    due = [(when - now.now).total_seconds() for when in turns(now, course)]
    # A learner joins and begins to train between two looks, and no object says so.
    joining = course.phase is Phase.RUNNING and now.answer is not None and _is_joining(now)
    soon = [SOON_SECONDS] if joining else []
    return min([calm, *soon, *(max(seconds, 1.0) for seconds in due if seconds > 0)])


def _is_joining(now: Situation) -> bool:
    """All own learners are registered, and the syncer does not have all of them in training yet."""
    up = {one.name for own in now.regions for one in own.learners if one.ready}
    desired = sum(len(own.learners) for own in now.regions)
    training = (
        {one.name for one in now.answer.learners if one.state == "Training"} if now.answer else up
    )
    return len(up) == desired and not up <= training
