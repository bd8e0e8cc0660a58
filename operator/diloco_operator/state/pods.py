"""
The state of pods: which learners are ready, why a pod does not run, whether a learner failed.

Pure. Only the container `main` is ours; its first process (diloco_agent) writes a JSON object as the
container's termination message when it exits for the last time. Where it wrote none, the kubelet
puts the end of the log there (terminationMessagePolicy).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from diloco.errors import EXIT_REFUSED
from diloco.runtime.exits import is_crash, of_container
from diloco.runtime.formatting import printable, shorten
from diloco_job import names
from diloco_job.types import DiLoCoJob, Region
from diloco_operator.resources.pod_templates import MAIN
from diloco_operator.state.objects import Object, controller_uid, is_deleting, labels
from diloco_operator.state.previous_status import time_of, time_text

REVISION = "controller-revision-hash"
"""Label in which a StatefulSet's controller records the revision of a pod's template."""

_NO_IMAGE = ("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName")
_USUAL_WAITS = ("", "ContainerCreating", "PodInitializing")
_FINISHED = ("Failed", "Succeeded")

_MAX_MESSAGE, _MAX_LOG = 300, 500
"""Characters of a container's last message and of its log in a condition that has both."""

_HANGING_SECONDS = 60.0
"""A pod of a lost node that exists for so long after its grace period hangs; clocks differ."""

_SLOW_SECONDS = 300.0
"""The same where the node responds: a kubelet needs seconds, but to unmount a volume may take minutes."""

_RECOVERED_SECONDS = 600.0
"""A container that runs for so long does not exit again and again: the agent exits after ten exits of its
program, each within a minute."""

_FINAL = ("CrashLoop", "Refused")
"""Reasons with which the agent ends a container, because a restart has not helped."""

_MAX_FINALIZERS = 4
"""Finalizers that a message names."""

_LOST_NODES = 'see "Lost nodes" in docs/operations.md'

