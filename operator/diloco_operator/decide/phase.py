"""
The phase of a job, and which of its components should run in it.

Pure.

    Running <--suspend, resume--> Suspended
       |  ^                             ^
       |  `--steps raised-- Complete    |     (the syncer completed the last step; ends by TTL)
       `------------------> Failed -suspend   (ends by TTL)

A job that failed in the syncer's region is Failed in the others as well, and Running again when the
syncer runs again. One that is Complete in the others is Running again when the syncer starts over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from diloco.runtime.formatting import shorten
from diloco.spec import FINAL_EVALUATION_SECONDS
from diloco_job import names
from diloco_job.names import learner_name
from diloco_job.reasons import ConditionState, condition
from diloco_operator.decide.lost_volume import LostVolume, lost_volume
from diloco_operator.resources import Wanted
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import Object
from diloco_operator.state.observation import Failure, RegionFailure
from diloco_operator.state.pods import FailedLearner, failed_learners, failing_pod
from diloco_operator.state.previous_status import time_of

EVALUATOR_SECONDS = 120.0
"""How long the evaluator of a complete job is kept while it does not run."""

FAILURE_REPORT_SECONDS = 120.0
"""How long the syncer of a failed job remains, so that operators of other regions learn of it."""

FOLLOWS = "SyncerRegionFailed"
"""Reason of the condition Failed where another region's operator reported the failure."""

MAX_REASON = 64
"""Characters of a reason of another region."""

LEARNER_REASONS = ("LearnerRefused", "LearnerNeverJoined", "LearnerRestartLimit", "LearnersFailed")
"""Reasons of the condition Failed of a job of which too few learners are left."""

_REPORTED_CHARACTERS = 150
"""Of the message of another region."""

FETCH_SECONDS = 60.0
"""With cleanupPolicy All: how long the model of a complete job stays available, at least."""


class Phase(StrEnum):
    """The phases of a job."""

    RUNNING = "Running"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """The phase of a job, with its times."""

    phase: Phase
    failed: ConditionState | None = None
    """Why it failed."""
    failing: bool = False
    """It failed in this reconcile; the status does not show it yet."""
    started: datetime | None
    """When it started, resumed, or continued after its steps were raised; None: not started."""
    ended: datetime | None
    """When it became Complete or Failed."""
    failed_learners: tuple[FailedLearner, ...] = ()
    """Learners of this operator's regions that have failed; a running job continues without them, or fails."""
    volume_gone: bool = False
    """It is Complete or Failed, and its state was deleted."""
    lost_volume: LostVolume | None = None
    """It is Running or Suspended, and its state is not there: the syncer does not start."""

    @property
    def follows(self) -> bool:
        """Whether it is Failed here only because it is in the syncer's region."""
        return self.failed is not None and self.failed.reason == FOLLOWS

    @property
    def fails_by_pods(self) -> bool:
        """Whether it failed in this reconcile because of its pods, which an old list may show."""
        return self.failed is not None and self.failing and self.failed.reason in LEARNER_REASONS

    @property
    def finished(self) -> bool:
        """Whether the job should not train, for now or for good."""
        return self.phase is not Phase.RUNNING


def lifecycle_of(state: JobState) -> Lifecycle:
    """The job's phase now."""
    if not state.in_scope:
        return Lifecycle(phase=Phase.RUNNING, started=None, ended=None)
    limit = state.job.spec.run_policy.learner_restart_limit
    lost = failed_learners(state.learners, limit, state.now)
    phase, failed = _phase(state, lost)
    previous = state.previous
    ended = phase in (Phase.COMPLETE, Phase.FAILED)
    started = previous.time("startTime") or state.now if ended else _started(state)
    return Lifecycle(
        phase=phase,
        failed=failed,
        failing=failed is not None and not previous.is_true("Failed"),
        started=None if phase is Phase.SUSPENDED else started,
        ended=(previous.time("completionTime") or state.now) if ended else None,
        failed_learners=lost,
        volume_gone=ended and _volume_gone(state),
        lost_volume=None if ended else lost_volume(state),
    )


