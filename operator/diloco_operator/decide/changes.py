"""
Which children to apply and which to delete.

Pure. A child without drift is left alone, and so is every object of another owner. `rollout` delays
changes that restart learners; `replacements` selects the outdated pods of learners of several pods;
`running_templates` avoids changes that only an upgrade would cause, `volume_claims` those that existing
volumes do not allow; `pruning` selects what to delete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from diloco_operator.decide import kept_pods
from diloco_operator.decide.drift import has_drifted
from diloco_operator.decide.lost_nodes import overdue_pods
from diloco_operator.decide.phase import Lifecycle, Phase, wanted
from diloco_operator.decide.pruning import finished_pods, has_other_pods, obsolete
from diloco_operator.decide.replacements import Replacements, replacements
from diloco_operator.decide.rollout import held_back, is_new, with_live_template
from diloco_operator.decide.running_templates import keep_templates
from diloco_operator.decide.secret_owner import to_own
from diloco_operator.decide.volume_claims import keep_claims
from diloco_operator.resources import Wanted, each_desired, volume_claim
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import Object, controller_uid, identity, is_deleting, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """A child or a pod to delete: exactly the object that was read."""

    kind: str
    name: str
    uid: str
    """A precondition: a newer object of the same name is left alone."""
    force: bool = False
    """Without waiting for the kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes to a job's children."""

    apply: tuple[dict[str, Any], ...]
    delete: tuple[ObjectRef, ...]
    patch: tuple[dict[str, Any], ...] = ()
    """Fields of objects that others made."""
    waiting: tuple[str, ...] = ()
    """Regions and learners that do not have the changed template yet, because others are missing."""


def ending(state: JobState, lifecycle: Lifecycle) -> Changes:
    """The changes that end a job which is not accepted: they stop pods, and start none."""
    if not lifecycle.finished:
        # What the user wants to keep must not go with the job, which may be deleted next.
        return Changes(apply=_released_claim(state), delete=())
    due = changes(
        state, lifecycle, only=lambda want: releases_claim(state, want) or _stops(state, want)
    )
    # The claims of learners may go with their StatefulSet, which may have no successor before
    # the job is accepted.
    keeps_sets = wanted(state, lifecycle).volume
    delete = [ref for ref in due.delete if not (keeps_sets and _is_stopped_set(state, ref))]
    return replace(due, delete=tuple(delete), waiting=())


def _stops(state: JobState, want: Object) -> bool:
    """Whether it stops a workload. One that has stopped would only get the pod template of the manifest."""
    live = state.child(*identity(want))
    stops = want.get("spec", {}).get("replicas") == 0
    return stops and live is not None and live["spec"].get("replicas") != 0


def releases_claim(state: JobState, want: Object) -> bool:
    """Whether it takes the job's ownership from its claim, so that the claim outlives the job."""
    live = state.child(*identity(want))
    return (
        want["kind"] == "PersistentVolumeClaim"
        and live is not None
        and controller_uid(live) == state.owner.uid
        and "ownerReferences" not in want["metadata"]
    )


def _released_claim(state: JobState) -> tuple[dict[str, Any], ...]:
    """The claim without an owner, if the manifest has just begun to retain it; else nothing."""
    claim = volume_claim(state.job, state.owner, state.scope, state.plan, state.sets)
    if claim is None or not releases_claim(state, claim):
        return ()
    return tuple(want for want in keep_claims(state, [claim]) if _is_due(state, want))


def _is_stopped_set(state: JobState, ref: ObjectRef) -> bool:
    live = state.child(ref.kind, ref.name)
    return ref.kind == "StatefulSet" and live is not None and not live["spec"].get("replicas")


def changes(
    state: JobState, lifecycle: Lifecycle, only: Callable[[Object], bool] = lambda _: True
) -> Changes:
    """
    The changes that make the job's children match its manifest and phase.

    Args:
        state: of the job.
        lifecycle: its phase.
        only: whether a child may be applied; the others are left as they are.
    """
    if lifecycle.failing:
        # The pods hold the evidence: the status records it before they change.
        return Changes(apply=_released_claim(state), delete=())
    running = wanted(state, lifecycle)
    held = kept_pods.being_released(state, lifecycle)
    keys, due = set(), []
    for want in _wants(state, lifecycle, running):
        if not has_other_pods(state, want):
            keys.add(identity(want))
        if only(want) and _is_due(state, want) and _uid(state.child(*identity(want))) not in held:
            due.append(want)
    waiting = held_back(state, due)
    # Not those of other writers: a webhook may change every apply, and no learner would be replaced.
    changing = {identity(want) for want in due if is_new(state, want)}
    outdated = replacements(state, changing) if running.learners else Replacements()
    meanwhile = [with_live_template(state, want) if want in waiting else want for want in due]
    return Changes(
        apply=(
            *(() if running.volume else _released_claim(state)),
            *(want for want in meanwhile if want is not None),
        ),
        delete=(
            *map(_ref, (*obsolete(state, keys, keep_volume=running.volume), *outdated.pods)),
            *map(_ref, kept_pods.to_delete(state, lifecycle)),
            # A person who suspended the job waits until it has no pods.
            *map(_ref, finished_pods(state) if lifecycle.phase is Phase.SUSPENDED else ()),
            *(replace(_ref(pod), force=True) for pod in overdue_pods(state)),
        ),
        patch=(*kept_pods.to_keep(state, lifecycle), *to_own(state)),
        waiting=(
            *sorted({labels(want)["diloco.dev/region"] for want in waiting if is_new(state, want)}),
            *outdated.waiting,
        ),
    )


def _wants(state: JobState, lifecycle: Lifecycle, running: Wanted) -> Iterator[dict[str, Any]]:
    """The children that the job should have, as far as its volumes and running pods allow them."""
    wants = each_desired(state.job, state.owner, state.scope, running, state.plan, state.sets)
    for want in keep_claims(state, keep_templates(state, wants)):
        if lifecycle.lost_volume and want["kind"] == "PersistentVolumeClaim":
            continue  # neither a new, empty claim, nor that of another owner
        if lifecycle.volume_gone and identity(want) not in state.children:
            continue  # what is left stays, and nothing is made: not a new claim either
        yield want


def _is_due(state: JobState, want: Object) -> bool:
    """Missing or drifted, and free to be applied."""
    if identity(want) in state.taken or has_other_pods(state, want):
        return False
    live = state.child(*identity(want))
    # Applying to an object that is being deleted would create nothing.
    return live is None or (has_drifted(live, want) and not is_deleting(live))


def _uid(live: Object | None) -> str:
    return "" if live is None else str(live["metadata"].get("uid", ""))


def _ref(live: Object) -> ObjectRef:
    metadata = live["metadata"]
    return ObjectRef(kind=live["kind"], name=metadata["name"], uid=metadata["uid"])
