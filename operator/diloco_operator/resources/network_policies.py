"""
The NetworkPolicies of a job, where the installation wants them: `<job>-syncer`, and `<job>-<region>` for the learners
of a region and for the evaluator, which runs in the syncer's region.

They restrict what reaches the pods, and nothing that the pods reach: learners read their data from
places that the operator does not know. A pod in the network of its node is beyond any NetworkPolicy.
"""

from __future__ import annotations

from typing import Any

from diloco_job import names
from diloco_job.types import Region
from diloco_operator.resources import common, learners, pod_templates, syncer
from diloco_operator.resources.common import JobContext, child
from diloco_operator.resources.operator_scope import NetworkPolicies


def children(context: JobContext, allowed: NetworkPolicies) -> list[dict[str, Any]]:
    """The policies of the pods that this operator runs."""
    region = context.job.spec.syncer_region
    own = [_of_syncer(context, allowed, region)] if context.has_syncer else []
    return own + [_of_learners(context, allowed, region) for region in context.regions]


def _of_syncer(context: JobContext, allowed: NetworkPolicies, region: str) -> dict[str, Any]:
    peers = [_pods_of(context), _operator(allowed)]
    clients = {} if _has_unknown_clients(context, allowed) else {"from": peers}
    select = {"matchLabels": common.selector(context, syncer.ROLE, region)}
    ingress = [{"ports": [_port("sync")], **clients}, *_observers(allowed)]
    return _policy(context, names.syncer_name(context.name), syncer.ROLE, region, select, ingress)


def _of_learners(context: JobContext, allowed: NetworkPolicies, region: Region) -> dict[str, Any]:
    labels = {"diloco.dev/job": context.name, "diloco.dev/region": region.name}
    others = {"key": "diloco.dev/role", "operator": "NotIn", "values": [syncer.ROLE]}
    select = {"matchLabels": labels, "matchExpressions": [others]}
    # The pods of a learner talk to each other on ports of their own choice.
    together = [{"from": [{"podSelector": select}]}] if _is_many_pods(context) else []
    # A learner without state asks others for that of their optimizers.
    known = {} if _are_on_nodes(context) else {"from": [_pods_of(context, learners.ROLE)]}
    asked = [{"ports": [_port(learners.PEER)], **known}] if _has_peers(context) else []
    ingress = [*together, *asked, *_observers(allowed)]
    name = names.child_name(context.name, region.name)
    return _policy(context, name, learners.ROLE, region.name, select, ingress)


def _policy(
    context: JobContext,
    name: str,
    role: str,
    region: str,
    select: dict[str, Any],
    ingress: list[dict[str, Any]],
) -> dict[str, Any]:
    spec = {"podSelector": select, "policyTypes": ["Ingress"], "ingress": ingress}
    return child(
        context,
        api_version="networking.k8s.io/v1",
        kind="NetworkPolicy",
        name=name,
        labels=common.labels(context, role, region),
        body={"spec": spec},
    )


def _observers(allowed: NetworkPolicies) -> list[dict[str, Any]]:
    """Who scrapes metrics, and the kubelet, whose address differs from cluster to cluster."""
    peers = {"from": [dict(peer) for peer in allowed.metrics_from]} if allowed.metrics_from else {}
    return [{"ports": [_port("metrics")], **peers}, {"ports": [_port("health")]}]


def _has_unknown_clients(context: JobContext, allowed: NetworkPolicies) -> bool:
    """
    Whether the syncer has clients whose addresses are not known here: other clusters, which mutual TLS
    authenticates, and pods in the network of their node, which no selector of pods matches.
    """
    endpoint = bool(context.job.spec.syncer.endpoint)
    return endpoint or allowed.operator_on_host_network or _are_on_nodes(context)


def _are_on_nodes(context: JobContext) -> bool:
    """Whether learners have the addresses of their nodes, which no selector of pods matches."""
    spec = context.job.spec
    regions = (region.pod_template for region in spec.regions)
    return pod_templates.on_node(spec.learner.pod_template, *regions)


def _has_peers(context: JobContext) -> bool:
    return context.job.spec.learner.has_peers


def _is_many_pods(context: JobContext) -> bool:
    return context.job.spec.learner.pods_per_learner > 1


def _pods_of(context: JobContext, role: str = "") -> dict[str, Any]:
    """Pods of the job, of this role if one is given."""
    own = {"diloco.dev/job": context.name, **({"diloco.dev/role": role} if role else {})}
    return {"podSelector": {"matchLabels": own}}


def _operator(allowed: NetworkPolicies) -> dict[str, Any]:
    namespace = {"kubernetes.io/metadata.name": allowed.operator_namespace}
    pod = {"app.kubernetes.io/part-of": "diloco", "app.kubernetes.io/component": "operator"}
    return {"namespaceSelector": {"matchLabels": namespace}, "podSelector": {"matchLabels": pod}}


def _port(name: str) -> dict[str, Any]:
    return {"port": name, "protocol": "TCP"}