def _phase(state: JobState, lost: tuple[FailedLearner, ...]) -> tuple[Phase, ConditionState | None]:
    previous, policy = state.previous, state.job.spec.run_policy
    # A suspension ends a failure, so that a corrected job resumes.
    resumes = (policy.suspend and _is_resumable(state)) or _resumes_elsewhere(state)
    if previous.is_true("Failed") and not resumes:
        return Phase.FAILED, ConditionState(
            type="Failed",
            status="True",
            reason=previous.reason("Failed"),
            message=previous.message("Failed"),
        )
    if _is_complete(state):
        return Phase.COMPLETE, None
    if policy.suspend:
        return Phase.SUSPENDED, None
    if lost_volume(state):
        # A failure would delete the learners, which hold the newest parameters: a person decides.
        return Phase.RUNNING, None
    failed = _failed_elsewhere(state) or _too_few_left(state, lost)
    deadline = _deadline(state)
    if failed is None and deadline is not None and state.now >= deadline:
        seconds = policy.active_deadline_seconds
        failed = condition("Failed", "DeadlineExceeded", seconds=seconds)
    return (Phase.FAILED, failed) if failed else (Phase.RUNNING, None)


def _resumes_elsewhere(state: JobState) -> bool:
    """Whether a job that failed in the syncer's region is no longer failed there."""
    answer = state.answer
    return state.previous.reason("Failed") == FOLLOWS and answer is not None and not answer.failure


def _failed_elsewhere(state: JobState) -> ConditionState | None:
    """The condition Failed, if the operator of the syncer's region reported that the job failed."""
    failure = state.answer.failure if state.answer else None
    if state.has_syncer or failure is None:
        return None
    return condition(
        "Failed",
        FOLLOWS,
        region=state.job.spec.syncer_region,
        detail=f"{shorten(failure.reason, MAX_REASON)}: {failure.message}",
    )


def failure_to_report(state: JobState, lifecycle: Lifecycle) -> Failure | None:
    """The failure that the syncer does not repeat yet, although other operators ask it; None: none."""
    failed, answer = lifecycle.failed, state.answer
    if failed is None or answer is None or answer.failure or not _others_ask(state):
        return None
    return Failure(reason=failed.reason, message=failed.message)


def _others_ask(state: JobState) -> bool:
    """Whether operators of other clusters ask the syncer of this one."""
    return state.has_syncer and len(state.regions) < len(state.job.spec.regions)


def _is_resumable(state: JobState) -> bool:
    """Whether a failed job has a volume to resume from, or nothing to lose."""
    return not _volume_gone(state) or not state.previous.number("step")


def _too_few_left(state: JobState, lost: tuple[FailedLearner, ...]) -> ConditionState | None:
    """The condition Failed, if the learners that have not failed cannot form a quorum."""
    spec = state.job.spec
    elsewhere = _lost_elsewhere(state)
    left = spec.num_learners - len(lost) - sum(num for _, num in elsewhere)
    if left >= spec.sync.quorum or not (lost or elsewhere):
        return None
    others = f"{left} learners are left (quorum: {spec.sync.quorum})"
    if not elsewhere:
        return condition(
            "Failed",
            lost[0].reason,
            learner=lost[0].learner,
            limit=spec.run_policy.learner_restart_limit,
            others=others,
            detail=lost[0].message_and_log,
        )
    details = [f"region {failure.region}: {_reported(failure)}" for failure, _ in elsewhere]
    own = [f"learner {learner.learner}: {learner.message_and_log}" for learner in lost[:1]]
    return condition("Failed", "LearnersFailed", others=others, detail="; ".join(details + own))


