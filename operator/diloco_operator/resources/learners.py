"""
A region's learners: StatefulSet, headless Service and PodDisruptionBudget `<job>-<region>`.

In a queue, each learner has a StatefulSet of its own, `<job>-<region>-<index>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diloco.spec import canonical
from diloco_job import names
from diloco_job.plan import learner_plan, process_env
from diloco_job.types import DiLoCoJob, LearnerPorts, Region
from diloco_operator.resources import common, inputs, pod_templates
from diloco_operator.resources.common import JobContext, child
from diloco_operator.resources.extra_metadata import Metadata
from diloco_operator.resources.operator_scope import tls_secret
from diloco_operator.resources.queue_labels import LEARNER, Queue
from diloco_operator.resources.template_record import record

ROLE = "learner"

POD_GROUP_VERSION = "scheduling.k8s.io/v1beta1"
"""Of Kubernetes 1.37; the alpha versions of 1.35 and 1.36 were removed."""

PEER = "peer"
"""Name of the port on which a learner answers others."""

GRACE_SECONDS = 60
"""Time to leave the job and write a checkpoint."""


def children(context: JobContext, region: Region) -> list[dict[str, Any]]:
    """The children of one region but its StatefulSets."""
    name = names.child_name(context.name, region.name)
    labels = common.labels(context, ROLE, region.name)
    select = common.selector(context, ROLE, region.name)
    service = {
        "clusterIP": "None",
        # The pods of a learner resolve each other's names before they are ready.
        "publishNotReadyAddresses": True,
        "selector": select,
        "ports": [
            {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
            for name, port in _service_ports(context.job).items()
        ],
    }
    budget = {
        "maxUnavailable": max_unavailable(context, region),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": select},
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
        *_pod_groups(context, region),
    ]


def _service_ports(job: DiLoCoJob) -> dict[str, int]:
    learner = job.spec.learner
    return {
        "metrics": learner.ports.metrics,
        **({PEER: learner.ports.peer} if learner.has_peers else {}),
    }


def _pod_groups(context: JobContext, region: Region) -> list[dict[str, Any]]:
    """One for each learner, if the job asks for it."""
    if context.sets.queue is None or not context.sets.queue.pod_groups:
        return []
    size = context.job.spec.learner.pods_per_learner
    return [
        child(
            context,
            api_version=POD_GROUP_VERSION,
            kind="PodGroup",
            name=names.learner_set_name(context.name, region.name, index),
            labels={**common.labels(context, ROLE, region.name), LEARNER: str(index)},
            body={"spec": {"schedulingPolicy": {"gang": {"minCount": size}}}},
        )
        for index in _indexes(context, region)
        if index < region.learners
    ]


def _indexes(context: JobContext, region: Region) -> list[int]:
    """The learners in a queue that have a StatefulSet of their own; of too many, those that have it already."""
    kept = context.sets.kept.get(region.name, frozenset())
    most = 0 if context.sets.too_many(context.regions) else region.learners
    return sorted(kept.union(range(most)))


def stateful_sets(context: JobContext, region: Region) -> Iterator[dict[str, Any]]:
    """One, or that of each learner; they share the parts of the pod template that are equal."""
    template = pod_templates.template(context, _parts(context, region))
    made_of = inputs.of_learners(context, region)
    indexes = (None,) if context.sets.queue is None else _indexes(context, region)
    for index in indexes:
        yield _stateful_set(context, region, index, template, made_of)


def _stateful_set(
    context: JobContext,
    region: Region,
    index: int | None,
    template: dict[str, Any],
    made_of: Mapping[str, Any],
) -> dict[str, Any]:
    """The StatefulSet of one learner, or of all learners of a region."""
    size, queue = context.job.spec.learner.pods_per_learner, context.sets.queue or Queue()
    if index is None:
        name, own, num_learners = names.child_name(context.name, region.name), {}, region.learners
    else:
        name = names.learner_set_name(context.name, region.name, index)
        own, num_learners = {LEARNER: str(index)}, int(index < region.learners)
        template = _queued(template, queue, own, set_name=name, first_ordinal=index * size)
    # Without an address, a learner would run standalone.
    runs = context.wanted.learners and bool(context.syncer_address)
    select = common.selector(context, ROLE, region.name)
    stateful_set = {
        "replicas": num_learners * size if runs else 0,
        # A pod has the same ordinal in both kinds of StatefulSet.
        **({"ordinals": {"start": index * size}} if index else {}),
        "serviceName": names.child_name(context.name, region.name),
        "podManagementPolicy": "Parallel",
        # The controller would replace the pods of a learner one by one: `decide.replacements`.
        "updateStrategy": {"type": "OnDelete" if has_units(context.job) else "RollingUpdate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": {**select, **own}},
        "template": template,
        **_volumes(context, runs=runs),
    }
    return child(
        context,
        api_version="apps/v1",
        kind="StatefulSet",
        name=name,
        labels={**common.labels(context, ROLE, region.name), **own, **queue.labels()},
        annotations={
            **record(made_of, template),
            **queue.annotations(size),
        },
        body={"spec": stateful_set},
    )


def template_bytes(context: JobContext, region: Region) -> int:
    """Size of the pod template of a region's learners, in bytes of JSON."""
    return len(canonical(pod_templates.template(context, _parts(context, region))).encode())


