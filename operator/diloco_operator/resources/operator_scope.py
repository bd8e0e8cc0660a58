"""
The settings of an operator that children depend on, and the part of a job that it runs.

Pure. Everything that depends on the installation (region, the chart's images) comes from an
`OperatorScope`; operators with equal scopes build equal children of a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_job import names
from diloco_job.types import DiLoCoJob, Region
from diloco_operator.resources.extra_metadata import ExtraMetadata

MANAGER = "diloco-operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPolicies:
    """What the NetworkPolicies of all jobs allow besides the traffic within a job."""

    operator_namespace: str
    """From which the operator asks the syncer for its status."""
    operator_on_host_network: bool = False
    """The operator has the address of its node, which no selector of pods matches."""
    metrics_from: tuple[Mapping[str, Any], ...] = ()
    """Peers that may read metrics; (): every pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorScope:
    """Which part of each job an operator runs, and the defaults of its children."""

    region: str = ""
    """The cluster whose regions it runs, with the syncer if that is there; "": all regions."""
    worker_image: str
    """Default image of learners and the evaluator."""
    syncer_image: str
    """Default image of the syncer."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the job's namespace."""
    syncer_proxy: str = ""
    """http://host:port of the HTTP proxy between this cluster and syncers of others; "": none."""
    cluster_domain: str = "cluster.local"
    forbidden_pod_fields: tuple[str, ...] = ()
    """Fields that no podTemplate may set; see `decide.objections`."""
    extra_metadata: ExtraMetadata = field(default_factory=ExtraMetadata)
    """Labels and annotations of all children."""
    network_policies: NetworkPolicies | None = None
    """None: jobs have no NetworkPolicies."""

    @property
    def manager(self) -> str:
        """Field manager of children, and their label managed-by."""
        return f"{MANAGER}-{self.region}" if self.region else MANAGER

    def own_regions(self, job: DiLoCoJob) -> tuple[Region, ...]:
        """The job's regions whose learners this operator runs, in the manifest's order."""
        return tuple(
            region for region in job.spec.regions if self.region in ("", region.cluster_name)
        )

    def has_syncer(self, job: DiLoCoJob) -> bool:
        """Whether this operator runs the job's syncer (and its evaluator)."""
        return self.region in ("", job.spec.syncer_cluster)

    def proxy_to_syncer(self, job: DiLoCoJob) -> str:
        """The proxy through which this operator and its learners dial the syncer; "": none."""
        return "" if self.has_syncer(job) else self.syncer_proxy

    def syncer_address(self, job: DiLoCoJob, namespace: str) -> str:
        """
        host:port that this operator's learners dial: the Service if it runs the syncer, else
        spec.syncer.endpoint; "": the manifest has none.
        """
        if not self.has_syncer(job):
            return job.spec.syncer.endpoint
        name = names.syncer_name(job.metadata.name)
        return f"{name}.{namespace}.svc:{job.spec.syncer.service.port}"


def listed_regions(job: DiLoCoJob) -> str:
    """The job's regions for a message, such as "eu, eu-spot (cluster eu), us"."""
    return ", ".join(
        region.name
        if region.cluster_name == region.name
        else f"{region.name} (cluster {region.cluster_name})"
        for region in job.spec.regions
    )


def tls_secret(job: DiLoCoJob) -> str:
    """Name of the Secret with tls.crt, tls.key and ca.crt in the job's namespace; "": no TLS."""
    match job.spec.tls.mode:
        case "Secret":
            return job.spec.tls.secret_name
        case "CertManager":
            return names.tls_name(job.metadata.name)
        case _:
            return ""
