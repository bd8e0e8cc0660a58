"""The operator in a cluster: images loaded, chart installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_testing.clusters.images import Image
from diloco_testing.clusters.provision import ROOT, Cluster

CHART = ROOT / "charts/diloco"
NAMESPACE = "diloco-system"
RELEASE = "diloco"
CLUSTER_ROLE = f"{RELEASE}:{NAMESPACE}"
"""The operator's, as the chart names it."""
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
"""Labels of a namespace that takes only pods with restricted Pod Security."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What the operator, syncers and learners of a session run."""

    operator: Image
    syncer: Image
    worker: Image
    """The chart's worker image: the small image on local clusters, the real image on given clusters."""
    pod_fields: Mapping[str, Any] = field(default_factory=dict)
    """podTemplate.spec for pods of `worker`."""


def load(cluster: Cluster, *images: Image) -> None:
    """Give a local cluster's node these images; a given cluster has them."""
    for image in images:
        if image.archive is not None:
            cluster.load(image.archive)


def install(
    cluster: Cluster,
    images: Images,
    *flags: str,
    chart: Path = CHART,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    **values: Any,
) -> None:
    """
    `helm upgrade --install`, and wait until the operator is ready.

    Args:
        cluster: where; it has the images.
        images: for the chart's values.
        flags: more flags for helm.
        chart: its folder.
        release: its name.
        namespace: the operator's; made if it is not there.
        values: more of the chart's values, nested.
    """
    chosen = {"operator": images.operator, "syncer": images.syncer, "worker": images.worker}
    chart_values = {
        "images": {"pullPolicy": "IfNotPresent", **{k: _value(v) for k, v in chosen.items()}},
        "rbac": {"tlsSecrets": True},
        **values,
    }
    labelled = {"name": namespace, "labels": RESTRICTED}
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": labelled})
    path = Path(cluster.kubeconfig).parent / f"values-{release}.json"
    if not cluster.local:
        path = Path(f"{cluster.kubeconfig}.{release}.values.json")
    path.write_text(json.dumps(chart_values))
    cluster.helm(
        "upgrade", "--install", release, str(chart), "--namespace", namespace,
        "--values", str(path), "--wait", "--timeout", "3m", *flags,
    )  # fmt: skip


def _value(image: Image) -> dict[str, str]:
    repository, _, tag = image.name.rpartition(":")
    return {"repository": repository, "tag": tag}
