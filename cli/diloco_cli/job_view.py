"""
What `diloco chaos --job` needs to know of a job in a cluster: who trains, in which pods, and whether it ended.

Pure: the DiLoCoJob and its pods in, one value out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_cli.fetch_pod import MAIN
from diloco_job import names

Object = Mapping[str, Any]

ENDS = ("Complete", "Failed", "Suspended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of the job in this cluster."""

    name: str
    uid: str
    problem: str
    """Why nothing can be done in it; "": its container runs."""
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A job as one cluster shows it."""

    step: int
    steps: int
    learners: tuple[str, ...]
    """All of the job, in the manifest's order."""
    here: tuple[str, ...]
    """Those of regions that have pods in this cluster."""
    pods: Mapping[str, tuple[Pod, ...]]
    """Learner → its pods, by rank."""
    size: int
    """Pods of a learner."""
    syncer: tuple[Pod, ...]
    """Its pods in this cluster: none if it is in another one, or does not run."""
    training: frozenset[str]
    """Of other clusters, as many as the syncer reports; which ones they are is not known."""
    end: str
    """Complete | Failed | Suspended; "": it continues."""
    message: str
    """Of the condition `end`."""
    restart_limit: int | None
    """runPolicy.learnerRestartLimit."""

    @property
    def serves(self) -> bool:
        """Whether the syncer of this cluster serves."""
        return any(pod.ready for pod in self.syncer)

    def targets(self, learner: str) -> tuple[tuple[Pod, ...], str]:
        """The pods of a learner, or why they cannot be disturbed."""
        return _usable(self.pods.get(learner, ()), self.size)

    def syncer_targets(self) -> tuple[tuple[Pod, ...], str]:
        """The pod of the syncer, or why it cannot be disturbed."""
        return _usable(tuple(pod for pod in self.syncer if not pod.problem) or self.syncer, 1)


def view(job: Object, pods: Iterable[Object]) -> View:
    """
    The view of a job.

    Args:
        job: the DiLoCoJob as the API server returns it.
        pods: those of the job in this cluster, of all roles.
    """
    name, spec, status = (
        str(job["metadata"]["name"]),
        job.get("spec") or {},
        job.get("status") or {},
    )
    size = int((spec.get("learner") or {}).get("podsPerLearner") or 1)
    regions = {str(region["name"]): int(region["learners"]) for region in spec.get("regions") or ()}
    found: dict[str, dict[int, Pod]] = {}
    syncer, seen = list[Pod](), set[str]()
    for entry in pods:
        labels = entry["metadata"].get("labels") or {}
        role, region = labels.get("diloco.dev/role"), str(labels.get("diloco.dev/region", ""))
        if role == "syncer":
            syncer.append(_pod(entry))
        elif role == "learner" and region in regions:
            ordinal = names.learner_pod_ordinal(str(entry["metadata"]["name"]), name, region)
            if ordinal is not None:
                seen.add(region)
                learner = names.learner_name(region, ordinal // size)
                found.setdefault(learner, {})[ordinal % size] = _pod(entry)
    learners = {
        region: tuple(names.learner_name(region, index) for index in range(count))
        for region, count in regions.items()
    }
    own = {
        learner: tuple(pod for _, pod in sorted(ranks.items())) for learner, ranks in found.items()
    }
    here = tuple(learner for region in learners if region in seen for learner in learners[region])
    training = {
        learner
        for learner in here
        if len(own.get(learner, ())) == size and all(pod.ready for pod in own[learner])
    }
    for region in status.get("regions") or ():
        if region.get("name") in learners and region["name"] not in seen:
            training.update(learners[region["name"]][: int(region.get("training") or 0)])
    end, message = _end(spec, status)
    limit = (spec.get("runPolicy") or {}).get("learnerRestartLimit")
    return View(
        step=int(status.get("step") or 0), steps=int(spec.get("steps") or 0),
        learners=tuple(learner for region in learners.values() for learner in region),
        here=here, pods=own, size=size, syncer=tuple(syncer), training=frozenset(training),
        end=end, message=message, restart_limit=None if limit is None else int(limit),
    )  # fmt: skip


def _end(spec: Object, status: Object) -> tuple[str, str]:
    for condition in status.get("conditions") or ():
        if condition.get("type") in ENDS and condition.get("status") == "True":
            return str(condition["type"]), str(condition.get("message") or "")
    if (spec.get("runPolicy") or {}).get("suspend"):
        return "Suspended", ""
    return "", ""


def _usable(pods: tuple[Pod, ...], size: int) -> tuple[tuple[Pod, ...], str]:
    if len(pods) < size:
        return (), "its pod is gone" if size == 1 else f"only {len(pods)} of its {size} pods exist"
    problem = next((pod.problem for pod in pods if pod.problem), "")
    return ((), problem) if problem else (pods, "")


def _pod(entry: Object) -> Pod:
    metadata, status = entry["metadata"], entry.get("status") or {}
    main: Object = next(
        (s for s in status.get("containerStatuses") or () if s.get("name") == MAIN), {}
    )
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or ()}
    problem = ""
    if "deletionTimestamp" in metadata:
        problem = f"pod {metadata['name']} is being deleted"
    elif "running" not in (main.get("state") or {}):
        problem = f"pod {metadata['name']} is {status.get('phase') or 'unknown'}, its container does not run"
    return Pod(
        name=str(metadata["name"]), uid=str(metadata.get("uid") or ""), problem=problem,
        ready=not problem and conditions.get("Ready") == "True",
    )  # fmt: skip
