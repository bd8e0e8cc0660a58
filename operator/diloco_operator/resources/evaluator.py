"""
The evaluator: Deployment `<job>-evaluator`, beside the syncer.
"""

from __future__ import annotations

from typing import Any

from diloco_job import names
from diloco_job.plan import EvaluatorPlan, process_env
from diloco_job.types import Ports, Region
from diloco_operator.resources import common, inputs, pod_templates
from diloco_operator.resources.common import JobContext, child
from diloco_operator.resources.operator_scope import tls_secret
from diloco_operator.resources.template_record import record

ROLE = "evaluator"

GRACE_SECONDS = 30

_RESOURCES = ("cpu", "memory", "ephemeral-storage")


def children(context: JobContext) -> list[dict[str, Any]]:
    """The Deployment; empty for a job without evaluation."""
    planned = context.plan.evaluator
    if planned is None:
        return []
    spec = context.job.spec
    region = next(region for region in spec.regions if region.name == spec.syncer_region)
    template = pod_templates.template(context, _parts(context, planned, region))
    deployment = {
        "replicas": 1 if context.wanted.evaluator else 0,
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": common.selector(context, ROLE, region.name)},
        "template": template,
    }
    return [
        child(
            context,
            api_version="apps/v1",
            kind="Deployment",
            name=names.evaluator_name(context.name),
            labels=common.labels(context, ROLE, region.name),
            annotations=record(inputs.of_evaluator(context, region), template),
            body={"spec": deployment},
        )
    ]


def _parts(context: JobContext, planned: EvaluatorPlan, region: Region) -> pod_templates.Parts:
    """As the learners of the syncer's region: image, environment and podTemplate."""
    learner, evaluation = context.job.spec.learner, context.job.spec.evaluation
    ports = evaluation.ports if evaluation else Ports()
    return pod_templates.Parts(
        role=ROLE,
        region=region.name,
        argv=planned.argv,
        image=learner.image or context.scope.worker_image,
        env=process_env(
            context.plan,
            planned,
            syncer=context.syncer_address,
            spec_path=str(pod_templates.SPEC_PATH),
            state_dir=str(pod_templates.STATE_DIR),
            tls_dir=str(pod_templates.TLS_DIR) if tls_secret(context.job) else "",
            metrics_port=ports.metrics,
        ),
        spec_map=context.spec_map,
        user_env=tuple(learner.env),
        resources=_resources(context, region),
        templates=(learner.pod_template, region.pod_template),
        grace_seconds=GRACE_SECONDS,
        # Its pods have random names.
        state_path=names.evaluator_name(context.name),
        ports=ports,
    )


def _resources(context: JobContext, region: Region) -> dict[str, Any]:
    # No devices: an evaluator that holds an accelerator could prevent a learner from starting.
    # A podTemplate can add one.
    fields = pod_templates.as_fields(pod_templates.learner_resources(context.job, region))
    kept = {
        part: {key: value for key, value in fields.get(part, {}).items() if key in _RESOURCES}
        for part in ("requests", "limits")
    }
    return {part: values for part, values in kept.items() if values}
