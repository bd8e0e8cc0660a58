"""
A region's learners: StatefulSet, headless Service and PodDisruptionBudget `<job>-<region>`.
"""

from __future__ import annotations

from typing import Any

from diloco_job import names
from diloco_job.plan import learner_plan, process_env
from diloco_job.types import DiLoCoJob, Region
from diloco_operator.resources import common, inputs, pods
from diloco_operator.resources.common import JobContext, child
from diloco_operator.resources.operator_scope import tls_secret
from diloco_operator.resources.template_record import record

ROLE = "learner"

GRACE_SECONDS = 60
"""Time to leave the job and write a checkpoint."""


def children(context: JobContext, region: Region) -> list[dict[str, Any]]:
    """The children of one region."""
    name = names.child_name(context.name, region.name)
    labels = common.labels(context, ROLE, region.name)
    select = common.selector(context, ROLE, region.name)
    service = {
        "clusterIP": "None",
        # The pods of a learner resolve each other's names before they are ready.
        "publishNotReadyAddresses": True,
        "selector": select,
        "ports": [
            {
                "name": "metrics",
                "port": common.METRICS_PORT,
                "targetPort": "metrics",
                "protocol": "TCP",
            }
        ],
    }
    budget = {
        "maxUnavailable": max_unavailable(context, region),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": select},
    }
    learner = context.job.spec.learner
    # Without an address, a learner would run standalone.
    runs = context.wanted.learners and bool(context.syncer_address)
    template = pods.template(context, _parts(context, region))
    stateful_set = {
        "replicas": region.learners * learner.pods_per_learner if runs else 0,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        # The controller would replace the pods of a learner one by one: `decide.replacements`.
        "updateStrategy": {"type": "OnDelete" if has_units(context.job) else "RollingUpdate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": select},
        "template": template,
        **_volumes(context, runs=runs),
    }
    return [
        child(
            context,
            api_version="v1",
            kind="Service",
            name=name,
            labels=labels,
            body={"spec": service},
        ),
        child(
            context,
            api_version="policy/v1",
            kind="PodDisruptionBudget",
            name=name,
            labels=labels,
            body={"spec": budget},
        ),
        child(
            context,
            api_version="apps/v1",
            kind="StatefulSet",
            name=name,
            labels=labels,
            annotations=record(inputs.of_learners(context, region), template),
            body={"spec": stateful_set},
        ),
    ]


def has_units(job: DiLoCoJob) -> bool:
    """Whether several pods form a learner, so that they must be replaced together."""
    return job.spec.learner.pods_per_learner > 1


def _volumes(context: JobContext, *, runs: bool) -> dict[str, Any]:
    storage = context.job.spec.learner.storage
    if storage is None:
        return {}
    retention = {
        "whenDeleted": storage.when_deleted,
        # A suspension is no removal of learners.
        "whenScaled": storage.when_scaled if runs else "Retain",
    }
    return {
        "volumeClaimTemplates": claim_templates(context.job),
        "persistentVolumeClaimRetentionPolicy": retention,
    }


def claim_templates(job: DiLoCoJob) -> list[dict[str, Any]]:
    """The volumeClaimTemplates of every region, which a StatefulSet never changes."""
    storage = job.spec.learner.storage
    if storage is None:
        return []
    # The StatefulSet adds its selector's labels to each claim.
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": pods.STATE},
        "spec": pods.claim_spec(storage, storage.access_mode),
    }
    return [claim]


def max_unavailable(context: JobContext, region: Region) -> int:
    """
    Pods of a region that may be unavailable during drains.

    The learners beyond the quorum are divided among the regions by size: drains of different
    regions do not coordinate, but together they leave a quorum. At least 1: a drain must not block,
    and a waiting round loses nothing.

    A budget counts pods, and each evicted pod may belong to another learner. So this many pods are
    at most this many learners, however many pods a learner has.
    """
    spec = context.job.spec
    beyond = spec.num_learners - spec.sync.quorum
    return max(1, beyond * region.learners // max(1, spec.num_learners))


def _parts(context: JobContext, region: Region) -> pods.Parts:
    learner = context.job.spec.learner
    planned = learner_plan(context.job, region, 0)
    limit = context.job.spec.run_policy.learner_restart_limit
    env = {
        **process_env(
            context.plan,
            planned,
            syncer=context.syncer_address,
            spec_path=str(pods.SPEC_PATH),
            state_dir=str(pods.STATE_DIR),
            tls_dir=str(pods.TLS_DIR) if tls_secret(context.job) else "",
            metrics_port=common.METRICS_PORT,
        ),
        "DILOCO_REGION": region.name,
        "DILOCO_PODS_PER_LEARNER": str(learner.pods_per_learner),
        **({"DILOCO_RESTART_LIMIT": str(limit)} if limit is not None else {}),
    }
    return pods.Parts(
        role=ROLE,
        region=region.name,
        argv=planned.argv,
        image=learner.image or context.scope.worker_image,
        env=env,
        spec_map=context.learner_spec_map,
        user_env=tuple(learner.env),
        resources=pods.as_fields(pods.learner_resources(context.job, region)),
        templates=(learner.pod_template, region.pod_template),
        grace_seconds=GRACE_SECONDS,
        claim_for_each=learner.storage is not None,
        ports={},
    )
