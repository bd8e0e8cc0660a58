"""
The evaluator: Deployment `<job>-evaluator`, beside the syncer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diloco_operator import names
from diloco_operator.api import Region
from diloco_operator.manifests import common, learners, pods
from diloco_operator.manifests.common import Scope, child
from diloco_operator.plan import EvaluatorPlan, process_env
from diloco_operator.view import DEFAULT_IMAGE, tls_secret

ROLE = "evaluator"

GRACE_SECONDS = 30

_RESOURCES = ("cpu", "memory", "ephemeral-storage")


def children(scope: Scope) -> list[dict[str, Any]]:
    """The Deployment, or nothing where the job has no evaluation."""
    planned = scope.plan.evaluator
    if planned is None:
        return []
    spec = scope.job.spec
    region = next(one for one in spec.regions if one.name == spec.syncer_region)
    deployment = {
        "replicas": 1 if scope.wanted.evaluator else 0,
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": common.selector(scope, ROLE, region.name)},
        "template": pods.template(scope, _parts(scope, planned, region)),
    }
    default_image = {} if spec.learner.image else {DEFAULT_IMAGE: scope.view.worker_image}
    return [
        child(
            scope,
            api_version="apps/v1",
            kind="Deployment",
            name=names.evaluator_name(scope.name),
            labels=common.labels(scope, ROLE, region.name),
            annotations=default_image,
            body={"spec": deployment},
        )
    ]


def _parts(scope: Scope, planned: EvaluatorPlan, region: Region) -> pods.Parts:
    """Image, environment and pod of the learners that live where the syncer does."""
    learner = scope.job.spec.learner
    return pods.Parts(
        role=ROLE,
        region=region.name,
        argv=planned.argv,
        image=learner.image or scope.view.worker_image,
        env=process_env(
            scope.plan,
            planned,
            syncer=scope.syncer_address,
            spec_path=Path(pods.SPEC_PATH),
            state_dir=Path(pods.STATE_DIR),
            tls_dir=Path(pods.TLS_DIR) if tls_secret(scope.job) else None,
            metrics_port=common.METRICS_PORT,
        ),
        spec=scope.spec,
        user_env=tuple(learner.env),
        resources=_resources(scope, region),
        templates=(learner.pod_template, region.pod_template),
        grace_seconds=GRACE_SECONDS,
        ports={},
    )


def _resources(scope: Scope, region: Region) -> dict[str, Any]:
    # No devices: an evaluator that took an accelerator could keep a learner from ever starting.
    # Who has one for it says so in podTemplate.
    given = pods.said(learners.resources(scope, region))
    kept = {
        part: {key: value for key, value in given.get(part, {}).items() if key in _RESOURCES}
        for part in ("requests", "limits")
    }
    return {part: values for part, values in kept.items() if values}
