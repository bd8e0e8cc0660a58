"""
A job's children as Kubernetes objects: everything this operator wants to exist, in full.

Pure and deterministic: equal arguments give equal objects, ready for server-side apply (every field
that is ours, no nulls, no status). Nothing of the chart or of the operator's version is in them, so
an upgrade changes none.
"""

from __future__ import annotations

from typing import Any

from diloco_operator import plan
from diloco_operator.api import DiLoCoJob
from diloco_operator.manifests import evaluator, learners, shared, syncer
from diloco_operator.manifests.common import APPLIED, Owner, Scope, Wanted
from diloco_operator.view import View

__all__ = ["APPLIED", "Owner", "Wanted", "desired"]


def desired(job: DiLoCoJob, owner: Owner, view: View, wanted: Wanted) -> tuple[dict[str, Any], ...]:
    """
    The children of a job that this operator should keep, in the order to apply them.

    ServiceAccount, ConfigMaps, Certificate, PersistentVolumeClaim, Services, PodDisruptionBudgets,
    Deployments, StatefulSets. What is not in it any more is to be removed.

    Args:
        job: a validated job.
        owner: the job's object in the cluster.
        view: what the operator was told.
        wanted: which of its pods should run now.
    """
    scope = Scope(job=job, plan=plan.plan(job), owner=owner, view=view, wanted=wanted)
    if not wanted.volume or not (scope.regions or scope.has_syncer):
        return ()
    made = [
        *shared.children(scope),
        *(syncer.children(scope) if scope.has_syncer else ()),
        *(evaluator.children(scope) if scope.has_syncer else ()),
        *(child for region in scope.regions for child in learners.children(scope, region)),
    ]
    return tuple(sorted(made, key=lambda child: _ORDER.index(child["kind"])))


_ORDER = (
    "ServiceAccount",
    "ConfigMap",
    "Certificate",
    "PersistentVolumeClaim",
    "Service",
    "PodDisruptionBudget",
    "Deployment",
    "StatefulSet",
)