_UNREADY_SECONDS = 60.0
"""Rank 0 of a learner is unready within this time after another rank ended: the ranks notice a silent one
within 25 s, and the probe has to fail three times. It also covers the difference of two nodes' clocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPods:
    """One learner of an own region and the pods that form it."""

    name: str
    """"<region>/<index>"."""
    pods: tuple[Object, ...]
    """The existing ones, in the order of their ranks."""
    num_wanted: int

    @property
    def ready(self) -> bool:
        """Whether all its pods exist and are ready: the learner is registered with the syncer."""
        return len(self.pods) == self.num_wanted and all(map(is_ready, self.pods))

    @property
    def runs(self) -> bool:
        """Whether all its pods exist and run, ready or not."""
        return len(self.pods) == self.num_wanted and all(map(_is_running, self.pods))

    @property
    def waits(self) -> bool:
        """Whether it waits in a queue: the scheduler may not place one of its pods yet."""
        return any(map(is_gated, self.pods))

    def rank(self, pod: Object) -> int:
        """Rank of one of its pods."""
        return int(_name(pod).rpartition("-")[2]) % self.num_wanted

    @property
    def restarts(self) -> int:
        """How often the kubelet restarted its containers."""
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
    owners = frozenset(controllers)
    mine = {
        ordinal: pod
        for pod in pods
        if controller_uid(pod) in owners and _region(pod) in ("", region.name)
        if (ordinal := _ordinal(pod, job, region)) is not None
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
    """Whether the pod is ready and not terminating."""
    return not is_deleting(pod) and _is_ready(pod)


def is_gated(pod: Object) -> bool:
    """Whether the scheduler ignores the pod until a queue, for example, has admitted it."""
    return not is_deleting(pod) and bool((pod.get("spec") or {}).get("schedulingGates"))


def is_unschedulable(pod: Object) -> bool:
    """Whether no node fits the pod, or it is not to be scheduled yet."""
    return _condition(pod, "PodScheduled").get("status") == "False"


def has_finished(pod: Object) -> bool:
    """
    Whether the pod ended for good: its node evicted, rejected or shut it down, or its deadline has passed.

    Of a Deployment it remains beside the pod that replaces it, until Kubernetes has thousands of them.
    """
    return (pod.get("status") or {}).get("phase") in _FINISHED


def is_on_lost_node(pod: Object) -> bool:
    """
    Whether the control plane considers the pod's node lost, by what it wrote into the pod.

    It sets the condition Ready of each pod to False without a reason, which the kubelet always gives,
    and marks a pod that it deletes after its tolerations. A person's taint has the same mark: there the
    kubelet answers, and reports that the containers ended.
    """
    ready, disruption = _condition(pod, "Ready"), _condition(pod, "DisruptionTarget")
    abandoned = ready.get("status") in ("False", "Unknown") and not ready.get("reason")
    tainted = disruption.get("reason") == "DeletionByTaintManager"
    return abandoned or (tainted and not _has_ended(pod))


def waits_for_kubelet(pod: Object) -> bool:
    """Whether the pod has a node, but the kubelet has not created a container of it yet."""
    waits = [(status.get("state") or {}).get("waiting") for status in _containers(pod)]
    return (
        not is_deleting(pod)
        and not has_finished(pod)
        and _condition(pod, "PodScheduled").get("status") == "True"
        and all(wait is not None and wait.get("reason", "") in _USUAL_WAITS for wait in waits)
    )


def node_since(pod: Object) -> datetime | None:
    """When the pod got its node; None: it has none."""
    scheduled = _condition(pod, "PodScheduled")
    return (
        time_of(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None
    )


def has_run(pod: Object) -> bool:
    """Whether the container `main` was created at least once, so that its image can be pulled."""
    return bool(_main(pod).get("imageID"))


def lacks_image(pod: Object) -> bool:
    """Whether the image of the container `main` cannot be pulled."""
    waiting = (_main(pod).get("state") or {}).get("waiting") or {}
    return waiting.get("reason") in _NO_IMAGE


def pod_problem(pods: Iterable[Object], now: datetime) -> str:
    """Which pod cannot run, or does not end, and why, and how many others; "": none."""
    problems = [problem for pod in sorted(pods, key=_name) if (problem := _problem(pod, now))]
    if not problems:
        return ""
    more = f" (and {len(problems) - 1} more pods)" if len(problems) > 1 else ""
    return problems[0] + more


def failing_pod(pods: Iterable[Object], now: datetime) -> str:
    """
    Which pod's container keeps exiting and why; "": none.

    A container that has just been started again may run for minutes before its next exit: the problem
    lasts until one has run for longer.
    """
    for pod in sorted(pods, key=_name):
        main, end = _main(pod), _termination(pod, "lastState")
        running = (main.get("state") or {}).get("running")
        started = _started_at(running or {})
        recovered = running is not None and (
            started is None or now - started >= timedelta(seconds=_RECOVERED_SECONDS)
        )
        repeats = _restarts(pod) > 1 or _exit_message(end).reason in _FINAL
        if end and repeats and _is_crash(end) and not recovered and not is_deleting(pod):
            return f"pod {_name(pod)}: {_waiting_message(main, {'reason': 'CrashLoopBackOff'})}"
    return ""


def describe_unready(pods: Sequence[Object]) -> str:
    """The state of pods of which none is ready, in one short sentence."""
    if not pods:
        return "the pod does not exist yet"
    pod = min(pods, key=_name)
    if is_deleting(pod):
        return f"pod {_name(pod)} is terminating"
    return f"pod {_name(pod)} is {(pod.get('status') or {}).get('phase', 'Pending')}, not ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLearner:
    """A learner that ended for good and is not ready again."""

    learner: str
    reason: str
    """Of the condition Failed: LearnerRefused | LearnerNeverJoined | LearnerRestartLimit."""
    message: str
    log: tuple[str, ...]
    """Lines of its log before the message."""

    @property
    def message_and_log(self) -> str:
        """The message and the end of the log before it."""
        if not self.log:
            return self.message
        tail = printable(" | ".join(self.log))
        tail = tail if len(tail) <= _MAX_LOG else f"…{tail[1 - _MAX_LOG :]}"
        return f"{shorten(self.message, _MAX_MESSAGE)}; its log before that: {tail}"


def failed_learners(
    learners: Iterable[LearnerPods], limit: int | None, now: datetime
) -> tuple[FailedLearner, ...]:
    """
    The learners that ended permanently: exit code 78, a program that ended again and again without joining
    the job, or more crashes than the limit.

    A corrected manifest replaces the pod, and with it the evidence: the learner counts again. So
    does one that became ready since, even if it is unready again: without a syncer, none is ready.
    Evictions, preemptions, deletions and lost nodes remove the pod, so they do not count.

    Args:
        learners: of the own regions.
        limit: spec.runPolicy.learnerRestartLimit.
        now: wall clock, UTC.
    """
    ends = (_permanent_end(learner, limit, now) for learner in learners if not learner.ready)
    return tuple(end for end in ends if end is not None)


def _permanent_end(learner: LearnerPods, limit: int | None, now: datetime) -> FailedLearner | None:
    ends = [
        (_restarts(pod), end)
        for pod in learner.pods
        if not is_deleting(pod)
        for end in _terminations(learner, pod, now)
    ]
    for restarts, end in ends:
        reason, message, log = _exit_message(end)
        if end.get("exitCode") == EXIT_REFUSED:
            return FailedLearner(
                learner=learner.name, reason="LearnerRefused", message=message, log=log
            )
        if reason == "NeverJoined":
            return FailedLearner(
                learner=learner.name, reason="LearnerNeverJoined", message=message, log=log
            )
        if limit is None:
            continue
        if reason != "RestartLimit":
            # The agent counts crashes, also those of containers that were killed on a node that runs on.
            # Only where it does not run, the kubelet's count is all there is; it includes restarts of the node.
            if restarts <= limit or not _is_own_exit(end):
                continue
            message = (
                f"learner {learner.name} restarted {restarts} times, "
                f"spec.runPolicy.learnerRestartLimit is {limit} (the last time: {message})"
            )
        return FailedLearner(
            learner=learner.name, reason="LearnerRestartLimit", message=message, log=log
        )
    return None


# ------------------------------------------------------------------------------ one pod


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _is_ready(pod: Object) -> bool:
    return _condition(pod, "Ready").get("status") == "True"


def _is_running(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _region(pod: Object) -> str:
    return labels(pod).get("diloco.dev/region", "")


def _ordinal(pod: Object, job: DiLoCoJob, region: Region) -> int | None:
    return names.learner_pod_ordinal(_name(pod), job.metadata.name, region.name)


def _condition(pod: Object, kind: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((entry for entry in conditions if entry.get("type") == kind), {})


def _containers(pod: Object) -> list[Mapping[str, Any]]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _main(pod: Object) -> Mapping[str, Any]:
    return next((status for status in _containers(pod) if status.get("name") == MAIN), {})


def _has_ended(pod: Object) -> bool:
    """Whether its containers were created, and the kubelet reports that all of them ended."""
    states = [status.get("state") or {} for status in _containers(pod)]
    return bool(states) and all("terminated" in state for state in states)


def _restarts(pod: Object) -> int:
    return int(_main(pod).get("restartCount") or 0)


def _terminations(learner: LearnerPods, pod: Object, now: datetime) -> Iterator[Mapping[str, Any]]:
    """The current termination of `main`, and the last one if the learner was not ready after it."""
    if end := _termination(pod, "state"):
        yield end
    # The kubelet keeps it as long as the pod, whatever became of the next container.
    end = _termination(pod, "lastState")
    if end and not _was_ready_since(learner, pod, now):
        yield end


def _termination(pod: Object, state: str) -> Mapping[str, Any]:
    return (_main(pod).get(state) or {}).get("terminated") or {}


def _was_ready_since(learner: LearnerPods, pod: Object, now: datetime) -> bool:
    """Whether the learner was ready after the pod's container started that followed the last end."""
    state = _main(pod).get("state") or {}
    started = _started_at(state.get("running") or state.get("terminated") or {})
    if started is None:
        return False
    # Another rank than 0 is ready as soon as its program runs, and may end in the same way again.
    runs = learner.rank(pod) > 0 and _is_ready(pod)
    until = _ready_until(pod, now)
    if until is not None and until > started and not runs:
        return True
    first = next((_ready_until(peer, now) for peer in learner.pods if not learner.rank(peer)), None)
    return first is not None and first > started + timedelta(seconds=_UNREADY_SECONDS)


