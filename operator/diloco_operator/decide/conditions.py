"""
The conditions of a job: each gets a reason of the table (`reasons.py`).

Pure. One function per condition. Messages hold no progress: each change of a message is a write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

from diloco.rpc.connection_reasons import advice
from diloco.runtime.formatting import shorten
from diloco_job import names
from diloco_job.reasons import (
    CERTIFICATE_REASONS,
    CONDITIONS,
    ConditionState,
    clip,
    condition,
    has_reason,
)
from diloco_operator.decide.lost_volume import LostVolume
from diloco_operator.decide.phase import Lifecycle, Phase
from diloco_operator.decide.region_failures import describe_failed
from diloco_operator.decide.volume_claims import sets_of_other_claims
from diloco_operator.resources.operator_scope import listed_regions
from diloco_operator.state.job_state import LOST_VOLUME, JobState
from diloco_operator.state.learner_counts import LearnerCounts
from diloco_operator.state.objects import Object, is_deleting
from diloco_operator.state.pending_events import (
    LATE_SECONDS,
    deployment_problem,
    is_late,
    reported_problem,
)
from diloco_operator.state.pods import (
    LearnerPods,
    describe_unready,
    failing_pod,
    is_ready,
    pod_problem,
)
from diloco_operator.state.previous_status import PreviousStatus, time_of, time_text
from diloco_operator.state.queues import kueue_message, last_scheduled

_STOPPED = ("Suspended", "Complete", "Failed", "NotEvaluated")
"""Reasons of a job that does not run; none applies to a running one."""

_INITIAL = ("", "Starting", "WaitingInQueue", "NotStarted", "NotAsked", "NoAnswer", *_STOPPED)
"""Reasons of a condition that has not been True yet, which is no problem while a job starts."""

_MOMENTARY = ("PodTrouble", "NoEndpoint", "LearnersFailed", *CERTIFICATE_REASONS)
"""Reasons that a job may pass through before its first step."""

_NAMES_SHOWN = 4

_STANDSTILL_SECONDS = 60.0
"""How long nothing was merged by a quorum before that is a problem."""

_FAILURE = "last failure: "
"""In the syncer's message if what it waits for has failed and is repeated."""

_NOT_UPDATED = "not updated yet, because learners are missing or being replaced"

_EJECTED = "ejected, because they do not deliver"

_GROWING = re.compile(r"for \d+ s\b|last \d+ merges\b")
"""In the syncer's message: what grows while it waits for the same."""


def evaluate(
    state: JobState,
    lifecycle: Lifecycle,
    counts: LearnerCounts,
    *,
    refused: ConditionState | None = None,
    waiting: Sequence[str] = (),
) -> tuple[ConditionState, ...]:
    """All conditions of a job with a valid spec, in the table's order; arguments as `status.build`."""
    accepted = refused or acceptance(state, lifecycle)
    if accepted.reason == "RegionNotInSpec":
        return (accepted, *(_outside(state, name) for name in CONDITIONS if name != "Accepted"))
    return (
        accepted,
        _syncer_ready(state, lifecycle),
        _syncer_reachable(state, lifecycle),
        _with_waiting(_learners_ready(state, lifecycle, counts), waiting),
        _quorum_met(state, lifecycle, counts),
        _spec_consistent(state),
        _suspended(state, lifecycle),
        _complete(state, lifecycle),
        lifecycle.failed or condition("Failed", "NotFailed"),
    )


def not_evaluated(name: str) -> ConditionState:
    """The condition of a job that is not accepted."""
    if name in ("Suspended", "Complete", "Failed"):
        return condition(name, f"Not{name}")
    return condition(name, "NotEvaluated")


def unchanged(name: str, previous: PreviousStatus) -> ConditionState:
    """The condition as it was."""
    old = previous.conditions.get(name)
    if old is None:
        return not_evaluated(name)
    return ConditionState(
        type=name,
        status=old.get("status", "Unknown"),
        reason=previous.reason(name),
        message=previous.message(name),
    )


