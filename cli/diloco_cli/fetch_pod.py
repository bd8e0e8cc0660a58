"""
The fetch pod: reads the syncer's volume of a job whose syncer does not run.

Pure. `volume_reader` starts it and deletes it. It is what the syncer is (image, users, ServiceAccount), but
mounts the volume read-only, and does nothing until `kubectl exec` runs a program in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_job import names
from diloco_job.types import API_VERSION, KIND

STATE = "/var/lib/diloco"
"""Mount path of the syncer's volume and of a learner's state."""

SPEC = "/etc/diloco/spec"
"""Mount path of the RunSpec."""

MAIN = "main"
"""The container in the pods of a job, and in this one."""

_IDLE = (
    "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit())\ntime.sleep({})"
)
"""As process 1 it would ignore SIGTERM without a handler."""

_RESOURCES = {
    "requests": {"cpu": "50m", "memory": "64Mi"},
    "limits": {"cpu": "1", "memory": "256Mi"},
}
"""Of both kinds, because a quota may ask for them."""

_SAME = (
    "serviceAccountName",
    "imagePullSecrets",
    "securityContext",
    "tolerations",
    "runtimeClassName",
)
"""Fields of the syncer's pod that decide whether a pod is admitted, starts, and may read the files."""

_WHERE = ("nodeSelector", "affinity")
"""The same, where no other pod holds the volume."""