def _ready_until(pod: Object, now: datetime) -> datetime | None:
    """When the pod was ready for the last time; None: never, or not known."""
    if _is_ready(pod):
        return now
    main = _main(pod)
    states = [*(main.get("state") or {}).values(), *(main.get("lastState") or {}).values()]
    starts = [when for when in map(_started_at, states) if when is not None]
    changed = time_of(_condition(pod, "Ready").get("lastTransitionTime"))
    # Every pod begins unready: only a change after a container had started was one from ready.
    return changed if changed and starts and changed > min(starts) else None


def _started_at(state: Mapping[str, Any]) -> datetime | None:
    """When the container started that is, or ended, in this state."""
    return time_of(state.get("startedAt"))


class _ExitMessage(NamedTuple):
    reason: str
    message: str
    log: tuple[str, ...]
    """Lines of the log before the message."""


def _exit_message(end: Mapping[str, Any]) -> _ExitMessage:
    """What the container wrote, else the end of its log, else the kubelet's reason."""
    text = str(end.get("message") or "").strip()
    if written := _json_object(text):
        log = written.get("log")
        return _ExitMessage(
            str(written.get("reason", "")),
            str(written.get("message") or "no message"),
            tuple(map(str, log)) if isinstance(log, list) else (),
        )
    *log, message = [_logged(line) for line in text.splitlines() if line.strip()] or [""]
    cause = _exit_text(end)
    return _ExitMessage(
        str(end.get("reason", "")), f"{cause}: {message}" if message else cause, tuple(log)
    )


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _logged(line: str) -> str:
    """The message of a log line, which may be a JSON record."""
    return str(_json_object(line).get("message") or line.strip())