def _outside(state: JobState, name: str) -> ConditionState:
    """
    The condition of a job of which this operator runs nothing.

    A job that ended stays so: with a region.name that was changed by mistake it would start again.
    """
    ended = name in ("Complete", "Failed") and state.previous.is_true(name)
    return unchanged(name, state.previous) if ended else not_evaluated(name)


def acceptance(state: JobState, lifecycle: Lifecycle) -> ConditionState:
    """Whether the spec passed the checks that only the operator can make."""
    job = state.job
    if not state.in_scope:
        return condition(
            "Accepted",
            "RegionNotInSpec",
            region=state.scope.region,
            regions=listed_regions(job),
        )
    raised = lifecycle.phase is Phase.COMPLETE and job.spec.steps > state.previous.number("step")
    if lifecycle.volume_gone and raised:
        return condition(
            "Accepted",
            "VolumeGone",
            steps=job.spec.steps,
            step=state.previous.number("step"),
            volume=names.syncer_name(job.metadata.name),
        )
    if not state.address:
        return condition(
            "Accepted",
            "NoEndpoint",
            region=state.scope.region,
            syncer_region=job.spec.syncer_region,
        )
    # Pods name their ServiceAccount, whatever created it.
    if taken := [(kind, name) for kind, name in state.taken if kind != "ServiceAccount"]:
        children = ", ".join(sorted(f"{kind} {name}" for kind, name in taken))
        return condition("Accepted", "NameTaken", children=children)
    if state.refusals:
        return condition("Accepted", "Refused", refusals="; ".join(state.refusals))
    if sets := sets_of_other_claims(state):
        return condition("Accepted", "StorageNotApplied", sets=_first(sets))
    if state.contested:
        return condition("Accepted", "Contested", children=_first(state.contested))
    if terminating := _terminating(state):
        return condition("Accepted", "ChildTerminating", children=terminating)
    if state.unknown_fields:
        return condition("Accepted", "FieldsIgnored", fields=_first(state.unknown_fields))
    return condition("Accepted", "Valid")


def _terminating(state: JobState) -> str:
    """Children that were deleted long ago and still exist; the conditions of volumes have their own reasons."""
    late = timedelta(seconds=LATE_SECONDS)
    stuck = [
        f"{kind} {name} (since {time_text(since)}; "
        f"finalizers: {_first(live['metadata'].get('finalizers') or ['none'])})"
        for (kind, name), live in sorted(state.children.items())
        if kind != "PersistentVolumeClaim"
        and (since := time_of(live["metadata"].get("deletionTimestamp"))) is not None
        and state.now - since >= late
    ]
    return _first(stuck) if stuck else ""


def _syncer_ready(state: JobState, lifecycle: Lifecycle) -> ConditionState:
    name = "SyncerReady"
    if not state.has_syncer:
        return condition(name, "OtherRegion", region=state.job.spec.syncer_region)
    if lifecycle.lost_volume:
        return _volume_gone(state, lifecycle.lost_volume)
    if _is_serving(state):
        claim = state.syncer_child("PersistentVolumeClaim")
        if claim is not None and is_deleting(claim):
            return condition(name, "VolumeTerminating", claim=claim["metadata"]["name"])
        if claim is not None and _is_not_resized(claim):
            size = claim["spec"]["resources"]["requests"]["storage"]
            return condition(name, "VolumeNotResized", claim=claim["metadata"]["name"], size=size)
        if _waits_for_address(state):
            return condition(
                name, "WaitingForAddress", service=names.syncer_name(state.job.metadata.name)
            )
        if problem := _evaluator_problem(state):
            return condition(name, "EvaluatorTrouble", detail=problem)
        if state.answer is not None and (url := state.answer.not_copied_to):
            return condition(name, "SnapshotsNotCopied", url=url)
        return condition(name, "Serving")
    if lifecycle.finished:
        return _stopped(state, lifecycle, name, "syncer")
    detail = describe_unready(state.pods_of("syncer"))
    if problem := _syncer_problem(state) or _late(state, name, detail):
        return condition(name, "PodTrouble", detail=problem)
    initial = _is_initial(state, name)
    return condition(name, "Starting" if initial else "NotReady", detail=detail)


