"""
Learners of several pods: which pods to delete, so that a changed template reaches whole learners.

Pure. The StatefulSet has the update strategy OnDelete, because its controller would replace the pods
of a learner one by one, and each would end the collective of the others. A learner that trains is
replaced when nothing else is; one that does not train has nothing to lose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from diloco_operator.decide.rollout import has_only_quorum
from diloco_operator.resources.learners import has_units
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import Object, controller_uid, identity, is_deleting, labels
from diloco_operator.state.pending_events import is_late
from diloco_operator.state.pods import REVISION, LearnerPods, is_ready, is_unschedulable

UNAVAILABLE_SECONDS = 60.0
"""How long learners may be unavailable while none trains, before their pods are replaced together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacements:
    """What happens to the learners whose pods have an old template."""

    pods: tuple[Object, ...] = ()
    """To delete now."""
    waiting: tuple[str, ...] = ()
    """Learners whose turn has not come."""


def replacements(state: JobState, changing: Collection[tuple[str, str]]) -> Replacements:
    """
    The pods to delete, and the learners that wait.

    Args:
        state: of the job.
        changing: kind and name of the children that are applied now: their pods wait for the
            revision that follows.
    """
    if not has_units(state.job):
        return Replacements()
    revisions = dict(_revisions(state, changing))
    learners = [learner for own in state.regions for learner in own.learners]
    outdated = {
        learner.name: pods for learner in learners if (pods := _outdated(learner, revisions))
    }
    due = [
        learner.name
        for learner in learners
        if learner.name in outdated and _has_nothing_to_lose(state, learner, outdated)
    ]
    held_back = state.awaits_answer or has_only_quorum(state)
    if not due and all(map(_is_back, learners)) and not held_back:
        due = list(outdated)[:1]
    return Replacements(
        pods=tuple(pod for name in due for pod in outdated[name]),
        waiting=tuple(name for name in outdated if name not in due),
    )


def _has_nothing_to_lose(
    state: JobState, learner: LearnerPods, outdated: Mapping[str, tuple[Object, ...]]
) -> bool:
    """Whether the learner does not train, or its replacement has begun."""
    if len(outdated[learner.name]) < learner.num_wanted or not learner.runs:
        return True
    if learner.ready or state.answer is None:
        # Without the syncer no learner is ready, and all may train.
        return False
    if any(other.name == learner.name and other.state != "Gone" for other in state.answer.learners):
        return False
    # When a syncer has just restarted, its learners are still on their way.
    others_train = state.answer.state == "Training"
    return others_train or is_late(state.previous, "LearnersReady", state.now, UNAVAILABLE_SECONDS)


def _is_back(learner: LearnerPods) -> bool:
    """Ready; pods that no node fits do not block the others."""
    complete = len(learner.pods) == learner.num_wanted
    return complete and all(is_ready(pod) or is_unschedulable(pod) for pod in learner.pods)


def _revisions(state: JobState, changing: Collection[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """uid and newest revision of each StatefulSet whose controller knows its template."""
    for child in state.children.values():
        status, metadata = child.get("status") or {}, child["metadata"]
        if child["kind"] != "StatefulSet" or identity(child) in changing or is_deleting(child):
            continue
        known = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
        if known and status.get("updateRevision"):
            yield metadata["uid"], str(status["updateRevision"])


def _outdated(learner: LearnerPods, revisions: Mapping[str, str]) -> tuple[Object, ...]:
    """The pods of a learner with another revision; those that are being deleted go anyway."""
    return tuple(
        pod for pod in learner.pods if not is_deleting(pod) and _is_outdated(pod, revisions)
    )


def _is_outdated(pod: Object, revisions: Mapping[str, str]) -> bool:
    newest, own = revisions.get(controller_uid(pod)), labels(pod).get(REVISION)
    return newest is not None and own is not None and own != newest
