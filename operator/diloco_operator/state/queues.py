"""
Learners in a queue: which StatefulSets a job has for it, and how Kueue explains those that wait.

Pure. A learner waits while one of its pods has a scheduling gate: Kueue, like any other controller of
admission, gates pods when they are made. Kueue explains the wait in its Workload, never in the pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from diloco_operator.resources.extra_metadata import Metadata
from diloco_operator.resources.queue_labels import LEARNER, LearnerSets, queue_of_job, queue_of_set
from diloco_operator.state.objects import Object, controller_uid, labels
from diloco_operator.state.pods import LearnerPods, is_gated
from diloco_operator.state.previous_status import time_of

JOB_UID = "kueue.x-k8s.io/job-uid"
"""Label of a Workload: the uid of the object that is admitted with it."""

MAX_OWNERS = 8
"""Objects whose Workloads one reconcile reads."""


def learner_sets(job: Metadata, children: Iterable[Object]) -> LearnerSets:
    """
    The StatefulSets that a job should have.

    A queue begins and ends with a suspension: it decides which StatefulSets there are, so another one
    would replace every pod, and Kueue refuses to move what it admitted.

    Args:
        job: its labels and annotations.
        children: its live children.
    """
    live = [child for child in children if _is_of_learners(child)]
    running = [child for child in live if (child.get("spec") or {}).get("replicas")]
    wanted = queue_of_job(job)
    queue = queue_of_set(running[0]) if running else wanted
    if queue and wanted and queue.priority and wanted.priority:
        # Kueue accepts this at any time, and takes it when the learner enters the queue again.
        queue = replace(queue, priority=wanted.priority)
    kept: dict[str, set[int]] = {}
    for child in live:
        index, region = labels(child).get(LEARNER, ""), labels(child)["diloco.dev/region"]
        if index.isdecimal():
            kept.setdefault(region, set()).add(int(index))
    return LearnerSets(
        queue=queue, kept={region: frozenset(indexes) for region, indexes in kept.items()}
    )


def queued_uids(pods: Iterable[Object]) -> tuple[str, ...]:
    """
    uids of the objects whose Workloads show why pods wait.

    Kueue makes one for a StatefulSet, or, where a podTemplate has the queue's label, for a pod.
    """
    gated = sorted(filter(is_gated, pods), key=lambda pod: str(pod["metadata"]["name"]))
    uids = (uid for pod in gated for uid in _owners(pod) if uid)
    return tuple(dict.fromkeys(uids))[:MAX_OWNERS]


def kueue_message(learners: Sequence[LearnerPods], workloads: Iterable[Object]) -> str:
    """Why the first of these learners waits that has a message from Kueue; "": none has."""
    of_uid = {labels(workload).get(JOB_UID, ""): workload for workload in workloads}
    for learner in learners:
        uids = (uid for pod in learner.pods for uid in _owners(pod))
        messages = (_message(of_uid[uid]) for uid in uids if uid in of_uid)
        if message := next(filter(None, messages), ""):
            return message
    return ""


def last_scheduled(learners: Iterable[LearnerPods]) -> datetime | None:
    """When the last of their pods that have a node got it; None: none has one."""
    conditions = (
        entry
        for learner in learners
        for pod in learner.pods
        for entry in (pod.get("status") or {}).get("conditions") or ()
    )
    times = (
        time_of(entry.get("lastTransitionTime"))
        for entry in conditions
        if entry.get("type") == "PodScheduled" and entry.get("status") == "True"
    )
    return max((when for when in times if when is not None), default=None)


def _is_of_learners(child: Object) -> bool:
    return child["kind"] == "StatefulSet" and bool(labels(child).get("diloco.dev/region"))


def _owners(pod: Object) -> Iterator[str]:
    yield controller_uid(pod)
    yield str(pod["metadata"].get("uid", ""))


def _message(workload: Object) -> str:
    """The message of the first step of its admission that is not done."""
    conditions: Mapping[str, Object] = {
        str(entry.get("type")): entry
        for entry in (workload.get("status") or {}).get("conditions") or ()
    }
    for kind in ("QuotaReserved", "Admitted"):
        entry = conditions.get(kind, {})
        if entry.get("status") == "False":
            return str(entry.get("message") or entry.get("reason") or "")
    return ""
