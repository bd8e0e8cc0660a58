"""
The children of a job as Kubernetes objects: the desired state of everything the operator manages.

Pure and deterministic: equal arguments give equal objects, ready for server-side apply (every field
that is ours, no nulls, no status). Begin with `desired`; each role has a module, `pod_templates`
has what their pods share, `overlay` applies a podTemplate. Another version may make other pod templates of
the same manifest: `inputs` and `template_record` let `decide` keep those of running pods. Imports
diloco_job and the contract; nothing of the operator outside this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diloco_job.plan import SharedPlan, learner_spec, shared_plan
from diloco_job.types import DiLoCoJob
from diloco_operator.resources import evaluator, learners, network_policies, shared, syncer
from diloco_operator.resources.common import APPLIED, JobContext, Owner, Wanted
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.resources.queue_labels import LearnerSets, queue_of_job

__all__ = [
    "APPLIED",
    "LearnerSets",
    "Owner",
    "Wanted",
    "desired",
    "each_desired",
    "template_bytes",
    "volume_claim",
]


def desired(
    job: DiLoCoJob,
    owner: Owner,
    scope: OperatorScope,
    wanted: Wanted,
    plan: SharedPlan | None = None,
    sets: LearnerSets | None = None,
) -> tuple[dict[str, Any], ...]:
    """
    The children of a job that this operator should keep, in the order to apply them.

    ServiceAccount, ConfigMaps, Certificate, PersistentVolumeClaim, Services, PodDisruptionBudgets,
    NetworkPolicies, PodGroups, Deployments, StatefulSets. Other children of the job are obsolete.

    Args:
        job: a validated job.
        owner: the job's object in the cluster.
        scope: the part of the job that this operator runs, and its defaults.
        wanted: which components should run now.
        plan: of the job; None: make it.
        sets: the StatefulSets of its learners; None: those of a job that has none yet.
    """
    sets = sets or LearnerSets(queue=queue_of_job(owner.metadata))
    return tuple(each_desired(job, owner, scope, wanted, plan or shared_plan(job), sets))


def each_desired(
    job: DiLoCoJob,
    owner: Owner,
    scope: OperatorScope,
    wanted: Wanted,
    plan: SharedPlan,
    sets: LearnerSets,
) -> Iterator[dict[str, Any]]:
    """The same, one StatefulSet at a time: those of a queue that are too large do not exist at once."""
    context = _context(job, owner, scope, wanted, plan, sets)
    if not wanted.volume or not (context.regions or context.has_syncer):
        return
    policies = scope.network_policies
    children = [
        *(network_policies.children(context, policies) if policies else ()),
        *shared.children(context),
        *(syncer.children(context) if context.has_syncer else ()),
        *(evaluator.children(context) if context.has_syncer else ()),
        *(child for region in context.regions for child in learners.children(context, region)),
    ]
    yield from sorted(children, key=lambda child: _ORDER.index(child["kind"]))
    for region in context.regions:
        yield from learners.stateful_sets(context, region)


def volume_claim(
    job: DiLoCoJob, owner: Owner, scope: OperatorScope, plan: SharedPlan, sets: LearnerSets
) -> dict[str, Any] | None:
    """
    The syncer's claim alone, as it is in `desired`; None: another operator runs the syncer.

    Args: see `desired`.
    """
    context = _context(job, owner, scope, Wanted(), plan, sets)
    return syncer.volume_claim(context) if context.has_syncer else None


def template_bytes(
    job: DiLoCoJob, owner: Owner, scope: OperatorScope, plan: SharedPlan, sets: LearnerSets
) -> dict[str, int]:
    """
    Size of the pod template of the learners of each region that this operator runs, in bytes of JSON.

    Args: see `desired`.
    """
    context = _context(job, owner, scope, Wanted(), plan, sets)
    return {region.name: learners.template_bytes(context, region) for region in context.regions}


def _context(
    job: DiLoCoJob,
    owner: Owner,
    scope: OperatorScope,
    wanted: Wanted,
    plan: SharedPlan,
    sets: LearnerSets,
) -> JobContext:
    return JobContext(
        job=job,
        plan=plan,
        owner=owner,
        scope=scope,
        wanted=wanted,
        spec=plan.spec.to_json(),
        learner_spec=learner_spec(plan.spec).to_json(),
        sets=sets,
    )


_ORDER = (
    "ServiceAccount",
    "ConfigMap",
    "Certificate",
    "PersistentVolumeClaim",
    "Service",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "PodGroup",
    "Deployment",
)
