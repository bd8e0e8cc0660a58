"""
What the pods of a job share: ServiceAccount, ConfigMaps with the RunSpec, Certificate.
"""

from __future__ import annotations

from typing import Any

from diloco.rpc.identity import learner_server_name, region_uri, server_name
from diloco_job import names
from diloco_operator.resources import common, pod_templates
from diloco_operator.resources.common import JobContext, child


def children(context: JobContext) -> list[dict[str, Any]]:
    """The children that belong to no single role."""
    labels = common.labels(context, "shared")
    account = child(
        context,
        api_version="v1",
        kind="ServiceAccount",
        name=context.name,
        labels=labels,
        body={"automountServiceAccountToken": False},
    )
    documents: dict[str, dict[str, Any]] = {}
    if context.has_syncer:
        # Not immutable: the numbers of learners in it change while the syncer runs.
        documents[context.spec_map] = {"data": {pod_templates.SPEC_FILE: context.spec}}
    if context.regions:
        content = {pod_templates.SPEC_FILE: context.learner_spec}
        documents[context.learner_spec_map] = {"immutable": True, "data": content}
    maps = [
        child(
            context, api_version="v1", kind="ConfigMap", name=name, labels=labels, body=body
        )
        for name, body in documents.items()
    ]  # fmt: skip
    return [account, *maps, *_certificate(context, labels)]


def _certificate(context: JobContext, labels: dict[str, str]) -> list[dict[str, Any]]:
    issuer = context.job.spec.tls.issuer_ref
    if context.job.spec.tls.mode != "CertManager" or issuer is None:
        return []
    name, host = names.tls_name(context.name), server_name(context.name)
    inside = f"{host}.{context.owner.namespace}.svc"
    hosts = [host, inside, f"{inside}.{context.scope.cluster_domain}"] if context.has_syncer else []
    if context.job.spec.learner.has_peers:
        hosts += [learner_server_name(context.name, region.name) for region in context.regions]
    spec = {
        "secretName": name,
        "secretTemplate": _secret_template(context),
        "issuerRef": {"name": issuer.name, "kind": issuer.kind, "group": issuer.group},
        "uris": [region_uri(context.name, region.name) for region in context.regions],
        **({"dnsNames": hosts} if hosts else {}),
        "usages": ["digital signature", "key encipherment", "server auth", "client auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
    }
    return [
        child(
            context,
            api_version="cert-manager.io/v1",
            kind="Certificate",
            name=name,
            labels=labels,
            body={"spec": spec},
        )
    ]


def _secret_template(context: JobContext) -> dict[str, Any]:
    """Metadata of the Secret, which cert-manager makes, and keeps when the Certificate is deleted."""
    extra = context.extra_metadata
    labels = {**extra.labels, "diloco.dev/job": context.name}  # so that it can be found then
    return {"labels": labels, **({"annotations": dict(a)} if (a := extra.annotations) else {})}
