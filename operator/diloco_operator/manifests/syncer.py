"""
The syncer: Deployment, Service and PersistentVolumeClaim `<job>-syncer`.
"""

from __future__ import annotations

from typing import Any

from diloco_operator import names
from diloco_operator.manifests import common, pods
from diloco_operator.manifests.common import Scope, child
from diloco_operator.view import DEFAULT_IMAGE

ROLE = "syncer"

GRACE_SECONDS = 60
"""To write a last snapshot."""


def children(scope: Scope) -> list[dict[str, Any]]:
    """Everything of the syncer."""
    name, region = names.syncer_name(scope.name), scope.job.spec.syncer_region
    labels = common.labels(scope, ROLE, region)
    select = common.selector(scope, ROLE, region)
    syncer = scope.job.spec.syncer
    deployment = {
        "replicas": 1 if scope.wanted.syncer else 0,
        # Two syncers may never write to one volume.
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": select},
        "template": pods.template(scope, _parts(scope)),
    }
    default_image = {} if syncer.image else {DEFAULT_IMAGE: scope.view.syncer_image}
    return [
        child(
            scope,
            api_version="v1",
            kind="PersistentVolumeClaim",
            name=name,
            labels=labels,
            body={"spec": _claim(scope)},
        ),
        child(
            scope,
            api_version="v1",
            kind="Service",
            name=name,
            labels=labels,
            annotations=syncer.service.annotations,
            body={"spec": _service(scope, select)},
        ),
        child(
            scope,
            api_version="apps/v1",
            kind="Deployment",
            name=name,
            labels=labels,
            annotations=default_image,
            body={"spec": deployment},
        ),
    ]


def _claim(scope: Scope) -> dict[str, Any]:
    storage = scope.job.spec.syncer.storage
    named = storage.storage_class_name
    return {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(storage.size)}},
        **({"storageClassName": named} if named else {}),
    }


def _service(scope: Scope, select: dict[str, str]) -> dict[str, Any]:
    service = scope.job.spec.syncer.service
    port = {"name": "sync", "port": service.port, "targetPort": "sync", "protocol": "TCP"}
    if service.type == "NodePort" and service.node_port:
        port["nodePort"] = service.node_port
    return {"type": service.type, "selector": select, "ports": [port]}


def _parts(scope: Scope) -> pods.Parts:
    syncer = scope.job.spec.syncer
    return pods.Parts(
        role=ROLE,
        region=scope.job.spec.syncer_region,
        argv=scope.plan.syncer.argv,
        image=syncer.image or scope.view.syncer_image,
        env={"DILOCO_LISTEN": f"0.0.0.0:{common.SYNC_PORT}"},
        spec=scope.spec,
        resources=pods.said(syncer.resources),
        templates=(syncer.pod_template,),
        grace_seconds=GRACE_SECONDS,
        claim=names.syncer_name(scope.name),
        ports={"sync": common.SYNC_PORT},
        shared_memory=False,
    )
