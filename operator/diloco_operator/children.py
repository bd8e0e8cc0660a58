"""
Which children to apply and which to delete.

Pure. What is as it should be is left alone; what is not ours is never touched; learners are replaced
region by region.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_operator.course import Course, wanted
from diloco_operator.drift import applied, covers, has_drifted
from diloco_operator.manifests import desired
from diloco_operator.observed import Object, controller_uid, identity
from diloco_operator.podfacts import has_run, is_homeless, is_ready
from diloco_operator.situation import Situation
from diloco_operator.tally import tally

MANAGED_BY = "app.kubernetes.io/managed-by"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """A child to delete, exactly the one that was read."""

    api_version: str
    kind: str
    name: str
    uid: str
    """A precondition: another object that took the name meanwhile is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is to be done to the children."""

    apply: tuple[dict[str, Any], ...]
    delete: tuple[ObjectRef, ...]


def changes(now: Situation, course: Course) -> Changes:
    """What is to be done so that the job's children are as they should be."""
    if course.failing:
        # The proof is in the pods: it is written down before anything happens to them.
        return Changes(apply=(), delete=())
    right_now = wanted(now, course)
    view = now.view.as_made(_proved(now))
    wants = desired(now.job, now.owner, view, right_now)
    needed = [
        want
        for want in wants
        if identity(want) not in now.taken
        and ((live := now.child(*identity(want))) is None or has_drifted(live, want))
    ]
    due = [want for want in needed if not _is_going(now.child(*identity(want)))]
    waiting = _waiting(now, [want for want in due if _disturbs(now.child(*identity(want)), want)])
    names = {identity(want) for want in wants}
    return Changes(
        apply=tuple(want for want in due if want not in waiting),
        delete=tuple(_ref(one) for one in _unwanted(now, names, keep_volume=right_now.volume)),
    )


def _proved(now: Situation) -> Iterator[Object]:
    """
    Workloads of which a pod has run.

    They keep their default image when the chart brings another one; an image that nobody could pull
    is not kept.
    """
    ran = {_place(pod) for pod in now.pods if has_run(pod)}
    return (child for child in now.children.values() if _place(child) in ran)


def _place(thing: Object) -> tuple[str | None, str | None]:
    labels = thing["metadata"].get("labels") or {}
    return labels.get("diloco.dev/role"), labels.get("diloco.dev/region")


# ------------------------------------------------------------------------------ rolls


def _is_going(live: Object | None) -> bool:
    """It is being deleted: an apply would change what goes, and make nothing."""
    return live is not None and bool(live["metadata"].get("deletionTimestamp"))


def _disturbs(live: Object | None, want: Object) -> bool:
    """Whether the apply replaces learners that train."""
    if live is None or want["kind"] != "StatefulSet" or not want["spec"]["replicas"]:
        return False
    if not (live.get("status") or {}).get("readyReplicas"):
        return False
    if not covers(live["spec"].get("template"), want["spec"]["template"]):
        return True
    # A field that is no longer wanted is seen by the hash alone; so is a change of replicas.
    scaled = live["spec"].get("replicas") != want["spec"]["replicas"]
    return applied(live) != applied(want) and not scaled


def _waiting(now: Situation, rolls: Sequence[Object]) -> list[Object]:
    """Those of the rolls that have to wait."""
    rolling = _rolling(now)
    # A region in the middle of a roll takes a correction: what it was given may never be ready.
    new = [want for want in rolls if identity(want) not in rolling]
    if rolling:
        return new
    held = _complete_regions(now) if _is_short(now) else ()
    begun = [want for want in new if _place(want)[1] not in held][:1]
    return [want for want in new if want not in begun]


def _is_short(now: Situation) -> bool:
    """Exactly a quorum trains, of more learners: nobody can be spared until another one is back."""
    if now.answer is None:
        return False
    quorum = now.answer.quorum or now.job.spec.sync.quorum
    training = sum(one.training or 0 for one in tally(now).regions)
    return training == quorum < now.job.spec.num_learners


def _complete_regions(now: Situation) -> set[str]:
    """Regions all of whose learners train; what another one lacks may be mended by its roll."""
    return {one.name for one in tally(now).regions if (one.training or 0) >= one.desired}


def _rolling(now: Situation) -> set[tuple[str, str]]:
    """StatefulSets whose learners are being replaced right now."""
    sets = ((name, one) for name, one in now.children.items() if one["kind"] == "StatefulSet")
    return {name for name, one in sets if _rolls(now, one)}


def _rolls(now: Situation, live: Object) -> bool:
    status, replicas = live.get("status") or {}, (live.get("spec") or {}).get("replicas")
    if not replicas:
        return False
    if status.get("observedGeneration", 0) < live["metadata"].get("generation", 0):
        return True
    if status.get("currentRevision") == status.get("updateRevision"):
        return False
    pods = [pod for pod in now.pods if controller_uid(pod) == live["metadata"]["uid"]]
    return len(pods) < replicas or not all(_is_through(pod, status) for pod in pods)


def _is_through(pod: Object, status: Object) -> bool:
    """Replaced, and training again; one that no node has room for holds up nobody."""
    labels = pod["metadata"].get("labels") or {}
    replaced = labels.get("controller-revision-hash") == status.get("updateRevision")
    return replaced and (is_ready(pod) or is_homeless(pod))


# ------------------------------------------------------------------------------ what goes


def _unwanted(
    now: Situation, names: set[tuple[str, str]], *, keep_volume: bool
) -> Iterator[Object]:
    """Children that this operator made for this job and that nobody wants any more."""
    # Where nothing is wanted, no new pod mounts anything.
    kept = set(_documents_in_use(now)) if names else set()
    for name, live in now.children.items():
        labels = live["metadata"].get("labels") or {}
        ours = labels.get(MANAGED_BY) == now.view.manager and controller_uid(live) == now.owner.uid
        if name in names or not ours or _is_going(live):
            continue
        if live["kind"] == "ConfigMap" and name[1] in kept:
            continue
        # The model is on it: nothing but spec.runPolicy.cleanupPolicy All takes it away.
        if live["kind"] == "PersistentVolumeClaim" and keep_volume:
            continue
        yield live


def _documents_in_use(now: Situation) -> Iterator[str]:
    """Names of ConfigMaps that a pod has mounted, or that a new pod would mount."""
    workloads = (
        one for one in now.children.values() if one["kind"] in ("StatefulSet", "Deployment")
    )
    yield from _mounted(pod.get("spec") for pod in now.pods)
    yield from _mounted(
        ((one.get("spec") or {}).get("template") or {}).get("spec")
        for one in workloads
        if not _is_going(one)
    )


def _mounted(specs: Iterable[Any]) -> Iterator[str]:
    for spec in specs:
        for volume in (spec or {}).get("volumes") or ():
            name = (volume.get("configMap") or {}).get("name")
            if name:
                yield name


def _ref(live: Object) -> ObjectRef:
    metadata = live["metadata"]
    return ObjectRef(
        api_version=live["apiVersion"],
        kind=live["kind"],
        name=metadata["name"],
        uid=metadata["uid"],
    )