def _queued(
    template: Mapping[str, Any],
    queue: Queue,
    own: Mapping[str, str],
    *,
    set_name: str,
    first_ordinal: int,
) -> dict[str, Any]:
    """The pod template of one learner in a queue; what the user's podTemplate sets is kept."""
    metadata = template["metadata"]
    return {
        "metadata": {
            "labels": {**metadata["labels"], **own},
            "annotations": {**queue.pod_annotations(first_ordinal), **metadata["annotations"]},
        },
        "spec": {**queue.pod_fields(set_name), **template["spec"]},
    }


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
        "volumeClaimTemplates": claim_templates(context.job, context.extra_metadata),
        "persistentVolumeClaimRetentionPolicy": retention,
    }


def claim_templates(job: DiLoCoJob, extra: Metadata | None = None) -> list[dict[str, Any]]:
    """
    The volumeClaimTemplates of every region, which a StatefulSet never changes.

    Args:
        job: the job.
        extra: labels and annotations of the claims.
    """
    storage = job.spec.learner.storage
    if storage is None:
        return []
    # The StatefulSet adds its selector's labels to each claim.
    metadata: dict[str, Any] = {"name": pod_templates.STATE}
    if extra is not None and extra.labels:
        metadata["labels"] = dict(extra.labels)
    if extra is not None and extra.annotations:
        metadata["annotations"] = dict(extra.annotations)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": pod_templates.claim_spec(storage, storage.access_mode),
    }
    return [claim]


def max_unavailable(context: JobContext, region: Region) -> int:
    """
    Pods of a region that may be unavailable during drains.

    The learners beyond the quorum are divided among the regions by size: drains of different
    regions do not coordinate, but together they leave a quorum. At least 1, because a budget of 0
    would block every drain, and a waiting round loses nothing. A drain still waits while this many
    learners have no node to move to.

    A budget counts pods, and each evicted pod may belong to another learner. So this many pods are
    at most this many learners, however many pods a learner has.
    """
    spec = context.job.spec
    beyond = spec.num_learners - spec.sync.quorum
    return max(1, beyond * region.learners // max(1, spec.num_learners))


def _parts(context: JobContext, region: Region) -> pod_templates.Parts:
    learner = context.job.spec.learner
    planned = learner_plan(context.job, region, 0)
    limit = context.job.spec.run_policy.learner_restart_limit
    proxy = context.scope.proxy_to_syncer(context.job)
    rendezvous = learner.ports.rendezvous
    own_ports = has_units(context.job) and learner.ports != LearnerPorts()
    on_node = pod_templates.on_node(learner.pod_template, region.pod_template)
    env = {
        **process_env(
            context.plan,
            planned,
            syncer=context.syncer_address,
            spec_path=str(pod_templates.SPEC_PATH),
            state_dir=str(pod_templates.STATE_DIR),
            tls_dir=str(pod_templates.TLS_DIR) if tls_secret(context.job) else "",
            metrics_port=learner.ports.metrics,
        ),
        "DILOCO_REGION": region.name,
        "DILOCO_PODS_PER_LEARNER": str(learner.pods_per_learner),
        **({"DILOCO_RESTART_LIMIT": str(limit)} if limit is not None else {}),
        **({"DILOCO_SYNCER_PROXY": proxy} if proxy else {}),
        **({"DILOCO_RENDEZVOUS_PORT": str(rendezvous)} if own_ports else {}),
        **(_peer_env(context) if learner.has_peers else {}),
    }
    return pod_templates.Parts(
        role=ROLE,
        region=region.name,
        argv=planned.argv,
        image=learner.image or context.scope.worker_image,
        env=env,
        spec_map=context.learner_spec_map,
        user_env=tuple(learner.env),
        resources=pod_templates.as_fields(pod_templates.learner_resources(context.job, region)),
        templates=(learner.pod_template, region.pod_template),
        grace_seconds=GRACE_SECONDS,
        claim_for_each=learner.storage is not None,
        ports=learner.ports,
        # With the default ports, that of the probes keeps two pods from one node's network.
        extra_ports={
            **({"rendezvous": rendezvous} if own_ports else {}),
            # Declared in the network of a node, it would keep learners of two jobs from sharing one; so, the second
            # one does not answer others.
            **({PEER: learner.ports.peer} if learner.has_peers and not on_node else {}),
        },
    )


def _peer_env(context: JobContext) -> dict[str, str]:
    cluster = context.scope.region
    return {
        "DILOCO_PEER": f"0.0.0.0:{context.job.spec.learner.ports.peer}",
        # The names of pods are known in their cluster alone.
        **({"DILOCO_CLUSTER": cluster} if cluster else {}),
    }
