"""
cert-manager's CRDs in a cluster, from the Go module that `tests/e2e/clusters/cert-manager/go.mod` names, and what
tests do in the place of its controller.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from diloco_cli.authority import issue, new_authority, secret
from diloco_testing.clusters import go_modules
from diloco_testing.clusters.kubectl import Object, until
from diloco_testing.clusters.provision import Cluster

CERTIFICATES = "certificates.cert-manager.io"


def apply_crds(cluster: Cluster) -> None:
    """Its CRDs, without its webhooks."""
    folder = go_modules.source("github.com/cert-manager/cert-manager", "cert-manager")
    crds = [f"-f={path}" for path in sorted((folder / "deploy/crds").glob("*.yaml"))]
    assert crds, folder
    # Client-side apply would not fit into an annotation.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", *crds)
    # `kubectl wait` fails as long as a CRD has no conditions at all.
    until(
        lambda: cluster.kubectl.list(CERTIFICATES, "") is not None,
        30, expected="the API server serves Certificates",
    )  # fmt: skip


def make_secret(cluster: Cluster, certificate: Object) -> None:
    """The Secret of a Certificate, with the names and the metadata that it asks for, as cert-manager makes it."""
    spec, namespace = certificate["spec"], certificate["metadata"]["namespace"]
    [job] = {uri.split("/")[2] for uri in spec["uris"]}
    regions = [uri.rpartition("/region/")[2] for uri in spec["uris"]]
    now = datetime.now(UTC)
    authority = new_authority(job, now)
    issued = issue(
        authority, job=job, regions=regions, server_names=spec.get("dnsNames", ()), now=now
    )
    made = secret(spec["secretName"], namespace, issued, authority.bundle)
    template = spec["secretTemplate"]
    annotations = {"cert-manager.io/certificate-name": certificate["metadata"]["name"]}
    made["metadata"] |= template | {
        "annotations": {**template.get("annotations", {}), **annotations}
    }
    manager = "--field-manager=cert-manager-certificates-issuing"
    command = ("apply", "--server-side", "--force-conflicts", manager, "-n", namespace, "-f", "-")
    cluster.kubectl(*command, stdin=json.dumps(made))
