"""
The status of a job (job.md section 3), and whether it is worth a write.

Pure. Fields without a value are left out: server-side apply carries no null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from diloco_operator import conditions
from diloco_operator.before import Before, time_text
from diloco_operator.course import Course, Phase
from diloco_operator.reasons import CONDITIONS, Verdict, clip, say
from diloco_operator.situation import Situation
from diloco_operator.tally import RegionTally, Tally, tally

Status = dict[str, Any]

PROGRESS_SECONDS = 30.0
"""Progress alone is written so often."""

_TIMES = ("lastSyncTime", "lastMergeTime", "lastSeenTime")
_PROGRESS = ("step", "progress", "tokens", *_TIMES)


def build(now: Situation, course: Course) -> Status:
    """The status of this moment."""
    counted = tally(now)
    said = conditions.verdicts(now, course, counted)
    steps = now.job.spec.steps
    # A complete job is not undone by what a syncer says that lost its volume.
    step = max(now.step, now.before.number("step")) if course.phase is Phase.COMPLETE else now.step
    answer, before = now.answer, now.before
    return _without_empty(
        {
            "observedGeneration": now.generation,
            "state": _state(now, course, said[0], counted),
            "step": step,
            "steps": steps,
            "progress": f"{step}/{steps}",
            "tokens": answer.tokens if answer else before.number("tokens"),
            "epoch": answer.epoch if answer else before.number("epoch"),
            "specHash": now.spec_hash,
            "syncer": _syncer(now),
            "learners": _learners(counted),
            "regions": [_region(one) for one in counted.regions],
            "model": _model(now),
            "startTime": time_text(course.started) if course.started else "",
            "completionTime": time_text(course.ended) if course.ended else "",
            "lastSyncTime": _last_sync(now),
            "conditions": _conditions(said, before, generation=now.generation, now=now.now),
        }
    )


def refused(job: Mapping[str, Any], problems: Iterable[str], now: datetime) -> Status:
    """The status of a job whose spec cannot be used: what it was, and that it is not accepted."""
    before = Before.of(job)
    generation = job["metadata"].get("generation", 0)
    verdict = say("Accepted", "InvalidSpec", problems="; ".join(problems))
    rest = [_carried(name, before) for name in CONDITIONS if name != "Accepted"]
    return {
        "state": "Pending",
        **before.status,
        "observedGeneration": generation,
        "conditions": _conditions([verdict, *rest], before, generation=generation, now=now),
    }


def _carried(name: str, before: Before) -> Verdict:
    old = before.conditions.get(name)
    if old is None:
        return conditions.untouched(name)
    return Verdict(
        condition=name,
        status=old.get("status", "Unknown"),
        reason=before.reason(name),
        message=before.message(name),
    )


# ------------------------------------------------------------------------------ parts


def _state(now: Situation, course: Course, accepted: Verdict, counted: Tally) -> str:
    """The conditions in one word, for people: nothing reads it back."""
    if course.over:
        return course.phase.value
    if not now.concerned or not now.children:
        return "Pending"
    desired = sum(one.desired for one in counted.regions)
    training = sum(one.training or 0 for one in counted.regions)
    if training == desired and now.reachable:
        return "Training"
    if now.step:
        return "Degraded"
    return "Starting" if accepted.status == "True" else "Pending"


def _syncer(now: Situation) -> Status:
    answer, before = now.answer, now.before.part("syncer")
    merged = str(before.get("lastMergeTime", ""))
    if answer is not None and answer.seconds_since_merge >= 0:
        merged = time_text(answer.at - timedelta(seconds=answer.seconds_since_merge))
    return _without_empty(
        {
            "endpoint": endpoint(now),
            "region": now.job.spec.syncer_region,
            "lastMergeTime": merged,
        }
    )


def endpoint(now: Situation) -> str:
    """host:port of the syncer, as others may dial it; "": nobody says."""
    service = now.job.spec.syncer.service
    if not now.has_syncer or now.job.spec.syncer.endpoint:
        return now.job.spec.syncer.endpoint
    if service.type == "LoadBalancer":
        host = conditions.given_address(now.syncer_child("Service") or {})
        if host:
            return f"[{host}]:{service.port}" if ":" in host else f"{host}:{service.port}"
    return now.address


def _learners(counted: Tally) -> Status:
    desired = sum(one.desired for one in counted.regions)
    training = sum(one.training or 0 for one in counted.regions)
    return {
        "desired": desired,
        "ready": sum(one.ready or 0 for one in counted.regions),
        "training": training,
        "summary": f"{training}/{desired}",
    }


def _region(one: RegionTally) -> Status:
    return _without_empty(
        {
            "name": one.name,
            "desired": one.desired,
            "ready": one.ready,
            "training": one.training,
            "restarts": one.restarts,
            "lastSeenTime": one.last_seen,
        }
    )


def _model(now: Situation) -> Status:
    if now.answer is None or not now.answer.model_path:
        return dict(now.before.part("model"))
    return {"path": now.answer.model_path, "sha256": now.answer.model_sha256}


def _last_sync(now: Situation) -> str:
    if now.answer is not None:
        return time_text(now.answer.at)
    return time_text(now.last_answer) if now.last_answer else ""


def _conditions(
    said: Iterable[Verdict], before: Before, *, generation: int, now: datetime
) -> list[Status]:
    made = []
    for one in said:
        old = before.conditions.get(one.condition, {})
        turned = old.get("status") != one.status or not old.get("lastTransitionTime")
        made.append(
            {
                "type": one.condition,
                "status": one.status,
                "reason": one.reason,
                "message": clip(one.message),
                "lastTransitionTime": time_text(now) if turned else old["lastTransitionTime"],
                "observedGeneration": generation,
            }
        )
    return made


def _without_empty(fields: Status) -> Status:
    return {
        key: value for key, value in fields.items() if value is not None and value not in ("", {})
    }


# ------------------------------------------------------------------------------ writes


def is_news(new: Status, job: Mapping[str, Any], now: datetime) -> bool:
    """
    Whether `new` is worth a write.

    Progress alone waits until the last write of progress is 30 s old; that the syncer answered once
    more, or was heard of once more, is no news.
    """
    before = Before.of(job)
    old = before.status
    if _part(new, _TIMES) == _part(old, _TIMES):
        return False
    if _part(new, _PROGRESS) != _part(old, _PROGRESS):
        return True
    written = before.time("lastSyncTime")
    return written is None or now - written >= timedelta(seconds=PROGRESS_SECONDS)


def _part(value: Any, without: tuple[str, ...]) -> Any:
    """The value without some fields, at any depth; lists of named things in the order of names."""
    if isinstance(value, Mapping):
        return {key: _part(item, without) for key, item in value.items() if key not in without}
    if isinstance(value, list):
        return sorted((_part(item, without) for item in value), key=_name)
    return value


def _name(item: Any) -> str:
    return str(item.get("type") or item.get("name")) if isinstance(item, Mapping) else str(item)