def _exit_text(end: Mapping[str, Any]) -> str:
    code, reason = end.get("exitCode"), end.get("reason")
    return f"exit code {code}" + (f" ({reason})" if reason not in (None, "", "Error") else "")


def _is_own_exit(end: Mapping[str, Any]) -> bool:
    """Whether the container exited by itself with an error: neither a signal nor the runtime ended it."""
    return of_container(end.get("exitCode") or 0) > 0


def _is_crash(end: Mapping[str, Any]) -> bool:
    # An OOM kill counts as the container's own; any other SIGKILL or SIGTERM came from outside.
    return end.get("reason") == "OOMKilled" or is_crash(of_container(end.get("exitCode") or 0))


def _problem(pod: Object, now: datetime) -> str:
    if is_deleting(pod):
        return _hanging(pod, now)
    if is_ready(pod) or is_gated(pod):
        return ""
    if is_on_lost_node(pod):
        return f"pod {_name(pod)}: its node {_node(pod)} does not respond; {_LOST_NODES}"
    if is_unschedulable(pod):
        scheduled = _condition(pod, "PodScheduled")
        if scheduled.get("reason") == "SchedulingGated":
            # A queue has just removed the gate, and the scheduler has not seen the pod since.
            return ""
        why = scheduled.get("message", "")
        return f"pod {_name(pod)} cannot be scheduled: {why}"
    for container in _containers(pod):
        wait = (container.get("state") or {}).get("waiting") or {}
        text = _waiting_message(container, wait)
        if text:
            return f"pod {_name(pod)}: {text}"
    return ""


def _hanging(pod: Object, now: datetime) -> str:
    """Why the pod still exists although its grace period has passed; "": it has not, or just now."""
    ends = time_of(pod["metadata"].get("deletionTimestamp"))
    most = _HANGING_SECONDS if is_on_lost_node(pod) else _SLOW_SECONDS
    if ends is None or now - ends < timedelta(seconds=most):
        return ""
    hangs = f"pod {_name(pod)} has been terminating since {time_text(ends)}"
    finalizers = pod["metadata"].get("finalizers")
    # After a deletion by force, only they hold it: nothing waits for the kubelet.
    forced = pod["metadata"].get("deletionGracePeriodSeconds") == 0
    if is_on_lost_node(pod) and not (finalizers and forced):
        return f"{hangs}: its node {_node(pod)} does not respond; {_LOST_NODES}"
    if finalizers:
        return f"{hangs}: finalizers {', '.join(map(str, finalizers[:_MAX_FINALIZERS]))}"
    return f"{hangs}: node {_node(pod)} does not report its end; {_LOST_NODES}"


def _node(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _waiting_message(container: Mapping[str, Any], wait: Mapping[str, Any]) -> str:
    """Why a container waits; the message changes only with the reason."""
    reason = str(wait.get("reason") or "")
    if reason in _USUAL_WAITS:
        return ""
    if reason in _NO_IMAGE:
        return f"ImagePullBackOff: image {container.get('image')} cannot be pulled"
    if reason == "CrashLoopBackOff":
        end = (container.get("lastState") or {}).get("terminated") or {}
        name = container.get("name")
        return f"CrashLoopBackOff: container {name} keeps exiting: {_exit_message(end).message}"
    return f"{reason}: {wait.get('message', '')}".removesuffix(": ")