def _stopped(state: JobState, lifecycle: Lifecycle, name: str, *roles: str) -> ConditionState:
    """The condition of components that should not run, with a pod of theirs that does not end."""
    pods = [pod for role in roles for pod in state.pods_of(role) if is_deleting(pod)]
    if problem := pod_problem(pods, state.now):
        return condition(name, "PodTrouble", detail=problem)
    return condition(name, lifecycle.phase.value)


def _is_initial(state: JobState, name: str) -> bool:
    """Whether the condition has not been True yet: then it is no problem that it is not."""
    reason = state.previous.reason(name)
    if state.previous.is_at_rest:
        return True
    # A first start often waits a moment, such as for a volume to be bound or for cert-manager, or for
    # a correction: an endpoint that was not set yet, or an image with which learners fail.
    return reason in _INITIAL or (reason in _MOMENTARY and not state.step)


def _volume_gone(state: JobState, lost: LostVolume) -> ConditionState:
    job = state.job.metadata.name
    seen = f"was replaced by one with uid {lost.found}" if lost.found else "no longer exists"
    return condition(
        "SyncerReady",
        "VolumeGone",
        claim=names.syncer_name(job),
        uid=lost.uid,
        step=lost.step,
        seen=seen,
        instead="the existing claim" if lost.found else "a new one from step 0",
        command=f"kubectl annotate dlj/{job} --overwrite {LOST_VOLUME}={lost.uid}",
    )


def _syncer_problem(state: JobState) -> str:
    """Why the syncer has no pod that runs, as Kubernetes reports it; "": no problem is reported."""
    pods = state.pods_of("syncer")
    return (
        pod_problem(pods, state.now)
        or deployment_problem(state.syncer_child("Deployment"))
        or reported_problem(pods, state.events, _former(state, "SyncerReady"))
    )


def _evaluator_problem(state: JobState) -> str:
    """Why the evaluator does not run; "": it runs, starts, or should not run."""
    name = names.evaluator_name(state.job.metadata.name)
    deployment = state.child("Deployment", name)
    if deployment is None or not deployment["spec"].get("replicas"):
        return ""
    pods = state.pods_of("evaluator")
    if failing := failing_pod(pods, state.now):
        return failing
    if any(map(is_ready, pods)):
        # The pod before it may stay on a lost node for long, and disturbs nothing.
        return ""
    return (
        pod_problem([pod for pod in pods if not is_deleting(pod)], state.now)
        or pod_problem(pods, state.now)
        or deployment_problem(deployment)
        or reported_problem(pods, state.events, _former(state, "SyncerReady"))
    )


def _late(state: JobState, name: str, detail: str) -> str:
    """The detail of a component that has been starting for too long; "": it is still in time."""
    starting = state.previous.reason(name) in ("Starting", "PodTrouble")
    if not starting or not is_late(state.previous, name, state.now, LATE_SECONDS):
        return ""
    # Before, nothing was started: it had no endpoint, for example.
    accepted = state.previous.true_since("Accepted")
    if accepted is not None and state.now - accepted < timedelta(seconds=LATE_SECONDS):
        return ""
    return f"still starting after {LATE_SECONDS:.0f} s: {detail}"


def _is_serving(state: JobState) -> bool:
    deployment = state.syncer_child("Deployment") or {}
    return bool((deployment.get("status") or {}).get("readyReplicas"))


def _is_not_resized(claim: Object) -> bool:
    """Whether the volume does not become as large as the claim asks; the message changes with each attempt."""
    status = claim.get("status") or {}
    resized = str((status.get("allocatedResourceStatuses") or {}).get("storage") or "")
    failed = (
        entry.get("type") in ("ControllerResizeError", "NodeResizeError")
        and entry.get("status") == "True"
        for entry in status.get("conditions") or ()
    )
    return resized.endswith("Infeasible") or any(failed)


def _waits_for_address(state: JobState) -> bool:
    service = state.syncer_child("Service") or {}
    is_balancer = (service.get("spec") or {}).get("type") == "LoadBalancer"
    return is_balancer and not load_balancer_address(service)


