"""
Pruning: children that the operator created for a job and that the job no longer needs.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import (
    Object,
    controller,
    controller_uid,
    identity,
    is_deleting,
    labels,
)
from diloco_operator.state.pods import has_finished

MANAGED_BY = "app.kubernetes.io/managed-by"


def obsolete(
    state: JobState, desired: Collection[tuple[str, str]], *, keep_volume: bool
) -> Iterator[Object]:
    """
    Live children to delete.

    Args:
        state: of the job.
        desired: kind and name of the children that should exist.
        keep_volume: keep PersistentVolumeClaims, which hold the model. Only
            spec.runPolicy.cleanupPolicy All deletes them, but none that the manifest retains: the job
            may own it still.
    """
    keep_volume = keep_volume or state.job.spec.syncer.storage.when_deleted == "Retain"
    # Without desired children, no new pod mounts anything.
    in_use = set(_config_maps_in_use(state)) if desired else set()
    for (kind, name), live in state.children.items():
        if (kind, name) in desired or is_deleting(live) or not _is_own(state, live):
            continue
        if kind == "ConfigMap" and name in in_use:
            continue
        if kind == "PersistentVolumeClaim" and keep_volume:
            continue
        yield live


def finished_pods(state: JobState) -> Iterator[Object]:
    """Pods that ended and that no controller deletes, such as an evicted syncer: a ReplicaSet does not count them."""
    for pod in state.pods:
        is_over = has_finished(pod) and not is_deleting(pod)
        is_replaced = is_over and controller(pod).get("kind") == "ReplicaSet"
        if is_replaced and labels(pod).get(MANAGED_BY) == state.scope.manager:
            yield pod


def has_other_pods(state: JobState, want: Object) -> bool:
    """
    Whether a stopped StatefulSet of another region has the name of this one.

    Learner 1 of region eu in a queue and region eu-1 without a queue have the same name, and a
    selector never changes: the former has to go before the other one can be made.
    """
    live = state.child(*identity(want))
    if want["kind"] != "StatefulSet" or live is None or not _is_own(state, live):
        return False
    is_stopped = not (live.get("spec") or {}).get("replicas")
    return is_stopped and _selected_region(live) != _selected_region(want)


def _selected_region(stateful_set: Object) -> Any:
    selector = (stateful_set.get("spec") or {}).get("selector") or {}
    return (selector.get("matchLabels") or {}).get("diloco.dev/region")


def _is_own(state: JobState, live: Object) -> bool:
    managed = labels(live).get(MANAGED_BY) == state.scope.manager
    return managed and controller_uid(live) == state.owner.uid


def _config_maps_in_use(state: JobState) -> Iterator[str]:
    """Names of ConfigMaps that a pod has mounted, or that a new pod would mount."""
    workloads = (
        child for child in state.children.values() if child["kind"] in ("StatefulSet", "Deployment")
    )
    yield from _mounted(pod.get("spec") for pod in state.pods)
    yield from _mounted(
        ((workload.get("spec") or {}).get("template") or {}).get("spec")
        for workload in workloads
        if not is_deleting(workload)
    )


def _mounted(specs: Iterable[Any]) -> Iterator[str]:
    for spec in specs:
        for volume in (spec or {}).get("volumes") or ():
            name = (volume.get("configMap") or {}).get("name")
            if name:
                yield name
