"""
The pods of failed learners, which stay after their job failed, as the failed pods of a Job do.

Pure. The pods of a StatefulSet never finish, and go when it is scaled to 0. So the pods of a failed learner
get another role, for which its controller releases them, the job as their owner, and a deadline that has
passed: the kubelet ends their containers, and they hold neither a node's resources nor quota. Only then is
the StatefulSet scaled to 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from diloco_operator.decide.phase import Lifecycle, Phase
from diloco_operator.resources.common import reference
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import Object, controller_uid, is_deleting, labels, owner_uids
from diloco_operator.state.pods import has_finished

ROLE = "failed-learner"
"""Value of the label diloco.dev/role of a kept pod: no selector of a job selects it."""

MAX_KEPT = 20
"""Kept pods of one job in one cluster."""

RELEASE_SECONDS = 60.0
"""How long after the failure the StatefulSets wait for pods that are to be kept."""

END_SECONDS = 300.0
"""How long after the failure the containers of a kept pod may run: longer than any grace period by default.
One on a lost node never ends."""


def is_kept(state: JobState, pod: Object) -> bool:
    """
    Whether the job keeps the pod, or kept it once.

    One without an owner was orphaned with its job (--cascade=orphan), which was applied again since.
    """
    if labels(pod).get("diloco.dev/role") != ROLE:
        return False
    if owners := owner_uids(pod):
        return state.owner.uid in owners
    return labels(pod).get("diloco.dev/job") == state.job.metadata.name


def to_keep(state: JobState, lifecycle: Lifecycle) -> tuple[dict[str, Any], ...]:
    """What to apply to the pods of failed learners that are to be kept."""
    if not _keeps(state, lifecycle) or state.now >= _after(lifecycle, RELEASE_SECONDS):
        return ()
    failed = {learner.learner for learner in lifecycle.failed_learners}
    pods = [
        pod
        for learner in state.learners
        if learner.name in failed
        for pod in learner.pods
        if not is_deleting(pod) and not is_kept(state, pod) and not _lacks_node(pod)
    ]
    left = MAX_KEPT - sum(1 for _ in _kept(state))
    return tuple(_kept_pod(state, pod) for pod in pods[: max(0, left)])


def being_released(state: JobState, lifecycle: Lifecycle) -> frozenset[str]:
    """uids of the StatefulSets that may not be scaled yet, because they still control a pod that is kept."""
    if not _keeps(state, lifecycle) or state.now >= _after(lifecycle, RELEASE_SECONDS):
        return frozenset()
    uids = {body["metadata"]["uid"] for body in to_keep(state, lifecycle)}
    controlled = (
        controller_uid(pod)
        for pod in state.pods
        if pod["metadata"].get("uid") in uids or is_kept(state, pod)
    )
    return frozenset(filter(None, controlled))


def to_delete(state: JobState, lifecycle: Lifecycle) -> Iterator[Object]:
    """
    Kept pods to delete: the job no longer fails, or their containers do not end.

    Not with a region.name that is in no region of the job, and that may be set back: the pods of a region
    that was removed go with the job.
    """
    if not state.in_scope:
        return
    for pod in _kept(state):
        if not _keeps(state, lifecycle) or (
            not has_finished(pod) and state.now >= _after(lifecycle, END_SECONDS)
        ):
            yield pod


def times(state: JobState, lifecycle: Lifecycle) -> Iterator[datetime]:
    """Times at which the decisions about kept pods change without an event; some may have passed."""
    if not _keeps(state, lifecycle):
        return
    if being_released(state, lifecycle):
        yield _after(lifecycle, RELEASE_SECONDS)
    if not all(map(has_finished, _kept(state))):
        yield _after(lifecycle, END_SECONDS)


def _keeps(state: JobState, lifecycle: Lifecycle) -> bool:
    # Kueue holds the pods that it admitted with a finalizer of its own until their group is done.
    in_kueue = state.sets.queue is not None and bool(state.sets.queue.kueue)
    policy = state.job.spec.run_policy.cleanup_policy
    return lifecycle.phase is Phase.FAILED and policy == "Running" and not in_kueue


def _after(lifecycle: Lifecycle, seconds: float) -> datetime:
    """Some seconds after the failure."""
    ended = lifecycle.ended
    return datetime.min.replace(tzinfo=UTC) if ended is None else ended + timedelta(seconds=seconds)


def _kept(state: JobState) -> Iterator[Object]:
    return (pod for pod in state.pods if is_kept(state, pod) and not is_deleting(pod))


def _lacks_node(pod: Object) -> bool:
    """Whether no kubelet could end the pod, which has also run nothing that is worth keeping."""
    pending = (pod.get("status") or {}).get("phase") == "Pending"
    return pending and not (pod.get("spec") or {}).get("nodeName")


def _kept_pod(state: JobState, pod: Object) -> dict[str, Any]:
    """The fields of a kept pod; with the uid, another pod of this name is left alone."""
    metadata = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": metadata["name"],
            "namespace": state.owner.namespace,
            "uid": metadata["uid"],
            "labels": {"diloco.dev/role": ROLE},
            # Not as the controller: until it releases the pod, that is the StatefulSet.
            "ownerReferences": [reference(state.job.metadata.name, state.owner.uid)],
        },
        "spec": {"activeDeadlineSeconds": 1},
    }
