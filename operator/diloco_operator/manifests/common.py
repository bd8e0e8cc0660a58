"""
What all children have in common: the arguments of their makers, labels, selectors, metadata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.spec import canonical
from diloco_operator.api import API_VERSION, KIND, DiLoCoJob, Region
from diloco_operator.plan import Plan, learner_spec
from diloco_operator.view import View

APPLIED = "diloco.dev/applied"
"""Annotation of every child: 16 hex digits over its own content, so that a field that is no longer
wanted is seen as drift."""

SYNC_PORT = 7070
METRICS_PORT = 9090
HEALTH_PORT = 8080


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The DiLoCoJob object that children belong to."""

    namespace: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which pods should run now; what is not wanted stays, at 0 replicas."""

    learners: bool = True
    syncer: bool = True
    evaluator: bool = True
    volume: bool = True
    """The syncer's volume, and with it everything: False leaves no child at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What every maker of children is given."""

    job: DiLoCoJob
    plan: Plan
    owner: Owner
    view: View
    wanted: Wanted

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.metadata.name

    @property
    def regions(self) -> tuple[Region, ...]:
        """Regions whose learners are this operator's."""
        return self.view.own_regions(self.job)

    @property
    def has_syncer(self) -> bool:
        """Whether the syncer and the evaluator are this operator's."""
        return self.view.has_syncer(self.job)

    @property
    def syncer_address(self) -> str:
        """host:port to dial; "" where nobody says."""
        return self.view.syncer_address(self.job, self.owner.namespace)

    @property
    def spec(self) -> str:
        """Content of the syncer's and the evaluator's spec.json."""
        return self.plan.spec.to_json()

    @property
    def learner_spec(self) -> str:
        """Content of a learner's spec.json."""
        return learner_spec(self.plan.spec).to_json()


def labels(scope: Scope, component: str, region: str = "") -> dict[str, str]:
    """
    Labels of a child and of its pods.

    Args:
        scope: of the job.
        component: learner, syncer, evaluator, or shared for what has no role.
        region: where its pods are; "" for shared ones.
    """
    return {
        "app.kubernetes.io/name": "diloco",
        "app.kubernetes.io/instance": scope.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": scope.view.manager,
        "app.kubernetes.io/part-of": "diloco",
        "diloco.dev/job": scope.name,
        **({"diloco.dev/region": region, "diloco.dev/role": component} if region else {}),
    }


def selector(scope: Scope, role: str, region: str) -> dict[str, str]:
    """The labels that tell pods apart; a workload's selector can never change."""
    return {"diloco.dev/job": scope.name, "diloco.dev/region": region, "diloco.dev/role": role}


def child(
    scope: Scope,
    *,
    api_version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    body: Mapping[str, Any],
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A child object: metadata with the job as its owner, and `body` beside it."""
    annotations = dict(annotations or {})
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": scope.owner.namespace,
        "labels": dict(labels),
        "annotations": annotations,
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": scope.name,
                "uid": scope.owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    made = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
    annotations[APPLIED] = hashlib.sha256(canonical(made).encode()).hexdigest()[:16]
    return made
