"""
What all children share: the context they are built from, labels, selectors, metadata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.spec import canonical
from diloco_job import names
from diloco_job.plan import SharedPlan
from diloco_job.types import API_VERSION, KIND, DiLoCoJob, Region
from diloco_operator.resources.extra_metadata import Metadata
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.resources.queue_labels import LearnerSets

_KEPT = {"argocd.argoproj.io/sync-options": "Prune=false,Delete=false"}
"""Annotation of a child that stays after its job: by the label app.kubernetes.io/instance, Argo CD may take it
for an object of its application that is no longer wanted, because it has no owner."""

APPLIED = "diloco.dev/applied"
"""Annotation of every child: a hash of its content (16 hex digits), so that a field which is no
longer desired shows as drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The DiLoCoJob object that children belong to."""

    namespace: str
    uid: str
    metadata: Metadata = field(default_factory=Metadata)
    """Its labels and annotations, of which children may inherit some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which components should run now; the others keep their objects, with 0 replicas."""

    learners: bool = True
    syncer: bool = True
    evaluator: bool = True
    volume: bool = True
    """The syncer's volume; without it, the job has no children at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What every child is built from."""

    job: DiLoCoJob
    plan: SharedPlan
    owner: Owner
    scope: OperatorScope
    wanted: Wanted
    spec: str
    """Content of the syncer's and the evaluator's spec.json."""
    learner_spec: str
    """Content of a learner's spec.json."""
    sets: LearnerSets
    """The StatefulSets of the learners."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.metadata.name

    @property
    def regions(self) -> tuple[Region, ...]:
        """Regions whose learners this operator runs."""
        return self.scope.own_regions(self.job)

    @property
    def has_syncer(self) -> bool:
        """Whether this operator runs the syncer and the evaluator."""
        return self.scope.has_syncer(self.job)

    @property
    def extra_metadata(self) -> Metadata:
        """Labels and annotations of every child and its pods, besides the operator's own."""
        return self.scope.extra_metadata.of_children(self.owner.metadata)

    @property
    def spec_map(self) -> str:
        """
        Name of the ConfigMap with `spec`.

        It does not depend on the numbers of learners, which the syncer reads while it runs.
        """
        fixed = replace(self.plan.spec, learners={})
        return names.spec_name(self.name, "syncer " + fixed.to_json())

    @property
    def learner_spec_map(self) -> str:
        """Name of the ConfigMap with `learner_spec`."""
        return names.spec_name(self.name, self.learner_spec)

    @property
    def syncer_address(self) -> str:
        """host:port to dial; "": the manifest has none."""
        return self.scope.syncer_address(self.job, self.owner.namespace)


def labels(context: JobContext, component: str, region: str = "") -> dict[str, str]:
    """
    Labels of a child and of its pods.

    Args:
        scope: of the job.
        component: learner, syncer, evaluator, or shared.
        region: of its pods; "" for shared children.
    """
    return {
        "app.kubernetes.io/name": "diloco",
        "app.kubernetes.io/instance": context.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": context.scope.manager,
        "app.kubernetes.io/part-of": "diloco",
        "diloco.dev/job": context.name,
        **({"diloco.dev/region": region, "diloco.dev/role": component} if region else {}),
    }


def selector(context: JobContext, role: str, region: str) -> dict[str, str]:
    """The labels that identify pods; a workload's selector is immutable."""
    return {"diloco.dev/job": context.name, "diloco.dev/region": region, "diloco.dev/role": role}


def child(
    context: JobContext,
    *,
    api_version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    body: Mapping[str, Any],
    annotations: Mapping[str, str] | None = None,
    owned: bool = True,
) -> dict[str, Any]:
    """A child object: metadata with the job as its owner, unless it stays after it, and `body`."""
    extra = context.extra_metadata
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": context.owner.namespace,
        "labels": {**extra.labels, **labels},
        "annotations": {**({} if owned else _KEPT), **extra.annotations, **(annotations or {})},
    }
    if owned:
        owner = reference(context.name, context.owner.uid)
        metadata["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    return marked({"apiVersion": api_version, "kind": kind, "metadata": metadata, **body})


def reference(job: str, uid: str) -> dict[str, Any]:
    """The job as an owner that is not the controller: what has no other owner goes with it."""
    return {"apiVersion": API_VERSION, "kind": KIND, "name": job, "uid": uid}


def marked(item: dict[str, Any]) -> dict[str, Any]:
    """The object with the annotation APPLIED, which is computed from all the rest."""
    metadata = item["metadata"]
    annotations = {key: text for key, text in metadata["annotations"].items() if key != APPLIED}
    item = {**item, "metadata": {**metadata, "annotations": annotations}}
    annotations[APPLIED] = short_hash(item)
    return item


def short_hash(value: Any) -> str:
    """16 hex digits for a JSON value."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]
