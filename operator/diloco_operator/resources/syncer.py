"""
The syncer: Deployment, Service and PersistentVolumeClaim `<job>-syncer`.
"""

from __future__ import annotations

from typing import Any

from diloco_job import names
from diloco_operator.resources import common, inputs, pod_templates
from diloco_operator.resources.common import JobContext, child
from diloco_operator.resources.template_record import record

ROLE = "syncer"

GRACE_SECONDS = 60
"""Time to write a last snapshot."""


def children(context: JobContext) -> list[dict[str, Any]]:
    """The syncer's children."""
    name, region = names.syncer_name(context.name), context.job.spec.syncer_region
    labels = common.labels(context, ROLE, region)
    select = common.selector(context, ROLE, region)
    syncer = context.job.spec.syncer
    template = pod_templates.template(context, _parts(context))
    deployment = {
        "replicas": 1 if context.wanted.syncer else 0,
        # Two syncers must never write to the same volume.
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": select},
        "template": template,
    }
    return [
        volume_claim(context),
        child(
            context,
            api_version="v1",
            kind="Service",
            name=name,
            labels=labels,
            annotations=syncer.service.annotations,
            body={"spec": _service(context, select)},
        ),
        child(
            context,
            api_version="apps/v1",
            kind="Deployment",
            name=name,
            labels=labels,
            annotations=record(inputs.of_syncer(context), template),
            body={"spec": deployment},
        ),
    ]


def volume_claim(context: JobContext) -> dict[str, Any]:
    """The claim for the syncer's volume."""
    region, storage = context.job.spec.syncer_region, context.job.spec.syncer.storage
    return child(
        context,
        api_version="v1",
        kind="PersistentVolumeClaim",
        name=names.syncer_name(context.name),
        labels=common.labels(context, ROLE, region),
        body={"spec": pod_templates.claim_spec(storage, "ReadWriteOnce")},
        owned=storage.when_deleted == "Delete",
    )


def _service(context: JobContext, select: dict[str, str]) -> dict[str, Any]:
    service = context.job.spec.syncer.service
    port = {"name": "sync", "port": service.port, "targetPort": "sync", "protocol": "TCP"}
    if service.type == "NodePort" and service.node_port:
        port["nodePort"] = service.node_port
    spec: dict[str, Any] = {"type": service.type, "selector": select, "ports": [port]}
    if service.ip_family_policy:
        spec["ipFamilyPolicy"] = service.ip_family_policy
    if service.type == "LoadBalancer":
        if service.load_balancer_class:
            spec["loadBalancerClass"] = service.load_balancer_class
        if service.load_balancer_source_ranges:
            spec["loadBalancerSourceRanges"] = service.load_balancer_source_ranges
    return spec


def _parts(context: JobContext) -> pod_templates.Parts:
    syncer = context.job.spec.syncer
    return pod_templates.Parts(
        role=ROLE,
        region=context.job.spec.syncer_region,
        argv=context.plan.syncer.argv,
        image=syncer.image or context.scope.syncer_image,
        env={"DILOCO_LISTEN": f"0.0.0.0:{syncer.ports.sync}"},
        spec_map=context.spec_map,
        resources=pod_templates.as_fields(syncer.resources),
        templates=(syncer.pod_template,),
        grace_seconds=GRACE_SECONDS,
        claim=names.syncer_name(context.name),
        ports=syncer.ports,
        extra_ports={"sync": syncer.ports.sync},
        shared_memory=False,
    )