def _lost_elsewhere(state: JobState) -> list[tuple[RegionFailure, int]]:
    """
    What other clusters report about learners that failed there, with the number of those that are lost.

    Only the syncer's region counts them, so that one operator decides. A learner that trains is not lost,
    whatever has been reported before.
    """
    answer = state.answer
    if not state.has_syncer or answer is None:
        return []
    own = {region.region.name for region in state.regions}
    found = []
    for region in state.job.spec.regions:
        all_names = {learner_name(region.name, index) for index in range(region.learners)}
        training = sum(
            learner.name in all_names and learner.state == "Training" for learner in answer.learners
        )
        reported = (failure for failure in answer.region_failures if failure.region == region.name)
        failure = next(reported, None)
        if failure is None or region.name in own:
            continue
        lost = min(failure.learners, region.learners - training)
        if lost > 0:
            found.append((failure, lost))
    return found


def _reported(failure: RegionFailure) -> str:
    reason = shorten(failure.reason, MAX_REASON)
    return f"{reason}: {shorten(failure.message, _REPORTED_CHARACTERS)}"


def _is_complete(state: JobState) -> bool:
    steps, answer = state.job.spec.steps, state.answer
    if state.previous.is_true("Complete"):
        done = steps <= state.previous.number("step") or _volume_gone(state)
        return done and not _begins_anew_elsewhere(state)
    # Only the state Complete means that the model is exported.
    return answer is not None and answer.state == "Complete" and answer.step >= steps


def _begins_anew_elsewhere(state: JobState) -> bool:
    """
    Whether the syncer of another cluster trains below the last step, although it was complete.

    The answer of a syncer that had not been replaced yet completed a job that is run again.
    """
    answer = state.answer
    if state.has_syncer or answer is None:
        # In its own cluster, a syncer that lost its snapshots does not resume the job.
        return False
    return answer.state != "Complete" and answer.step < state.job.spec.steps


def _volume_gone(state: JobState) -> bool:
    return state.has_syncer and state.syncer_child("PersistentVolumeClaim") is None


def _started(state: JobState) -> datetime | None:
    """
    Start time of a running job, reset when a complete job continues, and when a job that waited for its
    volume does; None: it waits in a queue.
    """
    # A suspended job has no startTime, so resuming resets it as well.
    continued = state.previous.is_true("Complete") or state.previous.is_true("Failed")
    waited = state.previous.reason("SyncerReady") == "VolumeGone" and not lost_volume(state)
    started = None if continued or waited else state.previous.time("startTime")
    return started or (None if _is_queued(state) else state.now)


def _is_queued(state: JobState) -> bool:
    """Whether the queue has admitted none of the learners yet."""
    learners = state.learners if state.sets.queue is not None else []
    return bool(learners) and all(learner.waits or not learner.pods for learner in learners)


def _deadline(state: JobState) -> datetime | None:
    seconds, started = state.job.spec.run_policy.active_deadline_seconds, _started(state)
    return None if seconds is None or started is None else _after(started, seconds)


def wanted(state: JobState, lifecycle: Lifecycle) -> Wanted:
    """Which components should run, and whether the job should have children at all."""
    policy = state.job.spec.run_policy.cleanup_policy
    nothing = Wanted(learners=False, syncer=False, evaluator=False, volume=False)
    stopped = Wanted(learners=False, syncer=False, evaluator=False)
    match lifecycle.phase:
        case Phase.RUNNING if lifecycle.lost_volume or _claim_is_taken(state):
            # Learners hold the newest parameters that are left, and the claim of another owner may
            # hold the state of a former job, and go with it.
            return Wanted(syncer=False, evaluator=False)
        case Phase.RUNNING:
            return Wanted()
        case Phase.SUSPENDED:
            return stopped
        case Phase.COMPLETE if lifecycle.volume_gone or _fetched(state, lifecycle):
            return nothing
        case Phase.FAILED if lifecycle.volume_gone and policy == "All":
            return nothing
        case Phase.FAILED if lifecycle.volume_gone:
            # Learners, or their volumes, hold the newest parameters that are left.
            return Wanted(learners=policy == "None", syncer=False, evaluator=False)
        case _ if policy == "None":
            return Wanted()
        case Phase.COMPLETE:
            # The syncer serves the model and reports completion to other regions.
            return Wanted(learners=False, evaluator=_is_scoring(state, lifecycle))
        case _ if _others_ask(state) and not _past(state, lifecycle, FAILURE_REPORT_SECONDS):
            return Wanted(learners=False, evaluator=False)
        case _:
            return nothing if policy == "All" else stopped


