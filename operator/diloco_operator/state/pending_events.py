"""
Pods that do not come: which objects are stuck, and what Kubernetes reports about them.

Pure. Quotas, admission, volumes and networks leave no trace in the status of a pod or a StatefulSet:
their controllers and the kubelet report in Events only. The Events of an object are read only while
it is stuck, so a job that runs costs no such request (`cluster.stuck_events`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from diloco_operator.state.objects import Object, controller_uid, labels
from diloco_operator.state.pods import node_since, waits_for_kubelet
from diloco_operator.state.previous_status import PreviousStatus, time_of

PENDING_SECONDS = 20.0
"""How long a component is not ready before the Events of its objects are read."""

LATE_SECONDS = 300.0
"""How long a component may start before that is a problem of its own."""

MAX_OBJECTS = 4
"""Objects of one job whose Events one reconcile reads."""

_PROGRESS = ("SuccessfulCreate", "Scheduled", "Pulling", "Pulled", "Created", "Started")
"""Reasons of Events after which a problem that was reported before is over. Others, such as SuccessfulAttachVolume
and SandboxChanged, may come between two Events about the same problem."""

_CONDITIONS = {"syncer": "SyncerReady", "learner": "LearnersReady"}
"""Role → the condition that reports its pods."""


def stuck_objects(
    job: Object, children: Iterable[Object], pods: Sequence[Object], now: datetime
) -> tuple[Object, ...]:
    """
    The objects of a job whose Events show why pods do not come, at most one per workload.

    Args:
        job: the DiLoCoJob; its status shows since when a component is not ready.
        children: its live children.
        pods: its live pods.
        now: wall clock, UTC.
    """
    previous, uid = PreviousStatus.of(job), job["metadata"].get("uid", "")
    found = (
        stuck
        for workload in children
        if workload["kind"] in ("StatefulSet", "Deployment")
        and controller_uid(workload) in ("", uid)
        and (
            is_late(previous, _condition(workload), now, PENDING_SECONDS)
            or _is_late_evaluator(workload, pods, now)
        )
        for stuck in _stuck(workload, pods)
    )
    return tuple(item for _, item in zip(range(MAX_OBJECTS), found, strict=False))


def is_late(previous: PreviousStatus, condition: str, now: datetime, seconds: float) -> bool:
    """Whether the condition has been False for this long while the job should run."""
    since = previous.false_since(condition)
    return since is not None and now - since >= timedelta(seconds=seconds)


def reported_problem(objects: Iterable[Object], events: Sequence[Object], former: str = "") -> str:
    """
    The warning about the first of these objects since its last progress; "": no problem is reported.

    Args:
        objects: in the order in which they matter.
        events: about those that are stuck.
        former: message of the condition as it was. The reason and message of an Event in it hold until there
            is another Event about the object, or it is no longer stuck: API servers keep Events for an hour.
    """
    for item in objects:
        kind, name = item["kind"], item["metadata"]["name"]
        where = f"pod {name}: " if kind == "Pod" else f"{kind} {name}: "
        newest = newest_event(item, events)
        if newest is not None and _is_warning(newest):
            return f"{where}{newest.get('reason', '')}: {newest.get('message', '')}"
        known = re.search(rf"{re.escape(where)}[A-Z]\w*: ", former)
        if newest is None and known is not None and _is_stuck(item):
            return former[known.start() :]
    return ""


def newest_event(item: Object, events: Iterable[Object]) -> Object | None:
    """Of the Events about this object, the last warning or progress; None: there is neither."""
    about = (event for event in events if _is_about(event, item) and _counts(event))
    # Of one second the warning: the time of an Event has no fractions.
    return max(about, key=lambda event: (_time(event), _is_warning(event)), default=None)


def deployment_problem(deployment: Object | None) -> str:
    """Why a Deployment has no pod, with the message from the API server; "": it has, or will have."""
    for entry in ((deployment or {}).get("status") or {}).get("conditions") or ():
        failed = entry.get("type") == "ReplicaFailure" and entry.get("status") == "True"
        # A deadline that passed shows less than what the pod itself reports.
        halted = entry.get("type") == "Progressing" and entry.get("status") == "False"
        if failed or (halted and entry.get("reason") != "ProgressDeadlineExceeded"):
            name = (deployment or {})["metadata"]["name"]
            return f"Deployment {name}: {entry.get('reason', '')}: {entry.get('message', '')}"
    return ""


def _condition(workload: Object) -> str:
    return _CONDITIONS.get(labels(workload).get("diloco.dev/role", ""), "")


def _is_late_evaluator(workload: Object, pods: Iterable[Object], now: datetime) -> bool:
    """Whether it is the evaluator, whose pod has waited for the kubelet: no condition is False meanwhile."""
    if labels(workload).get("diloco.dev/role") != "evaluator":
        return False
    waits = [node_since(pod) for pod in pods if _is_of(pod, workload) and waits_for_kubelet(pod)]
    return any(since and now - since >= timedelta(seconds=PENDING_SECONDS) for since in waits)


def _stuck(workload: Object, pods: Iterable[Object]) -> Iterator[Object]:
    """The workload if it lacks pods, else its first pod that waits for the kubelet."""
    status, spec = workload.get("status") or {}, workload.get("spec") or {}
    if status.get("observedGeneration", 0) < workload["metadata"].get("generation", 0):
        return
    mine = [pod for pod in pods if _is_of(pod, workload)]
    if workload["kind"] == "StatefulSet" and len(mine) < (spec.get("replicas") or 0):
        yield workload
        return
    waiting = filter(waits_for_kubelet, mine)
    yield from sorted(waiting, key=lambda pod: str(pod["metadata"]["name"]))[:1]


def _is_stuck(item: Object) -> bool:
    """Whether it is a pod that waits for the kubelet, or a workload that lacks pods."""
    if item["kind"] == "Pod":
        return waits_for_kubelet(item)
    status, spec = item.get("status") or {}, item.get("spec") or {}
    return (status.get("replicas") or 0) < (spec.get("replicas") or 0)


def _is_of(pod: Object, workload: Object) -> bool:
    if workload["kind"] == "StatefulSet":
        return controller_uid(pod) == str(workload["metadata"].get("uid"))
    return _component(pod) == _component(workload)


def _component(item: Object) -> tuple[str | None, str | None]:
    return labels(item).get("diloco.dev/role"), labels(item).get("diloco.dev/region")


def _is_about(event: Object, item: Object) -> bool:
    return bool((event.get("involvedObject") or {}).get("uid") == item["metadata"].get("uid"))


def _is_warning(event: Object) -> bool:
    return event.get("type") == "Warning"


def _counts(event: Object) -> bool:
    return _is_warning(event) or event.get("reason") in _PROGRESS


def _time(event: Object) -> datetime:
    """When it happened last; components report it in different fields."""
    fields: tuple[Any, ...] = (
        event.get("lastTimestamp"),
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("eventTime"),
    )
    times = [when for field in fields if (when := time_of(field)) is not None]
    return max(times, default=datetime.min.replace(tzinfo=UTC))
