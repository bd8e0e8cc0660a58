"""
Kueue's CRDs in a cluster, from the Go module that `tests/e2e/clusters/kueue/go.mod` names, and what tests do
in the place of its controller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diloco_testing.clusters import go_modules
from diloco_testing.clusters.kubectl import Object, until
from diloco_testing.clusters.provision import Cluster

GATE = "kueue.x-k8s.io/admission"
JOB_UID = "kueue.x-k8s.io/job-uid"


def source() -> Path:
    """Folder of the module, downloaded the first time; AssertionError: it cannot be."""
    return go_modules.source("sigs.k8s.io/kueue", "kueue")


def apply_crds(cluster: Cluster) -> None:
    """Kueue's CRDs, without its webhooks: for tests in which nothing else acts on them."""
    # Client-side apply would not fit into an annotation.
    folder = source() / "config/components/crd/bases"
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(folder))
    # `kubectl wait` fails as long as a CRD has no conditions at all.
    until(
        lambda: cluster.kubectl.list("workloads.kueue.x-k8s.io") == [],
        30, expected="the API server serves Workloads",
    )  # fmt: skip


def workload_of(stateful_set: Object, queue: str) -> Object:
    """A Workload as Kueue makes it for a StatefulSet."""
    metadata, spec = stateful_set["metadata"], stateful_set["spec"]
    containers = [
        {"name": container["name"], "image": container["image"]}
        for container in spec["template"]["spec"]["containers"]
    ]
    pods = {"spec": {"containers": containers, "restartPolicy": "Always"}}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {
            "name": f"statefulset-{metadata['name']}",
            "namespace": metadata["namespace"],
            "labels": {JOB_UID: metadata["uid"]},
        },
        "spec": {
            "queueName": queue,
            "podSets": [{"name": "main", "count": spec["replicas"], "template": pods}],
        },
    }


def set_condition(cluster: Cluster, workload: Object, **entry: str) -> None:
    """Write one condition of a Workload, as Kueue's controller does."""
    metadata = workload["metadata"]
    conditions = [{"lastTransitionTime": "2026-01-01T00:00:00Z", **entry}]
    change = json.dumps({"status": {"conditions": conditions}})
    cluster.kubectl(
        "patch", "workload", metadata["name"], "-n", metadata["namespace"],
        "--subresource=status", "--type=merge", "-p", change,
    )  # fmt: skip


def make_gated_pods(cluster: Cluster, stateful_set: Object) -> None:
    """The pods of a StatefulSet, as its controller makes them and Kueue's webhook gates them."""
    make_pods(cluster, stateful_set, {"schedulingGates": [{"name": GATE}]})


def make_pods(
    cluster: Cluster, stateful_set: Object, fields: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """The pods of a StatefulSet, as its controller makes them, with these fields in their spec."""
    metadata, spec = stateful_set["metadata"], stateful_set["spec"]
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "controller": True}
    first = spec.get("ordinals", {}).get("start", 0)
    for ordinal in range(first, first + spec["replicas"]):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **spec["template"]["metadata"],
                "name": f"{metadata['name']}-{ordinal}",
                "ownerReferences": [{**owner, "name": metadata["name"], "uid": metadata["uid"]}],
            },
            "spec": {**spec["template"]["spec"], **fields},
        }
        cluster.kubectl.apply(pod, namespace=metadata["namespace"])


def admit(cluster: Cluster, pod: str, namespace: str) -> None:
    """Remove the scheduling gates of a pod, as Kueue's controller does; its containers are ready."""
    change = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
    cluster.kubectl("patch", "pod", pod, "-n", namespace, "--type=json", "-p", change)
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = json.dumps({"status": {"phase": "Running", "conditions": [ready]}})
    cluster.kubectl(
        "patch", "pod", pod, "-n", namespace, "--subresource=status", "--type=merge", "-p", status
    )