def load_balancer_address(service: Object) -> str:
    """IP or name that the cluster assigned to a Service of type LoadBalancer; "": none yet."""
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or [{}]
    return str(ingress[0].get("hostname") or ingress[0].get("ip") or "")


def _syncer_reachable(state: JobState, lifecycle: Lifecycle) -> ConditionState:
    name = "SyncerReachable"
    if state.reachable:
        renewal = state.certificate.renewal if state.certificate else ""
        reason = "CertificateExpires" if renewal else "Answers"
        return condition(name, reason, endpoint=state.address, detail=renewal)
    if lifecycle.follows or (lifecycle.finished and state.has_syncer and not _is_serving(state)):
        return condition(name, lifecycle.phase.value)
    if not state.address:
        return condition(name, "NoEndpoint")
    if problem := state.certificate_problem():
        return condition(name, problem[0], detail=problem[1])
    if state.unreachable is not None:
        if state.is_silent_lately and state.previous.message(name).startswith(f"{state.address}: "):
            return unchanged(name, state.previous)
        reason = state.unreachable.reason
        reason = reason if has_reason(name, reason) else "NoAnswer"
        detail = advice(reason) or state.unreachable.message
        return condition(name, reason, endpoint=state.address, detail=detail)
    if state.has_syncer and state.syncer_child("Deployment") is not None:
        detail = _syncer_problem(state) or describe_unready(state.pods_of("syncer"))
        return condition(name, "NotStarted", detail=detail)
    return condition(name, "NotAsked")


def _learners_ready(state: JobState, lifecycle: Lifecycle, counts: LearnerCounts) -> ConditionState:
    name = "LearnersReady"
    if lifecycle.finished:
        return _stopped(state, lifecycle, name, "learner", "evaluator")
    if not state.address:
        return condition(name, "NoEndpoint")
    own = [counts.of(region.region.name) for region in state.regions]
    desired = sum(region.desired for region in own)
    training = sum(min(region.training or 0, region.ready or 0) for region in own)
    if training == desired:
        return condition(name, "AllTraining", training=training, desired=desired)
    if problem := state.certificate_problem():
        return condition(name, problem[0], detail=problem[1])
    if lifecycle.failed_learners:
        detail = _failed_learners(lifecycle)
        return condition(name, "LearnersFailed", training=training, desired=desired, detail=detail)
    waiting = [learner for learner in state.learners if learner.waits]
    # A learner that waits in a queue has no problem.
    learners = [learner for learner in state.learners if not learner.waits]
    missing = _missing(learners)
    if stuck := _learners_problem(state, learners) or _late_learners(state, learners, missing):
        return condition(name, "PodTrouble", detail=stuck)
    initial = _is_initial(state, name)
    detail = missing + _ejected(state, learners)
    if waiting and not detail:
        queue, message = state.sets.queue, _kueue_message(state, waiting)
        return condition(
            name,
            "WaitingInQueue",
            training=training,
            desired=desired,
            queue=f" {queue.kueue}" if queue is not None and queue.kueue else "",
            learners=_first([learner.name for learner in waiting]),
            detail=f"; Kueue: {message}" if message else "",
        )
    return condition(
        name,
        "Starting" if initial else "SomeNotTraining",
        training=training,
        desired=desired,
        detail=detail
        + _list("waiting in the queue", [learner.name for learner in waiting])
        + ("" if initial or state.reachable else _WITHOUT_SYNCER),
    )


def _kueue_message(state: JobState, waiting: Sequence[LearnerPods]) -> str:
    """Why they wait; without any of Kueue's objects, such as for lack of permission, what they showed last."""
    if state.workloads or state.previous.reason("LearnersReady") != "WaitingInQueue":
        return kueue_message(waiting, state.workloads)
    return _former(state, "LearnersReady").partition("; Kueue: ")[2]


def _former(state: JobState, name: str) -> str:
    """The message of the condition as it was, without those that a change had not reached."""
    return state.previous.message(name).partition(f"; {_NOT_UPDATED}")[0]


