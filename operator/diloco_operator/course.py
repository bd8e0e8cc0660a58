"""
Where a job stands in its life, and which of its pods should run because of it.

Pure.

    Running <--suspend, resume--> Suspended
       |  ^
       |  `--steps raised-- Complete       (the syncer did the last step; ends by TTL)
       `------------------> Failed         (final; ends by TTL)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from diloco_operator.manifests import Wanted
from diloco_operator.podfacts import failure
from diloco_operator.reasons import Verdict, say
from diloco_operator.situation import Situation

EVALUATOR_SECONDS = 120.0
"""How long the evaluator may take for the last score of a complete job."""

FETCH_SECONDS = 60.0
"""With cleanupPolicy All: how long the model of a complete job can still be fetched."""


class Phase(StrEnum):
    """The four places of a job's life."""

    RUNNING = "Running"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where a job stands."""

    phase: Phase
    failed: Verdict | None = None
    """Why it failed."""
    failing: bool = False
    """It failed just now, and the status does not say so yet."""
    started: datetime | None
    """When it was started, resumed, or went on after its steps were raised; None: it was not."""
    ended: datetime | None
    """When it became Complete or Failed."""
    volume_gone: bool = False
    """It is Complete, and there is nothing to go on from."""

    @property
    def over(self) -> bool:
        """Nothing trains any more."""
        return self.phase is not Phase.RUNNING


def course(now: Situation) -> Course:
    """Where the job stands now."""
    if not now.concerned:
        return Course(phase=Phase.RUNNING, started=None, ended=None)
    phase, failed = _phase(now)
    before = now.before
    ended = phase in (Phase.COMPLETE, Phase.FAILED)
    started = before.time("startTime") or now.now if ended else _started(now)
    return Course(
        phase=phase,
        failed=failed,
        failing=failed is not None and not before.is_true("Failed"),
        started=None if phase is Phase.SUSPENDED else started,
        ended=(before.time("completionTime") or now.now) if ended else None,
        volume_gone=phase is Phase.COMPLETE and _volume_gone(now),
    )


def _phase(now: Situation) -> tuple[Phase, Verdict | None]:
    before, policy = now.before, now.job.spec.run_policy
    if before.is_true("Failed"):
        return Phase.FAILED, Verdict(
            condition="Failed",
            status="True",
            reason=before.reason("Failed"),
            message=before.message("Failed"),
        )
    if _is_complete(now):
        return Phase.COMPLETE, None
    if policy.suspend:
        return Phase.SUSPENDED, None
    learners = [one for own in now.regions for one in own.learners]
    failed = failure(learners, policy.learner_restart_limit)
    deadline = _deadline(now)
    if failed is None and deadline is not None and now.now >= deadline:
        seconds = policy.active_deadline_seconds
        failed = say("Failed", "DeadlineExceeded", seconds=seconds)
    return (Phase.FAILED, failed) if failed else (Phase.RUNNING, None)


def _is_complete(now: Situation) -> bool:
    steps, answer = now.job.spec.steps, now.answer
    if now.before.is_true("Complete"):
        return steps <= now.before.number("step") or _volume_gone(now)
    # The state as well: the model is exported by then.
    return answer is not None and answer.state == "Complete" and answer.step >= steps


def _volume_gone(now: Situation) -> bool:
    return now.has_syncer and now.syncer_child("PersistentVolumeClaim") is None


def _started(now: Situation) -> datetime:
    """When a job that runs was started; the clock begins anew when it goes on after its end."""
    # A suspended job has no startTime, so a resumed one begins anew as well.
    rested = now.before.is_true("Complete")
    return (None if rested else now.before.time("startTime")) or now.now


def _deadline(now: Situation) -> datetime | None:
    seconds = now.job.spec.run_policy.active_deadline_seconds
    return None if seconds is None else _after(_started(now), seconds)


def wanted(now: Situation, course: Course) -> Wanted:
    """Which pods should run, and whether anything should be there at all."""
    policy = now.job.spec.run_policy.cleanup_policy
    nothing = Wanted(learners=False, syncer=False, evaluator=False, volume=False)
    resting = Wanted(learners=False, syncer=False, evaluator=False)
    match course.phase:
        case Phase.RUNNING:
            return Wanted()
        case Phase.SUSPENDED:
            return resting
        case Phase.COMPLETE if course.volume_gone or _fetched(now, course):
            return nothing
        case _ if policy == "None":
            return Wanted()
        case Phase.COMPLETE:
            # The syncer holds the model, and tells other regions that the job is complete.
            return Wanted(learners=False, evaluator=_is_scoring(now, course))
        case _:
            return nothing if policy == "All" else resting


def _fetched(now: Situation, course: Course) -> bool:
    return now.job.spec.run_policy.cleanup_policy == "All" and _past(now, course, FETCH_SECONDS)


def _is_scoring(now: Situation, course: Course) -> bool:
    scored = now.answer is not None and now.answer.eval_step >= now.job.spec.steps
    return not scored and not _past(now, course, EVALUATOR_SECONDS)


def _past(now: Situation, course: Course, seconds: float) -> bool:
    return course.ended is not None and now.now >= _after(course.ended, seconds)


def is_outlived(now: Situation, course: Course) -> bool:
    """The finished job has been there for spec.runPolicy.ttlSecondsAfterFinished."""
    ttl = now.job.spec.run_policy.ttl_seconds_after_finished
    return ttl is not None and _past(now, course, ttl)


def turns(now: Situation, course: Course) -> Iterator[datetime]:
    """Times at which something changes by itself; some may have passed."""
    policy = now.job.spec.run_policy
    deadline = _deadline(now)
    if deadline is not None and course.phase is Phase.RUNNING:
        yield deadline
    if now.answer is None:
        yield now.reachable_until
    if course.failing:
        yield _after(now.now, 1.0)
    if course.ended is not None:
        for seconds in (EVALUATOR_SECONDS, FETCH_SECONDS, policy.ttl_seconds_after_finished):
            if seconds is not None:
                yield _after(course.ended, seconds)


def _after(when: datetime, seconds: float) -> datetime:
    """Some seconds later; far beyond any life of a job, the end of time."""
    try:
        return when + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=when.tzinfo)
