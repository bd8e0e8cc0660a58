"""
The kinds that the operator reads or writes, and where the API server serves them.
"""

from __future__ import annotations

from typing import NamedTuple

from diloco_operator.resources.learners import POD_GROUP_VERSION


class Kind(NamedTuple):
    """Where the API server serves a kind."""

    api_version: str
    plural: str

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The resource's path; namespace "": all namespaces."""
        root = "/apis" if "/" in self.api_version else "/api"
        parts = [root, self.api_version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


KINDS = {
    "DiLoCoJob": Kind("diloco.dev/v1alpha1", "dilocojobs"),
    "StatefulSet": Kind("apps/v1", "statefulsets"),
    "Deployment": Kind("apps/v1", "deployments"),
    "Service": Kind("v1", "services"),
    "ConfigMap": Kind("v1", "configmaps"),
    "PersistentVolumeClaim": Kind("v1", "persistentvolumeclaims"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "Certificate": Kind("cert-manager.io/v1", "certificates"),
    "Pod": Kind("v1", "pods"),
    "Secret": Kind("v1", "secrets"),
    "Event": Kind("v1", "events"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
    "PodGroup": Kind(POD_GROUP_VERSION, "podgroups"),
    "Workload": Kind("kueue.x-k8s.io/v1beta2", "workloads"),
}
NEEDED_KINDS = ("StatefulSet", "Deployment", "Service", "ConfigMap", "PersistentVolumeClaim")
"""Kinds of children on which decisions depend: a job of which they cannot be read is left as it is."""
OTHER_KINDS = ("ServiceAccount", "PodDisruptionBudget")
"""The other kinds of which every job has children. Some jobs have NetworkPolicies, Certificates and PodGroups."""
CHILD_KINDS = (*NEEDED_KINDS, *OTHER_KINDS)