def _with_waiting(ready: ConditionState, waiting: Sequence[str]) -> ConditionState:
    """The condition LearnersReady, with those that still run without a change of the manifest."""
    if not waiting:
        return ready
    return replace(ready, message=clip(ready.message + _list(_NOT_UPDATED, waiting)))


def _learners_problem(state: JobState, learners: Sequence[LearnerPods]) -> str:
    """Which learner has a pod that cannot run, as Kubernetes reports it; "": no problem is reported."""
    pods = [pod for learner in learners for pod in learner.pods]
    sets = [child for (kind, _), child in state.children.items() if kind == "StatefulSet"]
    return pod_problem(pods, state.now) or reported_problem(
        [*sets, *pods], state.events, _former(state, "LearnersReady")
    )


def _late_learners(state: JobState, learners: Sequence[LearnerPods], missing: str) -> str:
    # Learners whose pods run wait for a syncer that does not reply: another condition shows that.
    waits = not state.reachable and all(learner.runs for learner in learners)
    if waits or not missing or _admitted_lately(state, learners):
        return ""
    return _late(state, "LearnersReady", missing.lstrip("; "))


def _admitted_lately(state: JobState, learners: Sequence[LearnerPods]) -> bool:
    """Whether a queue has just let one of them start, which the others may have done long before."""
    if state.sets.queue is None:
        return False
    last = last_scheduled(learner for learner in learners if not learner.ready)
    return last is not None and state.now - last < timedelta(seconds=LATE_SECONDS)


