"""
The status of a job (docs/manifest.md, "Status"), and whether it is worth a write.

Pure. Fields without a value are omitted: server-side apply has no null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from diloco_job.reasons import CONDITIONS, ConditionState, clip, condition
from diloco_operator.decide import conditions
from diloco_operator.decide.lost_volume import volume_uid
from diloco_operator.decide.phase import Lifecycle, Phase
from diloco_operator.state.job_state import JobState
from diloco_operator.state.learner_counts import LearnerCounts, RegionCounts, count_learners
from diloco_operator.state.previous_status import PreviousStatus, conditions_of_others, time_text

Status = dict[str, Any]

PROGRESS_SECONDS = 30.0
"""Shortest time between two writes of progress alone."""

_TIMES = ("lastSyncTime", "lastMergeTime", "lastSeenTime")
_PROGRESS = ("step", "progress", "tokens", *_TIMES)


def build(
    state: JobState,
    lifecycle: Lifecycle,
    *,
    refused: ConditionState | None = None,
    waiting: Sequence[str] = (),
) -> Status:
    """
    The status of a job with a valid spec.

    Args:
        state: of the job.
        lifecycle: its phase.
        refused: why it is not accepted though it runs.
        waiting: regions and learners to which a changed template has not come yet.
    """
    counts = count_learners(state)
    evaluated = conditions.evaluate(state, lifecycle, counts, refused=refused, waiting=waiting)
    answer, previous = state.answer, state.previous
    step, steps = state.step, state.job.spec.steps
    if lifecycle.phase is Phase.COMPLETE:
        # A syncer that lost its volume reports a lower step; the job stays complete.
        step = max(step, previous.number("step"))
    return _without_empty(
        {
            "observedGeneration": state.generation,
            "state": _state(state, lifecycle, evaluated, counts),
            "step": step,
            "steps": steps,
            "progress": f"{step}/{steps}",
            "tokens": answer.tokens if answer else previous.number("tokens"),
            "epoch": answer.epoch if answer else previous.number("epoch"),
            "specHash": state.spec_hash,
            "syncer": _syncer(state),
            "learners": _learners(counts),
            "regions": [_region(region) for region in counts.regions],
            "model": _model(state),
            "startTime": _time(state, "startTime", lifecycle.started),
            "completionTime": _time(state, "completionTime", lifecycle.ended),
            "lastSyncTime": _last_sync(state),
            "conditions": _conditions(
                evaluated, previous, generation=state.generation, now=state.now
            ),
        }
    )


def invalid(job: Mapping[str, Any], problems: Iterable[str], now: datetime) -> Status:
    """The status of a job whose spec is invalid."""
    return not_accepted(
        job, condition("Accepted", "InvalidSpec", problems="; ".join(problems)), now
    )


def not_accepted(job: Mapping[str, Any], accepted: ConditionState, now: datetime) -> Status:
    """The status of a job that is left as it is: the previous one, but not accepted."""
    previous = PreviousStatus.of(job)
    generation = job["metadata"].get("generation", 0)
    others = [conditions.unchanged(name, previous) for name in CONDITIONS if name != "Accepted"]
    return {
        "state": "Pending",
        **previous.status,
        "observedGeneration": generation,
        "conditions": _conditions([accepted, *others], previous, generation=generation, now=now),
    }


# ------------------------------------------------------------------------------ parts


def _state(
    state: JobState,
    lifecycle: Lifecycle,
    evaluated: Iterable[ConditionState],
    counts: LearnerCounts,
) -> str:
    """The conditions in one word, for people; no program should read it."""
    if lifecycle.finished:
        return lifecycle.phase.value
    if not state.in_scope:
        return _previous_end(state) or "Pending"
    if not state.children:
        return "Pending"
    desired = sum(region.desired for region in counts.regions)
    training = sum(region.training or 0 for region in counts.regions)
    waiting = sum(learner.waits for learner in state.learners)
    if waiting and not training:
        return "Pending"
    found = {condition.type: condition for condition in evaluated}
    if found["QuorumMet"].reason == "NothingMerges":
        return "Degraded"
    # What a queue has not admitted is not missing.
    if training >= desired - waiting and state.reachable:
        return "Training"
    if state.step or lifecycle.failed_learners:
        return "Degraded"
    return "Starting" if found["Accepted"].status == "True" else "Pending"


def _time(state: JobState, name: str, when: datetime | None) -> str:
    """A time of the lifecycle; as it was, of an ended job of which this operator runs nothing."""
    if not state.in_scope and _previous_end(state):
        return str(state.previous.status.get(name, ""))
    return time_text(when) if when else ""


def _previous_end(state: JobState) -> str:
    """How the job had ended: Complete | Failed; "": it had not."""
    return next((name for name in ("Complete", "Failed") if state.previous.is_true(name)), "")


def _syncer(state: JobState) -> Status:
    answer, previous = state.answer, state.previous.part("syncer")
    merged = str(previous.get("lastMergeTime", ""))
    if answer is not None and answer.seconds_since_merge >= 0:
        merged = time_text(answer.at - timedelta(seconds=answer.seconds_since_merge))
    return _without_empty(
        {
            "endpoint": endpoint(state),
            "region": state.job.spec.syncer_region,
            "lastMergeTime": merged,
            "volumeUid": volume_uid(state),
        }
    )


def endpoint(state: JobState) -> str:
    """host:port at which others may dial the syncer; "": unknown."""
    service = state.job.spec.syncer.service
    if not state.has_syncer or state.job.spec.syncer.endpoint:
        return state.job.spec.syncer.endpoint
    if service.type == "LoadBalancer":
        host = conditions.load_balancer_address(state.syncer_child("Service") or {})
        if host:
            return f"[{host}]:{service.port}" if ":" in host else f"{host}:{service.port}"
    return state.address


def _learners(counts: LearnerCounts) -> Status:
    desired = sum(region.desired for region in counts.regions)
    training = sum(region.training or 0 for region in counts.regions)
    return {
        "desired": desired,
        "ready": sum(region.ready or 0 for region in counts.regions),
        "training": training,
        "summary": f"{training}/{desired}",
    }


def _region(region: RegionCounts) -> Status:
    return _without_empty(
        {
            "name": region.name,
            "desired": region.desired,
            "ready": region.ready,
            "training": region.training,
            "restarts": region.restarts,
            "lastSeenTime": region.last_seen,
        }
    )


def _model(state: JobState) -> Status:
    if state.answer is None or not state.answer.model_path:
        return dict(state.previous.part("model"))
    return {"path": state.answer.model_path, "sha256": state.answer.model_sha256}


def _last_sync(state: JobState) -> str:
    if state.answer is not None:
        return time_text(state.answer.at)
    return time_text(state.last_answer) if state.last_answer else ""


def _conditions(
    evaluated: Iterable[ConditionState], previous: PreviousStatus, *, generation: int, now: datetime
) -> list[Status]:
    entries = []
    for current in evaluated:
        old = previous.conditions.get(current.type, {})
        changed = old.get("status") != current.status or not old.get("lastTransitionTime")
        entries.append(
            {
                "type": current.type,
                "status": current.status,
                "reason": current.reason,
                "message": clip(current.message),
                "lastTransitionTime": time_text(now) if changed else old["lastTransitionTime"],
                "observedGeneration": generation,
            }
        )
    return entries


def _without_empty(fields: Status) -> Status:
    return {
        key: value for key, value in fields.items() if value is not None and value not in ("", {})
    }


# ------------------------------------------------------------------------------ writes


def is_worth_writing(new: Status, job: Mapping[str, Any], now: datetime) -> bool:
    """
    Whether `new` is worth a write.

    Progress alone waits until the last write of progress is 30 s old. New times of the syncer's
    answers and of heartbeats alone are not worth a write. A time of an answer that lies in the
    future, by the clock of another operator, is replaced at once: it would delay progress.
    """
    previous = PreviousStatus.of(job)
    old = {**previous.status}
    if others := conditions_of_others(old):
        old["conditions"] = [entry for entry in old["conditions"] if entry not in others]
    written = previous.time("lastSyncTime")
    if written is not None and written > now:
        written = None
        # A job that is not accepted keeps it.
        if new.get("lastSyncTime") != old.get("lastSyncTime"):
            return True
    if _part(new, _TIMES) == _part(old, _TIMES):
        return False
    if _part(new, _PROGRESS) != _part(old, _PROGRESS):
        return True
    return written is None or now - written >= timedelta(seconds=PROGRESS_SECONDS)


def _part(value: Any, without: tuple[str, ...]) -> Any:
    """The value without some fields, at any depth; lists of objects sorted by name."""
    if isinstance(value, dict):
        return {key: _part(item, without) for key, item in value.items() if key not in without}
    if isinstance(value, list):
        return sorted((_part(item, without) for item in value), key=_name)
    return value


def _name(item: Any) -> str:
    return str(item.get("type") or item.get("name")) if isinstance(item, Mapping) else str(item)
