"""
What pods tell: which learners are up, what keeps a pod from running, who has to give up.

Pure. Only the container `main` is ours; its first process leaves a JSON object as the container's
termination message when it ends for good (diloco_operator.pod).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.errors import EXIT_REFUSED
from diloco_operator import names
from diloco_operator.api import DiLoCoJob, Region
from diloco_operator.manifests.pods import MAIN
from diloco_operator.observed import Object, controller_uid
from diloco_operator.reasons import Verdict, say

_NO_IMAGE = ("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName")
_USUAL_WAITS = ("", "ContainerCreating", "PodInitializing")

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
_CRASH_CODES = {128 + getattr(signal, name) for name in _CRASHES}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPods:
    """One learner of an own region and the pods that form it."""

    name: str
    """"<region>/<index>"."""
    pods: tuple[Object, ...]
    """Those that exist, in the order of their ranks."""
    num_wanted: int

    @property
    def ready(self) -> bool:
        """All its pods are there and ready: it is registered with the syncer."""
        return len(self.pods) == self.num_wanted and all(map(is_ready, self.pods))

    @property
    def restarts(self) -> int:
        """Restarts of its containers by the kubelet."""
        return sum(_restarts(pod) for pod in self.pods)


def learners_of(
    job: DiLoCoJob, region: Region, pods: Iterable[Object], controllers: Iterable[str]
) -> tuple[LearnerPods, ...]:
    """
    The learners that a region should have, by index, with their pods.

    Args:
        job: the job.
        region: one of its regions.
        pods: pods of the job.
        controllers: uids of this job's own StatefulSets; pods of others do not count.
    """
    size = job.spec.learner.pods_per_learner
    stem, owners = names.child_name(job.metadata.name, region.name), frozenset(controllers)
    mine = {
        ordinal: pod
        for pod in pods
        if controller_uid(pod) in owners and (ordinal := _ordinal(pod, stem)) is not None
    }
    return tuple(
        LearnerPods(
            name=names.learner_name(region.name, index),
            pods=tuple(mine[at] for at in range(index * size, (index + 1) * size) if at in mine),
            num_wanted=size,
        )
        for index in range(region.learners)
    )


def is_ready(pod: Object) -> bool:
    """Ready, and not on its way out."""
    return not is_leaving(pod) and _condition(pod, "Ready").get("status") == "True"


def is_leaving(pod: Object) -> bool:
    """It is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_homeless(pod: Object) -> bool:
    """No node has room for it."""
    return _condition(pod, "PodScheduled").get("status") == "False"


def has_run(pod: Object) -> bool:
    """Its image was found: the container `main` was made at least once."""
    return bool(_main(pod).get("imageID"))


def trouble(pods: Iterable[Object]) -> str:
    """Which pod is stuck and why, and how many more are; "": none is."""
    said = [text for pod in sorted(pods, key=_name) if (text := _stuck(pod))]
    if not said:
        return ""
    return said[0] + (f" (and {len(said) - 1} more pods)" if len(said) > 1 else "")


def waiting(pods: Sequence[Object]) -> str:
    """What is there of pods that should be ready, in a few words."""
    if not pods:
        return "there is no pod yet"
    pod = min(pods, key=_name)
    if is_leaving(pod):
        return f"pod {_name(pod)} is being stopped"
    return f"pod {_name(pod)} is {(pod.get('status') or {}).get('phase', 'Pending')}, not ready"


def failure(learners: Iterable[LearnerPods], limit: int | None) -> Verdict | None:
    """
    The condition Failed, if a learner has to be given up.

    Evicted, preempted, deleted pods and lost nodes take their pod with them and count for nothing.

    Args:
        learners: of the own regions.
        limit: spec.runPolicy.learnerRestartLimit.
    """
    for learner in learners:
        for end in (end for pod in learner.pods for end in _ends(pod)):
            reason, message = _last_words(end)
            if end.get("exitCode") == EXIT_REFUSED:
                return say("Failed", "LearnerRefused", learner=learner.name, detail=message)
            if limit is None:
                continue
            if reason != "RestartLimit":
                if learner.restarts <= limit or not _is_own_fault(end):
                    continue
                # Who ended it the times before is not known any more.
                times = f"its container was restarted {learner.restarts} times"
                message = f"{times}, at last by its own fault: {message}"
            return say(
                "Failed", "LearnerRestartLimit", learner=learner.name, limit=limit, detail=message
            )
    return None


# ------------------------------------------------------------------------------ one pod


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _ordinal(pod: Object, stem: str) -> int | None:
    head, _, tail = _name(pod).rpartition("-")
    return int(tail) if head == stem and tail.isascii() and tail.isdigit() else None


def _condition(pod: Object, kind: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind), {})


def _containers(pod: Object) -> list[Mapping[str, Any]]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _main(pod: Object) -> Mapping[str, Any]:
    return next((one for one in _containers(pod) if one.get("name") == MAIN), {})


def _restarts(pod: Object) -> int:
    return int(_main(pod).get("restartCount") or 0)


def _ends(pod: Object) -> Iterator[Mapping[str, Any]]:
    """How `main` ended, now and the time before."""
    for state in ("state", "lastState"):
        end = (_main(pod).get(state) or {}).get("terminated")
        if end:
            yield end


def _last_words(end: Mapping[str, Any]) -> tuple[str, str]:
    """Reason and message that the container left, or what the kubelet says."""
    text = str(end.get("message") or "").strip()
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if isinstance(said, dict):
        return str(said.get("reason", "")), str(said.get("message") or "it left no message")
    return str(end.get("reason", "")), text or _ending(end)


def _ending(end: Mapping[str, Any]) -> str:
    code, reason = end.get("exitCode"), end.get("reason")
    return f"exit code {code}" + (f" ({reason})" if reason not in (None, "", "Error") else "")


def _is_own_fault(end: Mapping[str, Any]) -> bool:
    """As for processes of one machine: not leaving, not being killed from outside."""
    code = end.get("exitCode") or 0
    # What was killed for its memory ate too much; any other SIGKILL or SIGTERM came from outside.
    return end.get("reason") == "OOMKilled" or 0 < code < 128 or code in _CRASH_CODES


def _stuck(pod: Object) -> str:
    if is_leaving(pod) or is_ready(pod):
        return ""
    if is_homeless(pod):
        why = _condition(pod, "PodScheduled").get("message", "")
        return f"pod {_name(pod)} cannot be scheduled: {why}"
    for container in _containers(pod):
        wait = (container.get("state") or {}).get("waiting") or {}
        text = _wait_text(container, wait)
        if text:
            return f"pod {_name(pod)}: {text}"
    return ""


def _wait_text(container: Mapping[str, Any], wait: Mapping[str, Any]) -> str:
    """Why a container waits, in words that stay the same while the reason does."""
    reason = str(wait.get("reason") or "")
    if reason in _USUAL_WAITS:
        return ""
    if reason in _NO_IMAGE:
        return f"ImagePullBackOff: image {container.get('image')} cannot be pulled"
    if reason == "CrashLoopBackOff":
        end = (container.get("lastState") or {}).get("terminated") or {}
        return (
            f"CrashLoopBackOff: {container.get('name')} ends again and again: {_last_words(end)[1]}"
        )
    return f"{reason}: {wait.get('message', '')}".removesuffix(": ")
