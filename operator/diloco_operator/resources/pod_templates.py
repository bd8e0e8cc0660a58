"""
The pods of learners, syncer and evaluator: one container `main` whose first process is
`python3 -m diloco_agent`, and the contract with it (environment, files, ports, probes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from diloco_job.types import DiLoCoJob, EnvVar, PodTemplate, Ports, Region, Resources, Storage
from diloco_operator.resources import common
from diloco_operator.resources.common import JobContext
from diloco_operator.resources.operator_scope import tls_secret
from diloco_operator.resources.overlay import overlay, without_nulls

MAIN = "main"
"""Name of the container that is ours."""

SPEC_VOLUME = "spec"
SPEC_DIR = PurePosixPath("/etc/diloco/spec")
SPEC_FILE = "spec.json"
SPEC_PATH = SPEC_DIR / SPEC_FILE
STATE_DIR = PurePosixPath("/var/lib/diloco")
STATE = "state"
"""Name of the volume that is mounted there."""
TLS_DIR = PurePosixPath("/etc/diloco/tls")

USER = 65532
"""Numeric user and group of every pod, the same as in the images."""

_READ_BY_GROUP = 0o440

_DEFAULT_ENV = {
    "HOME": "/tmp",  # noqa: S108 - the pod's own emptyDir
    "NUMBA_CACHE_DIR": "/tmp/numba",  # noqa: S108
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",  # noqa: S108
}
"""The root file system is read-only; unlike other DILOCO variables, the user may set these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What differs between the pods of learners, syncer and evaluator."""

    role: str
    region: str
    argv: tuple[str, ...]
    image: str
    env: Mapping[str, str]
    """Variables of this role; every pod has others as well."""
    spec_map: str
    """Name of the ConfigMap with its spec.json."""
    user_env: tuple[EnvVar, ...] = ()
    resources: Mapping[str, Any]
    templates: tuple[PodTemplate, ...]
    """The user's, each over the previous ones."""
    grace_seconds: int
    """From SIGTERM to SIGKILL."""
    claim: str = ""
    """PersistentVolumeClaim for its state; "": an emptyDir, which the user may replace."""
    claim_for_each: bool = False
    """The StatefulSet has a claim for the state of each pod, so the template has no such volume."""
    state_path: str = "$(DILOCO_POD)"
    """Directory on a volume that pods share, for the state of one pod; Kubernetes expands it."""
    ports: Ports
    extra_ports: Mapping[str, int] = field(default_factory=dict)
    """Besides metrics and health."""
    shared_memory: bool = True


def template(context: JobContext, parts: Parts) -> dict[str, Any]:
    """The pod template of a StatefulSet or Deployment."""
    pod: Any = _defaults(context, parts)
    extra = context.extra_metadata
    labels = dict(extra.labels)
    annotations = {**extra.annotations, "kubectl.kubernetes.io/default-container": MAIN}
    for user_template in parts.templates:
        pod = overlay(pod, without_nulls(user_template.spec))
        labels |= user_template.metadata.labels
        annotations |= user_template.metadata.annotations
    spec = overlay(pod, _contract(context, parts, pod))
    if parts.claim_for_each and isinstance(spec["volumes"], list):
        spec["volumes"] = [volume for volume in spec["volumes"] if not _is_state(volume)]
    return {
        "metadata": {
            "labels": {**labels, **common.labels(context, parts.role, parts.region)},
            "annotations": annotations,
        },
        "spec": spec,
    }


def claim_spec(storage: Storage, access_mode: str) -> dict[str, Any]:
    """The spec of a PersistentVolumeClaim."""
    storage_class = storage.storage_class_name
    return {
        "accessModes": [access_mode],
        "resources": {"requests": {"storage": str(storage.size)}},
        **({"storageClassName": storage_class} if storage_class else {}),
    }


def as_fields(resources: Resources) -> dict[str, Any]:
    """A manifest's resources as fields of a container, without empty ones."""
    parts: dict[str, Any] = {
        # As text, as the API server stores them: 1 and "1" would look like drift.
        "requests": {name: str(amount) for name, amount in resources.requests.items()},
        "limits": {name: str(amount) for name, amount in resources.limits.items()},
        "claims": without_nulls(resources.claims),
    }
    return {part: content for part, content in parts.items() if content}


def learner_resources(job: DiLoCoJob, region: Region) -> Resources:
    """The region's own resources, else those of all learners."""
    return region.resources if as_fields(region.resources) else job.spec.learner.resources


def on_node(*templates: PodTemplate) -> bool:
    """Whether pods with one of these templates are in the network of their node."""
    return any(template.spec.get("hostNetwork") for template in templates)


def _grace_seconds(pod: Mapping[str, Any], parts: Parts) -> int:
    """The grace period after the user's templates; the default where it is not a number."""
    grace = pod.get("terminationGracePeriodSeconds")
    return grace if type(grace) is int and grace >= 0 else parts.grace_seconds


