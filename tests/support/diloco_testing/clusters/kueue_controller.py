"""
Kueue's own controller in a local cluster, in the version that `tests/e2e/clusters/kueue/go.mod` names, and what
an administrator makes for it: queues with a quota, and priorities.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from diloco_testing.clusters import kueue
from diloco_testing.clusters.kubectl import Object, until
from diloco_testing.clusters.provision import Cluster, kueue_archive

NAMESPACE = "kueue-system"
NAME = "kueue-controller-manager"
FRAMEWORKS = ("pod", "statefulset")
"""Integrations: `statefulset`, which takes a learner as one entry, needs `pod`."""
UNTOUCHED = ("kube-system", NAMESPACE, "diloco-system")
"""Namespaces whose pods never wait."""
API = "kueue.x-k8s.io/v1beta2"
FLAVOR = "any"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
READY_SECONDS = 180.0
"""For the certificate of its webhooks too, which the kubelet gives it a minute after it is made."""


def install(cluster: Cluster) -> None:
    """Kueue's manifests with its controller; its webhooks answer."""
    archive = kueue_archive()
    cluster.load(archive)
    image = f"localhost/kueue:{archive.stem.removeprefix('kueue-')}"
    folder = kueue.source() / "config/default"
    objects = yaml.safe_load_all(cluster.kubectl("kustomize", str(folder)))
    made = [changed for item in objects if item and (changed := _for_tests(item, image))]
    # Client-side apply would not fit into an annotation. The namespace and the CRDs come first.
    for batch in (made[:1], made[1:]):
        _apply(cluster, batch)
    until(lambda: _is_ready(cluster), READY_SECONDS, expected="Kueue's controller is ready",
          details=lambda: _log(cluster))  # fmt: skip
    flavor = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": FLAVOR}}
    until(lambda: cluster.kubectl.apply(flavor), READY_SECONDS,
          expected="Kueue's webhooks answer", details=lambda: _log(cluster))  # fmt: skip


def _apply(cluster: Cluster, objects: list[Object]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


def _is_ready(cluster: Cluster) -> bool:
    found = cluster.kubectl.get("deployment", NAME, NAMESPACE) or {}
    return bool(found.get("status", {}).get("readyReplicas"))


def _log(cluster: Cluster) -> str:
    return cluster.kubectl("logs", "-n", NAMESPACE, f"deployment/{NAME}", "--tail=40")


def _for_tests(item: Object, image: str) -> Object | None:
    """One of Kueue's manifests, with our image and only what these tests need; None: left out."""
    kind = item["kind"]
    if kind == "APIService":
        # Lists of pending Workloads, which no test asks for: discovery would wait for them.
        return None
    if kind == "ConfigMap":
        ((file, text),) = item["data"].items()
        return {**item, "data": {file: json.dumps(_configuration(yaml.safe_load(text)))}}
    if kind == "Deployment":
        pod = item["spec"]["template"]["spec"]
        pod["containers"][0] |= {
            "image": image,
            "imagePullPolicy": "Never",
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        }
        pod["securityContext"]["runAsUser"] = 65532
    return item


def _configuration(defaults: Object) -> Object:
    namespaces = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": UNTOUCHED}
    return {
        **defaults,
        "leaderElection": {"leaderElect": False},
        "managedJobsNamespaceSelector": {"matchExpressions": [namespaces]},
        "integrations": {"frameworks": FRAMEWORKS},
    }


class Queue:
    """A LocalQueue of a namespace, with a ClusterQueue of the same name as the namespace."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        """Nothing is made yet."""
        self.cluster = cluster
        self.namespace = namespace
        self.name = name

    def resize(self, cpu: str) -> Queue:
        """Give it a quota of so many cores; made if it is not there."""
        quotas = {"cpu": cpu, "memory": "100Gi"}
        flavor = {
            "name": FLAVOR,
            "resources": [{"name": k, "nominalQuota": text} for k, text in quotas.items()],
        }
        self.cluster.kubectl.apply(
            {
                "apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": self.namespace},
                "spec": {
                    "namespaceSelector": {},
                    "preemption": {"withinClusterQueue": "LowerPriority"},
                    "resourceGroups": [{"coveredResources": list(quotas), "flavors": [flavor]}],
                },
            },
            {
                "apiVersion": API, "kind": "LocalQueue", "metadata": {"name": self.name},
                "spec": {"clusterQueue": self.namespace},
            },
            namespace=self.namespace,
        )  # fmt: skip
        return self

    def workloads(self) -> list[Object]:
        """The entries of its namespace."""
        return self.cluster.kubectl.list("workloads.kueue.x-k8s.io", self.namespace)

    def used(self) -> dict[str, str]:
        """Quota that is reserved, by resource."""
        found = self.cluster.kubectl.get("clusterqueue", self.namespace) or {}
        flavors = found.get("status", {}).get("flavorsReservation") or ()
        return {
            entry["name"]: entry["total"] for flavor in flavors for entry in flavor["resources"]
        }

    def delete(self) -> None:
        """The namespace takes the LocalQueue along; the ClusterQueue goes once nothing uses it."""
        self.cluster.kubectl.delete("clusterqueue", self.namespace, "", "--wait=false")


def priority(name: str, value: int) -> Object:
    """A WorkloadPriorityClass."""
    return {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name},
            "value": value, "description": name}  # fmt: skip


def pod(name: str, queue: str, priority_class: str, requests: dict[str, str]) -> Object:
    """A pod that waits in a queue, and then does nothing until it is deleted."""
    container: dict[str, Any] = {"name": "main", "image": "localhost/pause:1"}
    container |= {"imagePullPolicy": "Never", "resources": {"requests": requests}}
    labels = {QUEUE: queue, PRIORITY: priority_class}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}  # fmt: skip
