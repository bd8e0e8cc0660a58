"""
What this operator was told, and which part of a job is therefore its own.

Pure. Everything that depends on where the operator stands (its region, the images of its chart)
comes from a `View`; two operators with equal views make equal children of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco_operator import names
from diloco_operator.api import DiLoCoJob, Region

MANAGER = "diloco-operator"

DEFAULT_IMAGE = "diloco.dev/default-image"
"""Annotation of a StatefulSet or Deployment: the view's image, where the manifest names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The operator's settings that children depend on."""

    region: str = ""
    """The region whose learners are its own; "": all regions are, and the syncer."""
    worker_image: str
    """For learners and the evaluator where the manifest names no image."""
    syncer_image: str
    """For the syncer where the manifest names no image."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the job's namespace."""
    cluster_domain: str = "cluster.local"

    @property
    def manager(self) -> str:
        """Field manager of children, and their label managed-by."""
        return f"{MANAGER}-{self.region}" if self.region else MANAGER

    def own_regions(self, job: DiLoCoJob) -> tuple[Region, ...]:
        """The job's regions whose learners this operator runs, in the manifest's order."""
        return tuple(one for one in job.spec.regions if self.region in ("", one.name))

    def has_syncer(self, job: DiLoCoJob) -> bool:
        """Whether this operator runs the job's syncer (and its evaluator)."""
        return self.region in ("", job.spec.syncer_region)

    def syncer_address(self, job: DiLoCoJob, namespace: str) -> str:
        """
        host:port that this operator's learners dial: the Service where the syncer is its own, else
        spec.syncer.endpoint. "": the manifest does not say where the syncer is.
        """
        if not self.has_syncer(job):
            return job.spec.syncer.endpoint
        name = names.syncer_name(job.metadata.name)
        return f"{name}.{namespace}.svc:{job.spec.syncer.service.port}"

    def as_made(self, children: Iterable[Mapping[str, Any]]) -> View:
        """
        This view with the default images that a job's running children were made with.

        A new chart brings new default images; with this they reach a job that runs only when its
        manifest names them, or after a suspension: an upgrade of the operator restarts nothing.

        Args:
            children: live objects of one job; those that want no pods do not count.
        """
        view = self
        for child in children:
            metadata = child.get("metadata") or {}
            image = (metadata.get("annotations") or {}).get(DEFAULT_IMAGE)
            if not image or not (child.get("spec") or {}).get("replicas"):
                continue
            if (metadata.get("labels") or {}).get("diloco.dev/role") == "syncer":
                view = replace(view, syncer_image=image)
            else:
                view = replace(view, worker_image=image)
        return view


def tls_secret(job: DiLoCoJob) -> str:
    """Name of the Secret with tls.crt, tls.key and ca.crt in the job's namespace; "": no TLS."""
    match job.spec.tls.mode:
        case "Secret":
            return job.spec.tls.secret_name
        case "CertManager":
            return names.tls_name(job.metadata.name)
        case _:
            return ""
