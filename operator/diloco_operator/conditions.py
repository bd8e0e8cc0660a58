"""
What is said of each condition: facts in, a reason of the table (`reasons.py`) out.

Pure. One function per condition. Nothing here writes numbers of progress into a message: a message
that changed would be a write.
"""

from __future__ import annotations

from diloco.tls import advice
from diloco_operator import names
from diloco_operator.course import Course, Phase
from diloco_operator.observed import Object
from diloco_operator.podfacts import trouble, waiting
from diloco_operator.reasons import CONDITIONS, Verdict, is_known, say
from diloco_operator.situation import OwnRegion, Situation
from diloco_operator.tally import Tally

_AT_REST = ("Suspended", "Complete", "Failed", "NotLooked")
"""Reasons of a job that did not run: none of them is true of one that does."""

_AT_FIRST = ("", "Starting", "NotStarted", "NotAsked", "NoAnswer", *_AT_REST)
"""Reasons from which a condition comes to be True for the first time: not yet is no trouble."""

_NAMES_SHOWN = 4


def verdicts(now: Situation, course: Course, tally: Tally) -> tuple[Verdict, ...]:
    """All conditions of an accepted or half-accepted job, in the table's order."""
    accepted = acceptance(now, course)
    if accepted.reason == "RegionNotInSpec":
        return (accepted, *(untouched(name) for name in CONDITIONS if name != "Accepted"))
    return (
        accepted,
        _syncer_ready(now, course),
        _syncer_reachable(now, course),
        _learners_ready(now, course, tally),
        _quorum_met(now, course, tally),
        _spec_consistent(now),
        _suspended(now, course),
        _complete(now, course),
        course.failed or say("Failed", "NotFailed"),
    )


def untouched(name: str) -> Verdict:
    """The condition of a job that is not looked at."""
    if name in ("Suspended", "Complete", "Failed"):
        return say(name, f"Not{name}")
    return say(name, "NotLooked")


def acceptance(now: Situation, course: Course) -> Verdict:
    """Whether the spec passed what only the operator can check."""
    job = now.job
    if not now.concerned:
        regions = ", ".join(region.name for region in job.spec.regions)
        return say("Accepted", "RegionNotInSpec", region=now.view.region, regions=regions)
    if course.volume_gone and job.spec.steps > now.before.number("step"):
        return say(
            "Accepted",
            "VolumeGone",
            steps=job.spec.steps,
            step=now.before.number("step"),
            volume=names.syncer_name(job.metadata.name),
        )
    if not now.address:
        return say(
            "Accepted",
            "NoEndpoint",
            region=now.view.region,
            syncer_region=job.spec.syncer_region,
        )
    if now.taken:
        children = ", ".join(sorted(" ".join(one) for one in now.taken))
        return say("Accepted", "NameTaken", children=children)
    if now.refusals:
        return say("Accepted", "Refused", refusals="; ".join(now.refusals))
    return say("Accepted", "Valid")


def _syncer_ready(now: Situation, course: Course) -> Verdict:
    name = "SyncerReady"
    if not now.has_syncer:
        return say(name, "OtherRegion", region=now.job.spec.syncer_region)
    if _is_serving(now):
        if _waits_for_address(now):
            return say(name, "WaitingForAddress", service=names.syncer_name(now.job.metadata.name))
        return say(name, "Serving")
    if course.over:
        return say(name, course.phase.value)
    pods = now.pods_of("syncer")
    if stuck := trouble(pods):
        return say(name, "PodTrouble", detail=stuck)
    first = now.before.reason(name) in _AT_FIRST
    return say(name, "Starting" if first else "NotReady", detail=waiting(pods))


def _is_serving(now: Situation) -> bool:
    deployment = now.syncer_child("Deployment") or {}
    return bool((deployment.get("status") or {}).get("readyReplicas"))


def _waits_for_address(now: Situation) -> bool:
    service = now.syncer_child("Service") or {}
    return (service.get("spec") or {}).get("type") == "LoadBalancer" and not given_address(service)


def given_address(service: Object) -> str:
    """IP or name that the cluster gave to a Service of type LoadBalancer; "": none yet."""
    given = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or [{}]
    return str(given[0].get("hostname") or given[0].get("ip") or "")


