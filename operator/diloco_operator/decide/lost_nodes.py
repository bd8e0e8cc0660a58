"""
Pods of learners that hang in Terminating on a lost node, and when they are deleted by force.

Pure. A StatefulSet does not replace a pod until it is gone, and only its kubelet confirms that. The
force is safe for learners: if the old process still runs, the syncer refuses it as soon as the new one
joins (docs/architecture.md, "Admission"). So it is for the kept pods of failed learners, whose names the
pods of a resumed job need. It would not be for the syncer, whose volume has no such guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from diloco_job.names import learner_pod_ordinal
from diloco_operator.decide import kept_pods
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import Object, controller, labels
from diloco_operator.state.pods import is_on_lost_node
from diloco_operator.state.previous_status import time_of


def overdue_pods(state: JobState) -> Iterator[Object]:
    """The pods to delete by force now."""
    return (pod for pod, due in _hanging(state) if state.now >= due)


def force_times(state: JobState) -> Iterator[datetime]:
    """When the others are due."""
    return (due for _, due in _hanging(state) if state.now < due)


def _was_forced(pod: Object) -> bool:
    """Whether it is deleted as far as Kubernetes is concerned, and only finalizers hold it."""
    metadata = pod["metadata"]
    return bool(metadata.get("finalizers")) and metadata.get("deletionGracePeriodSeconds") == 0


def _hanging(state: JobState) -> Iterator[tuple[Object, datetime]]:
    seconds = state.job.spec.run_policy.force_delete_pods_after_seconds
    if seconds is None:
        return
    for pod in state.pods:
        # The deletion timestamp includes the grace period.
        ends = time_of(pod["metadata"].get("deletionTimestamp"))
        if ends is None or not is_on_lost_node(pod) or _was_forced(pod):
            continue
        if _is_of_learner(state, pod) or kept_pods.is_kept(state, pod):
            yield pod, ends + timedelta(seconds=seconds)


def _is_of_learner(state: JobState, pod: Object) -> bool:
    """
    Whether a StatefulSet of the job controls the pod, or one that was deleted did.

    A StatefulSet that is deleted does not wait for its pods, but the next one of its name waits for them.
    """
    if labels(pod).get("diloco.dev/role") != "learner":
        return False
    owner = controller(pod)
    key = ("StatefulSet", str(owner.get("name", "")))
    if owner.get("uid") in _uids_of_sets(state):
        return True
    region = labels(pod).get("diloco.dev/region", "")
    ordinal = learner_pod_ordinal(pod["metadata"]["name"], state.job.metadata.name, region)
    return (
        owner.get("kind") == "StatefulSet"
        and key not in state.taken
        and region in {own.region.name for own in state.regions}
        and ordinal is not None
    )


def _uids_of_sets(state: JobState) -> set[str]:
    return {
        child["metadata"].get("uid", "")
        for child in state.children.values()
        if child["kind"] == "StatefulSet"
    }
