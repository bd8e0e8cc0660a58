"""
What the pods of a job share: ServiceAccount, the ConfigMaps with the RunSpec, the Certificate.
"""

from __future__ import annotations

from typing import Any

from diloco.tls import region_uri, server_name
from diloco_operator import names
from diloco_operator.manifests import common, pods
from diloco_operator.manifests.common import Scope, child


def children(scope: Scope) -> list[dict[str, Any]]:
    """Everything that is not of one role."""
    labels = common.labels(scope, "shared")
    account = child(
        scope,
        api_version="v1",
        kind="ServiceAccount",
        name=scope.name,
        labels=labels,
        body={"automountServiceAccountToken": False},
    )
    contents = [scope.spec] if scope.has_syncer else []
    contents += [scope.learner_spec] if scope.regions else []
    documents = [
        child(
            scope,
            api_version="v1",
            kind="ConfigMap",
            name=names.spec_name(scope.name, content),
            labels=labels,
            body={"immutable": True, "data": {pods.SPEC_FILE: content}},
        )
        for content in dict.fromkeys(contents)
    ]
    return [account, *documents, *_certificate(scope, labels)]


def _certificate(scope: Scope, labels: dict[str, str]) -> list[dict[str, Any]]:
    issuer = scope.job.spec.tls.issuer_ref
    if scope.job.spec.tls.mode != "CertManager" or issuer is None:
        return []
    name, host = names.tls_name(scope.name), server_name(scope.name)
    inside = f"{host}.{scope.owner.namespace}.svc"
    hosts = [host, inside, f"{inside}.{scope.view.cluster_domain}"] if scope.has_syncer else []
    spec = {
        "secretName": name,
        "issuerRef": {"name": issuer.name, "kind": issuer.kind, "group": issuer.group},
        "uris": [region_uri(scope.name, region.name) for region in scope.regions],
        **({"dnsNames": hosts} if hosts else {}),
        "usages": ["digital signature", "key encipherment", "server auth", "client auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
    }
    return [
        child(
            scope,
            api_version="cert-manager.io/v1",
            kind="Certificate",
            name=name,
            labels=labels,
            body={"spec": spec},
        )
    ]
