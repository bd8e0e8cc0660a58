"""
The queue of a job, and what a queueing system reads of each learner.

Pure. The entry of a learner in the queue is its own StatefulSet
(docs/adr/0021-a-learner-is-an-entry-in-the-queue.md): Kueue admits the pods of one StatefulSet
together or not at all, and Volcano makes a PodGroup of them. Without a queueing system, the operator makes one for
the scheduler of Kubernetes, if the job asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_job.names import MAX_QUEUED
from diloco_job.types import Region
from diloco_operator.resources.extra_metadata import Metadata

LEARNER = "diloco.dev/learner"
"""Label of a learner's own StatefulSet and of its pods: its index in the region."""

KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of the job: the LocalQueue."""

KUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
"""Label of the job: the WorkloadPriorityClass."""

KUEUE_OFFSET = "kueue.x-k8s.io/pod-index-offset"
"""Annotation of a pod: the ordinal of the first pod of its workload, for scheduling by topology."""

VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
"""Annotation of the job: the Queue."""

VOLCANO_MIN_MEMBER = "scheduling.volcano.sh/group-min-member"
"""Annotation of a StatefulSet: how many of its pods must be schedulable before one is scheduled."""

VOLCANO_SCHEDULER = "volcano"

POD_GROUPS = "diloco.dev/pod-groups"
"""Annotation of the job and of its learners' StatefulSets, with the value "true": each learner is a PodGroup of
scheduling.k8s.io, of which the scheduler places all pods or none."""


def asks_for_pod_groups(item: Mapping[str, Any]) -> bool:
    """Whether a job, or a StatefulSet of its learners, has the annotation for PodGroups."""
    return (item["metadata"].get("annotations") or {}).get(POD_GROUPS) == "true"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Where the learners of a job wait to be admitted: one of three systems."""

    kueue: str = ""
    """LocalQueue of Kueue in the job's namespace."""
    priority: str = ""
    """WorkloadPriorityClass of Kueue."""
    volcano: str = ""
    """Queue of Volcano."""
    pod_groups: bool = False
    """The scheduler of Kubernetes, which has no queues."""

    def labels(self) -> dict[str, str]:
        """Labels of a learner's StatefulSet."""
        found = {KUEUE_QUEUE: self.kueue, KUEUE_PRIORITY: self.priority if self.kueue else ""}
        return {key: text for key, text in found.items() if text}

    def annotations(self, num_pods: int) -> dict[str, str]:
        """Annotations of a learner's StatefulSet of so many pods."""
        found = {
            VOLCANO_MIN_MEMBER: str(num_pods) if self.volcano else "",
            POD_GROUPS: "true" if self.pod_groups else "",
        }
        return {key: text for key, text in found.items() if text}

    def pod_annotations(self, first_ordinal: int) -> dict[str, str]:
        """Annotations of its pods, the first of which has this ordinal."""
        offset = str(first_ordinal) if self.kueue and first_ordinal else ""
        found = {KUEUE_OFFSET: offset, VOLCANO_QUEUE: self.volcano}
        return {key: text for key, text in found.items() if text}

    def pod_fields(self, set_name: str) -> dict[str, Any]:
        """Fields of their spec; a PodGroup has the name of the StatefulSet."""
        group = {"schedulingGroup": {"podGroupName": set_name}}
        volcano = {"schedulerName": VOLCANO_SCHEDULER}
        return {**(volcano if self.volcano else {}), **(group if self.pod_groups else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSets:
    """Which StatefulSets a job's learners have."""

    queue: Queue | None = None
    """Each learner has its own, as an entry of this queue; None: each region has one."""
    kept: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Region → indexes of the learners whose StatefulSets exist. One that is taken out of its region keeps its
    StatefulSet with 0 replicas: what happens to its volumes is then spec.learner.storage.whenScaled."""

    def too_many(self, regions: Iterable[Region]) -> bool:
        """
        Whether these regions need more StatefulSets in a queue than there may be.

        A job that an earlier version made with more learners is not refused while it does not grow.
        """
        if self.queue is None:
            return False
        num_learners = num_missing = 0
        regions = tuple(regions)
        for region in regions:
            kept = self.kept.get(region.name, frozenset())
            num_learners += region.learners
            num_missing += region.learners - sum(index < region.learners for index in kept)
        # The highest index alone shows nothing about those below it: anyone may have set that label.
        return num_learners > MAX_QUEUED and (self.grows(regions) or num_missing > MAX_QUEUED)

    def grows(self, regions: Iterable[Region]) -> bool:
        """Whether one of these regions needs StatefulSets beyond those that it has, in a queue."""
        return self.queue is not None and any(
            region.learners > max(self.kept.get(region.name, ()), default=-1) + 1
            for region in regions
        )

    def num_sets(self, region: Region) -> int:
        """How many StatefulSets the region has, with those that are kept."""
        if self.queue is None:
            return 1
        return len(self.kept.get(region.name, frozenset()).union(range(region.learners)))


def queue_of_job(metadata: Metadata) -> Queue | None:
    """The queue that the job's labels and annotations name; None: its learners do not wait."""
    kueue = metadata.labels.get(KUEUE_QUEUE, "")
    volcano = metadata.annotations.get(VOLCANO_QUEUE, "")
    queue = Queue(
        kueue=kueue,
        priority=metadata.labels.get(KUEUE_PRIORITY, ""),
        volcano=volcano,
        # Volcano has a scheduler and PodGroups of its own.
        pod_groups=metadata.annotations.get(POD_GROUPS) == "true" and not volcano,
    )
    return queue if kueue or volcano or queue.pod_groups else None


def queue_of_set(stateful_set: Mapping[str, Any]) -> Queue | None:
    """The queue that a live StatefulSet of learners was made for; None: that of a whole region."""
    metadata = stateful_set["metadata"]
    labels = metadata.get("labels") or {}
    if LEARNER not in labels:
        return None
    template = (stateful_set.get("spec") or {}).get("template") or {}
    pods = (template.get("metadata") or {}).get("annotations") or {}
    return Queue(
        kueue=labels.get(KUEUE_QUEUE, ""),
        priority=labels.get(KUEUE_PRIORITY, ""),
        volcano=pods.get(VOLCANO_QUEUE, ""),
        pod_groups=asks_for_pod_groups(stateful_set),
    )