def _failed_learners(lifecycle: Lifecycle) -> str:
    """Each failed learner, with its message; no log, which changes with each restart."""
    lost = lifecycle.failed_learners
    shown = [
        f"{learner.learner} ({learner.reason}: {shorten(learner.message, 300)})" for learner in lost
    ]
    more = len(lost) - _NAMES_SHOWN
    return ", ".join(shown[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


_WITHOUT_SYNCER = "; the syncer does not reply, and running learners continue without it"


def _missing(learners: Iterable[LearnerPods]) -> str:
    return _list("not registered", [learner.name for learner in learners if not learner.ready])


def _ejected(state: JobState, learners: Iterable[LearnerPods]) -> str:
    """Without their reasons and probes: those change often, and each change would be a write."""
    if state.answer is None:
        found = re.search(f"; {_EJECTED}: [^;]+", state.previous.message("LearnersReady"))
        return found.group() if found and state.reachable else ""
    ejected = {learner.name for learner in state.answer.learners if learner.state == "Ejected"}
    ready = [learner.name for learner in learners if learner.ready and learner.name in ejected]
    return _list(_EJECTED, ready)


def _list(title: str, found: Sequence[str]) -> str:
    if not found:
        return ""
    return f"; {title}: {_first(found)}"


def _first(found: Sequence[str]) -> str:
    more = len(found) - _NAMES_SHOWN
    return ", ".join(found[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _quorum_met(state: JobState, lifecycle: Lifecycle, counts: LearnerCounts) -> ConditionState:
    name = "QuorumMet"
    if lifecycle.finished:
        return condition(name, lifecycle.phase.value)
    if state.answer is None:
        return _last_known(state, name) or condition(name, "NoAnswer")
    quorum = state.answer.quorum or state.job.spec.sync.quorum
    values = {"reporting": counts.reporting, "quorum": quorum}
    failed = describe_failed(state, counts)
    if counts.reporting >= quorum and state.answer.state != "Initialising":
        enough = f"at least {quorum}"
        if _stands_still(state):
            detail = "; ".join(filter(None, (state.answer.waiting_for, failed)))
            stands = condition(
                name, "NothingMerges", reporting=enough, quorum=quorum, detail=detail
            )
            return _with_former_times(stands, state)
        reason = "RegionFailed" if failed else "EnoughLearners"
        return condition(name, reason, reporting=enough, quorum=quorum, failed=failed)
    waiting = sum(learner.waits for learner in state.learners)
    if waiting and counts.reporting + waiting >= quorum:
        return condition(name, "WaitingInQueue", waiting=waiting, **values)
    if failed:
        return condition(name, "RegionMissing", **values, failed=failed)
    initial = not state.step or _is_initial(state, name)
    return condition(name, "Starting" if initial else "TooFewLearners", **values)


def _stands_still(state: JobState) -> bool:
    """Whether the syncer waits for something although there is a quorum, and has not merged for a while."""
    answer, reached = state.answer, state.previous.true_since("QuorumMet")
    if answer is None or answer.state != "Waiting" or not answer.waiting_for or reached is None:
        return False
    if answer.step >= state.job.spec.steps and _FAILURE not in answer.waiting_for:
        return False  # the last snapshot and the model of a large job take minutes
    merged = 0 <= answer.seconds_since_merge < _STANDSTILL_SECONDS
    return not merged and state.now - reached >= timedelta(seconds=_STANDSTILL_SECONDS)


def _with_former_times(found: ConditionState, state: JobState) -> ConditionState:
    """With the message of the status if only times and counts that grow differ: each change is a write."""
    former = state.previous.message(found.type)
    same = _GROWING.sub("", former) == _GROWING.sub("", found.message)
    return replace(found, message=former) if same else found


def _spec_consistent(state: JobState) -> ConditionState:
    name = "SpecConsistent"
    if state.answer is None or not state.answer.spec_hash:
        return _last_known(state, name) or condition(name, "NoAnswer")
    if state.answer.spec_hash == state.spec_hash:
        differing = ", ".join(
            f"that of {learner} is {other}" for learner, other in state.answer.differing
        )
        if differing:
            return condition(name, "OtherHash", own=state.spec_hash, others=differing)
        return condition(name, "SameHash")
    others = (
        f"that of the syncer in region {state.job.spec.syncer_region} is {state.answer.spec_hash}"
    )
    return condition(name, "OtherHash", own=state.spec_hash, others=others)


def _last_known(state: JobState, name: str) -> ConditionState | None:
    """The condition from the syncer's last answer, as long as that counts."""
    reason = state.previous.reason(name)
    if not state.reachable or reason in _STOPPED or not has_reason(name, reason):
        return None
    return ConditionState(
        type=name,
        status=state.previous.conditions[name]["status"],
        reason=reason,
        message=state.previous.message(name),
    )


def _suspended(state: JobState, lifecycle: Lifecycle) -> ConditionState:
    if lifecycle.phase is Phase.SUSPENDED:
        return condition("Suspended", "Suspended")
    if (
        lifecycle.phase is Phase.FAILED
        and lifecycle.volume_gone
        and state.job.spec.run_policy.suspend
    ):
        claim = names.syncer_name(state.job.metadata.name)
        return condition("Suspended", "VolumeGone", claim=claim)
    resumed = state.previous.is_true("Suspended") or state.previous.reason("Suspended") == "Resumed"
    return condition("Suspended", "Resumed" if resumed else "NotSuspended")


def _complete(state: JobState, lifecycle: Lifecycle) -> ConditionState:
    steps, previous, answer = state.job.spec.steps, state.previous, state.answer
    if lifecycle.phase is Phase.COMPLETE:
        done = previous.number("step") if lifecycle.volume_gone else steps
        unchanged_model = previous.reason("Complete") == "ParametersUnchanged"
        if answer is not None and answer.state == "Complete":
            unchanged_model = answer.unchanged
        reason = "ParametersUnchanged" if unchanged_model else "StepsDone"
        return condition("Complete", reason, steps=done)
    if answer is not None and answer.state == "Complete" and not state.has_syncer:
        return condition("Complete", "SyncerDone", step=answer.step, steps=steps)
    if answer is None and previous.reason("Complete") == "SyncerDone" and state.reachable:
        return unchanged("Complete", previous)
    raised = previous.is_true("Complete") and steps > previous.number("step")
    if raised or previous.reason("Complete") == "StepsRaised":
        return condition("Complete", "StepsRaised", steps=steps)
    return condition("Complete", "NotComplete")
