"""
Rolling changes to learners: one region at a time, and none while only a quorum trains.

Pure. Learners of several pods are replaced by `replacements`, learner by learner.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from diloco_operator.decide.drift import covers, is_changed
from diloco_operator.resources.overlay import without_nulls
from diloco_operator.resources.template_record import template_of, template_text, with_former
from diloco_operator.state.job_state import JobState
from diloco_operator.state.learner_counts import count_learners
from diloco_operator.state.objects import Object, controller_uid, identity, labels
from diloco_operator.state.pods import REVISION, is_ready, is_unschedulable


def held_back(state: JobState, wants: Sequence[Object]) -> list[Object]:
    """Those of the objects to apply that would start a rollout which has to wait."""
    rollouts = [want for want in wants if _restarts_learners(state.child(*identity(want)), want)]
    in_progress = _in_progress(state)
    # A rollout in progress accepts further changes: its pods may never become ready otherwise.
    new = [want for want in rollouts if not _continues(state, want, in_progress)]
    if in_progress or state.awaits_answer:
        return new
    complete = _complete_regions(state) if has_only_quorum(state) else set()
    free = [want for want in new if labels(want).get("diloco.dev/region") not in complete]
    # What a webhook changes in every apply is always due: it must not take the turn of a change.
    started = sorted(free, key=lambda want: not is_new(state, want))[:1]
    return [want for want in new if want not in started]


def with_live_template(state: JobState, want: Object) -> dict[str, Any] | None:
    """
    What of an object that is held back does not wait: another number of pods; None: it has the same.

    The syncer learns the new numbers at once and ends the session of a learner beyond them.
    """
    live = state.children[identity(want)]
    if live["spec"].get("replicas") == want["spec"]["replicas"]:
        return None
    recorded, template = template_of(live), live["spec"]["template"]
    if recorded is not None and covers(template, recorded):
        template = recorded
    return with_former(want, live, template)


def _continues(state: JobState, want: Object, in_progress: Collection[tuple[str, str]]) -> bool:
    """Whether the StatefulSet's learners are being replaced already."""
    live = state.children[identity(want)]
    # One whose controller has not seen its last change may only have another number of pods.
    return identity(want) in in_progress and (_is_observed(live) or not is_new(state, want))


def is_new(state: JobState, want: Object) -> bool:
    """Whether the object differs from our last apply, and not only because of another writer."""
    live = state.child(*identity(want))
    return live is None or is_changed(live, want)


def _restarts_learners(live: Object | None, want: Object) -> bool:
    """Whether the apply replaces learners that train."""
    if live is None or want["kind"] != "StatefulSet" or not want["spec"]["replicas"]:
        return False
    if _replaces_nothing(want):
        return False
    if not (live.get("status") or {}).get("readyReplicas"):
        return False
    former, template = live["spec"].get("template"), want["spec"]["template"]
    if without_nulls(former) == template:
        return False
    # Only the record shows a removed field.
    return not covers(former, template) or template_text(live) != template_text(want)


def _replaces_nothing(stateful_set: Object) -> bool:
    """Whether its controller replaces no pods by itself."""
    strategy = (stateful_set.get("spec") or {}).get("updateStrategy") or {}
    return strategy.get("type") == "OnDelete"


def has_only_quorum(state: JobState) -> bool:
    """Exactly a quorum trains, of more learners: no learner can be spared until another is back."""
    if state.answer is None:
        return False
    quorum = state.answer.quorum or state.job.spec.sync.quorum
    training = sum(region.training or 0 for region in count_learners(state).regions)
    return training == quorum < state.job.spec.num_learners


def _complete_regions(state: JobState) -> set[str]:
    """Regions in which all learners train; a rollout may repair an incomplete region."""
    regions = count_learners(state).regions
    return {region.name for region in regions if (region.training or 0) >= region.desired}


def _in_progress(state: JobState) -> set[tuple[str, str]]:
    """StatefulSets whose learners are being replaced."""
    return {
        key
        for key, child in state.children.items()
        if child["kind"] == "StatefulSet" and _is_rolling(state, child)
    }


def _is_rolling(state: JobState, live: Object) -> bool:
    status, replicas = live.get("status") or {}, (live.get("spec") or {}).get("replicas")
    if not replicas or _replaces_nothing(live):
        return False
    if not _is_observed(live):
        return True
    if status.get("currentRevision") == status.get("updateRevision"):
        return False
    pods = [pod for pod in state.pods if controller_uid(pod) == live["metadata"]["uid"]]
    return len(pods) < replicas or not all(_is_updated(pod, status) for pod in pods)


def _is_observed(live: Object) -> bool:
    """Whether its controller has seen the last change."""
    observed = (live.get("status") or {}).get("observedGeneration", 0)
    return bool(observed >= live["metadata"].get("generation", 0))


def _is_updated(pod: Object, status: Object) -> bool:
    """Replaced, and ready again; an unschedulable pod does not block a rollout."""
    replaced = labels(pod).get(REVISION) == status.get("updateRevision")
    return replaced and (is_ready(pod) or is_unschedulable(pod))