def _syncer_reachable(now: Situation, course: Course) -> Verdict:
    name = "SyncerReachable"
    if now.reachable:
        return say(name, "Answers", endpoint=now.address)
    if course.over and now.has_syncer and not _is_serving(now):
        return say(name, course.phase.value)
    if not now.address:
        return say(name, "NoEndpoint")
    if fault := now.certificate_fault():
        return say(name, fault[0], detail=fault[1])
    if now.silence is not None:
        reason = now.silence.reason
        reason = reason if is_known(name, reason) else "NoAnswer"
        detail = advice(reason) or now.silence.message
        return say(name, reason, endpoint=now.address, detail=detail)
    if now.has_syncer and now.syncer_child("Deployment") is not None:
        pods = now.pods_of("syncer")
        return say(name, "NotStarted", detail=trouble(pods) or waiting(pods))
    return say(name, "NotAsked")


def _learners_ready(now: Situation, course: Course, tally: Tally) -> Verdict:
    name = "LearnersReady"
    if course.over:
        return say(name, course.phase.value)
    if not now.address:
        return say(name, "NoEndpoint")
    own = [tally.of(one.region.name) for one in now.regions]
    desired = sum(one.desired for one in own)
    training = sum(min(one.training or 0, one.ready or 0) for one in own)
    if training == desired:
        return say(name, "AllTraining", training=training, desired=desired)
    if fault := now.certificate_fault():
        return say(name, fault[0], detail=fault[1])
    if stuck := trouble(pod for own in now.regions for one in own.learners for pod in one.pods):
        return say(name, "PodTrouble", detail=stuck)
    first = now.before.reason(name) in _AT_FIRST
    return say(
        name,
        "Starting" if first else "SomeNotTraining",
        training=training,
        desired=desired,
        detail=_missing(now.regions) + ("" if first or now.reachable else _ALONE),
    )


_ALONE = "; the syncer does not answer, and those that run train on by themselves"


def _missing(regions: tuple[OwnRegion, ...]) -> str:
    missing = [one.name for own in regions for one in own.learners if not one.ready]
    if not missing:
        return ""
    shown = ", ".join(missing[:_NAMES_SHOWN])
    more = len(missing) - _NAMES_SHOWN
    return f"; not registered: {shown}" + (f" and {more} more" if more > 0 else "")


def _quorum_met(now: Situation, course: Course, tally: Tally) -> Verdict:
    name = "QuorumMet"
    if course.over:
        return say(name, course.phase.value)
    if now.answer is None:
        return _last_said(now, name) or say(name, "NoAnswer")
    quorum = now.answer.quorum or now.job.spec.sync.quorum
    values = {"reporting": tally.reporting, "quorum": quorum}
    if tally.reporting >= quorum and now.answer.state != "Initialising":
        return say(name, "EnoughLearners", reporting=f"at least {quorum}", quorum=quorum)
    first = not now.step or now.before.reason(name) in _AT_FIRST
    return say(name, "Starting" if first else "TooFewLearners", **values)


def _spec_consistent(now: Situation) -> Verdict:
    name = "SpecConsistent"
    if now.answer is None or not now.answer.spec_hash:
        return _last_said(now, name) or say(name, "NoAnswer")
    if now.answer.spec_hash == now.spec_hash:
        differing = ", ".join(f"that of {one} is {its}" for one, its in now.answer.differing)
        if differing:
            return say(name, "OtherHash", own=now.spec_hash, others=differing)
        return say(name, "SameHash")
    others = f"that of the syncer in region {now.job.spec.syncer_region} is {now.answer.spec_hash}"
    return say(name, "OtherHash", own=now.spec_hash, others=others)


def _last_said(now: Situation, name: str) -> Verdict | None:
    """What was said of the syncer's answers, as long as the last one counts."""
    reason = now.before.reason(name)
    if not now.reachable or reason in _AT_REST or not is_known(name, reason):
        return None
    said = now.before.conditions[name]
    return Verdict(
        condition=name,
        status=said["status"],
        reason=reason,
        message=now.before.message(name),
    )


def _suspended(now: Situation, course: Course) -> Verdict:
    if course.phase is Phase.SUSPENDED:
        return say("Suspended", "Suspended")
    resumed = now.before.is_true("Suspended") or now.before.reason("Suspended") == "Resumed"
    return say("Suspended", "Resumed" if resumed else "NotSuspended")


def _complete(now: Situation, course: Course) -> Verdict:
    steps, before, answer = now.job.spec.steps, now.before, now.answer
    if course.phase is Phase.COMPLETE:
        done = before.number("step") if course.volume_gone else steps
        return say("Complete", "StepsDone", steps=done)
    if answer is not None and answer.state == "Complete" and not now.has_syncer:
        return say("Complete", "SyncerDone", step=answer.step, steps=steps)
    if before.is_true("Complete") or before.reason("Complete") == "StepsRaised":
        return say("Complete", "StepsRaised", steps=steps)
    return say("Complete", "NotComplete")