def _claim_is_taken(state: JobState) -> bool:
    """Whether the syncer's claim belongs to another owner."""
    return ("PersistentVolumeClaim", names.syncer_name(state.job.metadata.name)) in state.taken


def _fetched(state: JobState, lifecycle: Lifecycle) -> bool:
    if state.job.spec.run_policy.cleanup_policy != "All":
        return False
    scores = bool(_evaluator(state)) and _is_scoring(state, lifecycle)
    return _past(state, lifecycle, FETCH_SECONDS) and not scores


def _is_scoring(state: JobState, lifecycle: Lifecycle) -> bool:
    """Whether the evaluator of a complete job is kept, because it may still score the final model."""
    if state.answer is not None and state.answer.eval_step >= state.job.spec.steps:
        return False
    evaluator = _evaluator(state)
    stopped = bool(evaluator) and evaluator["spec"].get("replicas") == 0
    if stopped and (state.answer is None or state.previous.is_true("Complete")):
        # Because of an answer that an operator has had before, or by a limit.
        return False
    return state.now < _scores_until(state, lifecycle)


def _scores_until(state: JobState, lifecycle: Lifecycle) -> datetime:
    """Until when the evaluator of a complete job is kept: long only while it runs."""
    ended, status = lifecycle.ended or state.now, _evaluator(state).get("status") or {}
    longest = _after(ended, FINAL_EVALUATION_SECONDS)
    if failing_pod(state.pods_of("evaluator"), state.now):  # it may be ready between two exits
        return _after(ended, EVALUATOR_SECONDS)
    if status.get("readyReplicas"):
        return longest
    # Its container was killed, for example, its node was lost, or it ended without a score: its agent would
    # start that one again later.
    available: Object = next(
        (entry for entry in status.get("conditions") or () if entry.get("type") == "Available"), {}
    )
    since = time_of(available.get("lastTransitionTime"))
    if available.get("status") != "False" or since is None or since < ended:
        since = ended
    return min(longest, _after(since, EVALUATOR_SECONDS))


def _evaluator(state: JobState) -> Object:
    """Its live Deployment; {}: there is none."""
    return state.child("Deployment", names.evaluator_name(state.job.metadata.name)) or {}


def _past(state: JobState, lifecycle: Lifecycle, seconds: float) -> bool:
    return lifecycle.ended is not None and state.now >= _after(lifecycle.ended, seconds)


def is_expired(state: JobState, lifecycle: Lifecycle) -> bool:
    """Whether the job finished spec.runPolicy.ttlSecondsAfterFinished ago."""
    ttl = state.job.spec.run_policy.ttl_seconds_after_finished
    return ttl is not None and _past(state, lifecycle, ttl)


def timeouts(state: JobState, lifecycle: Lifecycle) -> Iterator[datetime]:
    """Times at which the decisions change without an event; some may have passed."""
    policy = state.job.spec.run_policy
    deadline = _deadline(state)
    if deadline is not None and lifecycle.phase is Phase.RUNNING:
        yield deadline
    if state.answer is None:
        yield state.reachable_until
    if lifecycle.failing:
        yield _after(state.now, 1.0)
    if lifecycle.ended is not None:
        yield _scores_until(state, lifecycle)
        fixed = (EVALUATOR_SECONDS, FAILURE_REPORT_SECONDS, FETCH_SECONDS)
        for seconds in (*fixed, policy.ttl_seconds_after_finished):
            if seconds is not None:
                yield _after(lifecycle.ended, seconds)


def _after(when: datetime, seconds: float) -> datetime:
    """Some seconds later; datetime.max where that overflows."""
    try:
        return when + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=when.tzinfo)