_HOPELESS = (
    *("ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)

_ENDED = ("Succeeded", "Failed")

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the fetch pod may run now."""

    node: str = ""
    """Beside a pod that has the volume; "": anywhere."""
    wait: str = ""
    """Why it may not run yet: a node that it chose now could keep the syncer from starting."""


def syncer_runs(pods: Iterable[Object]) -> bool:
    """Whether one of the syncer's pods can run a command, and is not being deleted."""
    return any(
        _labels(pod).get("diloco.dev/role") == "syncer"
        and "deletionTimestamp" not in pod["metadata"]
        and is_running(pod)
        for pod in pods
    )


def place(job: str, deployment: Object, pods: Sequence[Object]) -> Placement:
    """
    Where the fetch pod may run: a ReadWriteOnce volume can be mounted on one node at a time.

    Args:
        job: its name.
        deployment: the syncer's, whose pod does not run.
        pods: of the namespace.
    """
    holders = [pod for pod in pods if _mounts(pod, names.syncer_name(job))]
    for pod in holders:
        if node := (pod.get("spec") or {}).get("nodeName"):
            return Placement(node=str(node))
    for pod in holders:
        text = f"pod {pod['metadata']['name']}, which mounts the volume, is not scheduled yet"
        return Placement(wait=": ".join(filter(None, [text, _unschedulable(pod)])))
    if (deployment.get("spec") or {}).get("replicas", 1):
        return Placement(wait="the syncer should run, but its Deployment has no pod")
    return Placement()


def why_no_volume(job: Object) -> str:
    """Why this cluster has no volume of the job."""
    claim = names.syncer_name(str(job["metadata"]["name"]))
    for condition in (job.get("status") or {}).get("conditions") or ():
        if (condition.get("type"), condition.get("reason")) == ("SyncerReady", "OtherRegion"):
            return f"{condition['message']}: run the command with that cluster's --context"
    return (
        f"the volume (PersistentVolumeClaim {claim}) no longer exists: with "
        "runPolicy.cleanupPolicy All, it is deleted when the job ends, and there is no other copy of the files"
    )


def fetch_pod(
    job: Object, deployment: Object, *, name: str, node: str, seconds: int
) -> dict[str, Any]:
    """
    The pod as an object to create.

    Args:
        job: the DiLoCoJob, its owner.
        deployment: the syncer's.
        name: of the pod.
        node: that it must run on; "": any.
        seconds: after which the kubelet ends it.
    """
    template = deployment["spec"]["template"]["spec"]
    main = next(entry for entry in template["containers"] if entry["name"] == MAIN)
    job_name = str(job["metadata"]["name"])
    owner = {
        **{"apiVersion": API_VERSION, "kind": KIND, "name": job_name},
        "uid": job["metadata"]["uid"],
        # Without a controller, it would stop a drain of its node.
        "controller": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            # None of diloco.dev: the job's Services, budgets and operator do not take it for theirs.
            "labels": {
                "app.kubernetes.io/name": "diloco",
                "app.kubernetes.io/instance": job_name,
                "app.kubernetes.io/component": "fetch",
                "app.kubernetes.io/managed-by": "diloco",
            },
            "ownerReferences": [owner],
        },
        "spec": {
            **{field: template[field] for field in _SAME if field in template},
            **_on(node, template),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": seconds,
            "terminationGracePeriodSeconds": 5,
            "containers": [_container(main, seconds)],
            "volumes": _volumes(job_name, template),
        },
    }


def is_running(pod: Object) -> bool:
    """Whether commands can be run in its container."""
    return "running" in (_main(pod).get("state") or {})


def failure(pod: Object) -> str:
    """Why it will never run, as Kubernetes reports it; "": it may."""
    status = pod.get("status") or {}
    if status.get("phase") in _ENDED or "deletionTimestamp" in pod["metadata"]:
        parts = [str(status.get(field) or "") for field in ("reason", "message")]
        return ": ".join(filter(None, parts)) or "it ended"
    wait = (_main(pod).get("state") or {}).get("waiting") or {}
    if wait.get("reason") in _HOPELESS:
        return f"{wait['reason']}: {wait.get('message', '')}".removesuffix(": ")
    return ""


def delay(pod: Object, events: Iterable[Object]) -> str:
    """What it waits for: the scheduler's message, else that of its newest warning; "": unknown."""
    if why := _unschedulable(pod):
        return why
    warnings = [event for event in events if event.get("type") == "Warning"]
    newest = max(warnings, key=lambda event: str(event.get("lastTimestamp") or ""), default=None)
    return f"{newest.get('reason', '')}: {newest.get('message', '')}" if newest else ""


def _container(main: Object, seconds: int) -> dict[str, Any]:
    same = ("image", "imagePullPolicy", "securityContext")
    return {
        "name": MAIN,
        **{field: main[field] for field in same if field in main},
        "command": ["python3", "-c", _IDLE.format(seconds)],
        "resources": _RESOURCES,
        # Only here: a claim that is attached read-only could not be attached to the syncer meanwhile,
        # nor could a file system that was not unmounted be repaired.
        "volumeMounts": [
            {"name": "state", "mountPath": STATE, "readOnly": True},
            {"name": "spec", "mountPath": SPEC, "readOnly": True},
        ],
    }


def _volumes(job: str, template: Object) -> list[dict[str, Any]]:
    claim = {"claimName": names.syncer_name(job)}
    spec = next(volume for volume in template["volumes"] if volume["name"] == "spec")
    return [
        {"name": "state", "persistentVolumeClaim": claim},
        {"name": "spec", "configMap": {"name": spec["configMap"]["name"], "optional": True}},
    ]


def _on(node: str, template: Object) -> dict[str, Any]:
    if not node:
        return {field: template[field] for field in _WHERE if field in template}
    # By the scheduler, which counts its resources; `nodeName` would go past it.
    match = {"key": "metadata.name", "operator": "In", "values": [node]}
    required = {"nodeSelectorTerms": [{"matchFields": [match]}]}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    }


def _mounts(pod: Object, claim: str) -> bool:
    ended = (pod.get("status") or {}).get("phase") in _ENDED
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return not ended and any(
        (volume.get("persistentVolumeClaim") or {}).get("claimName") == claim for volume in volumes
    )


def _unschedulable(pod: Object) -> str:
    for entry in (pod.get("status") or {}).get("conditions") or ():
        if entry.get("type") == "PodScheduled" and entry.get("status") == "False":
            return f"{entry.get('reason', '')}: {entry.get('message', '')}"
    return ""


def _labels(pod: Object) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _main(pod: Object) -> Mapping[str, Any]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((status for status in statuses if status.get("name") == MAIN), {})
