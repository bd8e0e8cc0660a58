"""
The pods of learners, syncer and evaluator: one container `main` whose first process is
`python3 -m diloco_operator.pod`, and the contract with it (environment, files, ports, probes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from diloco_operator import names
from diloco_operator.api import EnvVar, PodTemplate, Resources
from diloco_operator.manifests import common
from diloco_operator.manifests.common import Scope
from diloco_operator.manifests.overlay import lay, without_nulls
from diloco_operator.view import tls_secret

MAIN = "main"
"""Name of the container that is ours."""

SPEC_DIR = PurePosixPath("/etc/diloco/spec")
SPEC_FILE = "spec.json"
SPEC_PATH = SPEC_DIR / SPEC_FILE
STATE_DIR = PurePosixPath("/var/lib/diloco")
TLS_DIR = PurePosixPath("/etc/diloco/tls")

USER = 65532
"""Numeric user and group of every pod; the images' own user, so that no name has to be known."""

_READ_BY_GROUP = 0o440

_DEFAULT_ENV = {
    "HOME": "/tmp",  # noqa: S108 - the pod's own emptyDir
    "NUMBA_CACHE_DIR": "/tmp/numba",  # noqa: S108
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",  # noqa: S108
}
"""The root file system is read-only; unlike our other variables, the user may set these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What tells one kind of pod from another."""

    role: str
    region: str
    argv: tuple[str, ...]
    image: str
    env: Mapping[str, str]
    """Ours, without those that every pod has."""
    spec: str
    """Content of its spec.json."""
    user_env: tuple[EnvVar, ...] = ()
    resources: Mapping[str, Any]
    templates: tuple[PodTemplate, ...]
    """The user's, each laid over the ones before."""
    grace_seconds: int
    """From SIGTERM to SIGKILL."""
    claim: str = ""
    """PersistentVolumeClaim of its state; "": an emptyDir, which the user may replace."""
    ports: Mapping[str, int]
    """Besides metrics and health."""
    shared_memory: bool = True


def template(scope: Scope, parts: Parts) -> dict[str, Any]:
    """The pod template of a StatefulSet or Deployment."""
    pod: Any = _defaults(scope, parts)
    labels: dict[str, str] = {}
    annotations = {"kubectl.kubernetes.io/default-container": MAIN}
    for one in parts.templates:
        pod = lay(pod, without_nulls(one.spec))
        labels |= one.metadata.labels
        annotations |= one.metadata.annotations
    return {
        "metadata": {
            "labels": {**labels, **common.labels(scope, parts.role, parts.region)},
            "annotations": annotations,
        },
        "spec": lay(pod, _contract(scope, parts, _grace_seconds(pod, parts))),
    }


def said(resources: Resources) -> dict[str, Any]:
    """What a manifest says of resources, without what it leaves empty."""
    parts: dict[str, Any] = {
        # As text, as the API server keeps them: 1 and "1" would look like drift.
        "requests": {name: str(amount) for name, amount in resources.requests.items()},
        "limits": {name: str(amount) for name, amount in resources.limits.items()},
        "claims": without_nulls(resources.claims),
    }
    return {part: content for part, content in parts.items() if content}


def _grace_seconds(pod: Mapping[str, Any], parts: Parts) -> int:
    """What the user's templates leave of the grace period; the default where it is no number."""
    grace = pod.get("terminationGracePeriodSeconds")
    return grace if type(grace) is int and grace >= 0 else parts.grace_seconds


def _defaults(scope: Scope, parts: Parts) -> dict[str, Any]:
    """What the operator would do by itself; the user may change all of it."""
    view = scope.view
    main = {
        "name": MAIN,
        "image": parts.image,
        "imagePullPolicy": view.image_pull_policy,
        "env": [
            *({"name": name, "value": value} for name, value in _DEFAULT_ENV.items()),
            *(_variable(one) for one in parts.user_env),
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
    secrets = [{"name": name} for name in view.image_pull_secrets]
    return {
        "serviceAccountName": scope.name,
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
            {"name": "state", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            *([{"name": "shm", "emptyDir": {"medium": "Memory"}}] if parts.shared_memory else ()),
        ],
    }


def _contract(scope: Scope, parts: Parts, grace_seconds: int) -> dict[str, Any]:
    """What the container's first process relies on; laid over everything else."""
    secret = tls_secret(scope.job)
    ports = {**parts.ports, "metrics": common.METRICS_PORT, "health": common.HEALTH_PORT}
    main = {
        "name": MAIN,
        "command": ["python3", "-m", "diloco_operator.pod", parts.role],
        "args": ["--", *map(_literal, parts.argv)],
        "env": _env(scope, parts, grace_seconds),
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
        ],
        "volumeMounts": [
            {"name": "spec", "mountPath": str(SPEC_DIR), "readOnly": True},
            {"name": "state", "mountPath": str(STATE_DIR)},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            *([{"name": "shm", "mountPath": "/dev/shm"}] if parts.shared_memory else ()),  # noqa: S108
            *([{"name": "tls", "mountPath": str(TLS_DIR), "readOnly": True}] if secret else ()),
        ],
        "startupProbe": {"httpGet": {"path": "/startz", "port": "health"}},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health"}},
        "livenessProbe": {"httpGet": {"path": "/livez", "port": "health"}},
    }
    volumes: list[dict[str, Any]] = [
        {"name": "spec", "configMap": {"name": names.spec_name(scope.name, parts.spec)}}
    ]
    if parts.claim:
        volumes.append({"name": "state", "persistentVolumeClaim": {"claimName": parts.claim}})
    if secret:
        volumes.append({"name": "tls", "secret": _secret(secret)})
    return {"containers": [main], "volumes": volumes}


def _secret(name: str) -> dict[str, Any]:
    # By key: a pod waits for all three, and a CA's key that lies beside them is not handed out.
    items = [{"key": key, "path": key} for key in ("tls.crt", "tls.key", "ca.crt")]
    return {"secretName": name, "defaultMode": _READ_BY_GROUP, "items": items}


def _env(scope: Scope, parts: Parts, grace_seconds: int) -> list[dict[str, Any]]:
    plain = {
        **parts.env,
        "DILOCO_JOB": scope.name,
        "DILOCO_SPEC": str(SPEC_PATH),
        "DILOCO_STATE": str(STATE_DIR),
        **({"DILOCO_TLS": str(TLS_DIR)} if tls_secret(scope.job) else {}),
        "DILOCO_METRICS_PORT": str(common.METRICS_PORT),
        "DILOCO_HEALTH_PORT": str(common.HEALTH_PORT),
        "DILOCO_GRACE_SECONDS": str(grace_seconds),
        "DILOCO_LOG_FORMAT": "json",
    }
    return [
        *({"name": name, "value": _literal(value)} for name, value in plain.items()),
        {"name": "DILOCO_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "DILOCO_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
    ]


def _variable(one: EnvVar) -> dict[str, Any]:
    if one.value_from is not None:
        return {"name": one.name, "valueFrom": without_nulls(one.value_from)}
    # An empty text is left out by the API server, and would look like drift for ever.
    return {"name": one.name, "value": one.value} if one.value else {"name": one.name}


def _literal(text: str) -> str:
    """Text that Kubernetes hands over as it is: `$(NAME)` and `$$` mean something to it."""
    return text.replace("$", "$$")