def _defaults(context: JobContext, parts: Parts) -> dict[str, Any]:
    """The operator's defaults; the user may change all of them."""
    scope = context.scope
    main = {
        "name": MAIN,
        "image": parts.image,
        "imagePullPolicy": scope.image_pull_policy,
        # The agent writes why it exits for good; a container that was killed leaves its log's tail.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": [
            *({"name": name, "value": value} for name, value in _DEFAULT_ENV.items()),
            *map(_variable, parts.user_env),
        ],
        **({"resources": dict(parts.resources)} if parts.resources else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "startupProbe": {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 300},
        "readinessProbe": {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {"periodSeconds": 20, "timeoutSeconds": 5, "failureThreshold": 6},
    }
    secrets = [{"name": name} for name in scope.image_pull_secrets]
    return {
        "serviceAccountName": context.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": parts.grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"imagePullSecrets": secrets} if secrets else {}),
        "containers": [main],
        "volumes": [
            {"name": STATE, "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            *([{"name": "shm", "emptyDir": {"medium": "Memory"}}] if parts.shared_memory else ()),
        ],
    }


def _contract(context: JobContext, parts: Parts, pod: Mapping[str, Any]) -> dict[str, Any]:
    """What the container's first process relies on; overrides everything else."""
    grace_seconds = _grace_seconds(pod, parts)
    secret = tls_secret(context.job)
    own = parts.ports
    ports = {**parts.extra_ports, "metrics": own.metrics, "health": own.health}
    main = {
        "name": MAIN,
        "command": ["python3", "-m", "diloco_agent", parts.role],
        "args": ["--", *map(_literal, parts.argv)],
        "env": _env(context, parts, grace_seconds),
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
        ],
        "volumeMounts": [
            {"name": SPEC_VOLUME, "mountPath": str(SPEC_DIR), "readOnly": True},
            _state_mount(parts, pod),
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *([{"name": "shm", "mountPath": "/dev/shm"}] if parts.shared_memory else ()),  # noqa: S108
            *([{"name": "tls", "mountPath": str(TLS_DIR), "readOnly": True}] if secret else ()),
        ],
        "startupProbe": {"httpGet": {"path": "/startz", "port": "health"}},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health"}},
        "livenessProbe": {"httpGet": {"path": "/livez", "port": "health"}},
    }
    volumes: list[dict[str, Any]] = [{"name": SPEC_VOLUME, "configMap": {"name": parts.spec_map}}]
    if parts.claim:
        volumes.append({"name": STATE, "persistentVolumeClaim": {"claimName": parts.claim}})
    if secret:
        volumes.append({"name": "tls", "secret": _secret(secret)})
    return {"containers": [main], "volumes": volumes}


def _state_mount(parts: Parts, pod: Mapping[str, Any]) -> dict[str, Any]:
    mount = {"name": STATE, "mountPath": str(STATE_DIR)}
    volumes = pod.get("volumes")
    found = [volume for volume in volumes if _is_state(volume)] if isinstance(volumes, list) else []
    # A volume of the user's own is one for all pods: each gets a directory of it.
    shared = any(not {"emptyDir", "ephemeral"} & volume.keys() for volume in found)
    if parts.claim or parts.claim_for_each or not shared:
        return mount
    return {**mount, "subPathExpr": parts.state_path}


def _is_state(volume: Any) -> bool:
    return isinstance(volume, Mapping) and volume.get("name") == STATE


def _secret(name: str) -> dict[str, Any]:
    # Listed by key: a pod waits for all three, and the key of an authority in the same Secret stays private.
    items = [{"key": key, "path": key} for key in ("tls.crt", "tls.key", "ca.crt")]
    return {"secretName": name, "defaultMode": _READ_BY_GROUP, "items": items}


def _env(context: JobContext, parts: Parts, grace_seconds: int) -> list[dict[str, Any]]:
    plain = {
        **parts.env,
        "DILOCO_JOB": context.name,
        "DILOCO_SPEC": str(SPEC_PATH),
        "DILOCO_STATE": str(STATE_DIR),
        **({"DILOCO_TLS": str(TLS_DIR)} if tls_secret(context.job) else {}),
        "DILOCO_METRICS_PORT": str(parts.ports.metrics),
        "DILOCO_HEALTH_PORT": str(parts.ports.health),
        "DILOCO_GRACE_SECONDS": str(grace_seconds),
        "DILOCO_LOG_FORMAT": "json",
    }
    return [
        *({"name": name, "value": _literal(value)} for name, value in plain.items()),
        {"name": "DILOCO_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "DILOCO_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
    ]


def _variable(variable: EnvVar) -> dict[str, Any]:
    name, value = variable.name, variable.value
    if variable.value_from is not None:
        return {"name": name, "valueFrom": without_nulls(variable.value_from)}
    # The API server omits an empty value, which would look like drift forever.
    return {"name": name, "value": value} if value else {"name": name}


def _literal(text: str) -> str:
    """Text that Kubernetes passes on unchanged: it expands `$(NAME)` and `$$`."""
    return text.replace("$", "$$")
