"""
A region's learners: StatefulSet, headless Service and PodDisruptionBudget `<job>-<region>`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diloco_operator import names
from diloco_operator.api import Region, Resources
from diloco_operator.manifests import common, pods
from diloco_operator.manifests.common import Scope, child
from diloco_operator.plan import learner_plan, process_env
from diloco_operator.view import DEFAULT_IMAGE, tls_secret

ROLE = "learner"

GRACE_SECONDS = 60
"""To leave the job and write the checkpoint."""


def children(scope: Scope, region: Region) -> list[dict[str, Any]]:
    """Everything of one region."""
    name = names.child_name(scope.name, region.name)
    labels = common.labels(scope, ROLE, region.name)
    select = common.selector(scope, ROLE, region.name)
    service = {
        "clusterIP": "None",
        # The pods of one learner look each other up before they are ready.
        "publishNotReadyAddresses": True,
        "selector": select,
        "ports": [
            {
                "name": "metrics",
                "port": common.METRICS_PORT,
                "targetPort": "metrics",
                "protocol": "TCP",
            }
        ],
    }
    budget = {
        "maxUnavailable": pods_to_spare(scope, region),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": select},
    }
    learner = scope.job.spec.learner
    # Without an address a learner would take itself for one that is alone.
    runs = scope.wanted.learners and bool(scope.syncer_address)
    stateful_set = {
        "replicas": region.learners * learner.pods_per_learner if runs else 0,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": select},
        "template": pods.template(scope, _parts(scope, region)),
    }
    default_image = {} if learner.image else {DEFAULT_IMAGE: scope.view.worker_image}
    return [
        child(
            scope,
            api_version="v1",
            kind="Service",
            name=name,
            labels=labels,
            body={"spec": service},
        ),
        child(
            scope,
            api_version="policy/v1",
            kind="PodDisruptionBudget",
            name=name,
            labels=labels,
            body={"spec": budget},
        ),
        child(
            scope,
            api_version="apps/v1",
            kind="StatefulSet",
            name=name,
            labels=labels,
            annotations=default_image,
            body={"spec": stateful_set},
        ),
    ]


def pods_to_spare(scope: Scope, region: Region) -> int:
    """
    Pods of a region that may be drained at a time.

    The learners beyond the quorum are shared out among the regions by size: drains of different
    regions know nothing of each other, and all together leave a quorum. At least 1: a drain must
    not hang, and a round that waits loses nothing.
    """
    spec = scope.job.spec
    beyond = spec.num_learners - spec.sync.quorum
    share = beyond * region.learners // max(1, spec.num_learners)
    return max(1, share * spec.learner.pods_per_learner)


def resources(scope: Scope, region: Region) -> Resources:
    """A region's own, else those of all learners."""
    return region.resources if pods.said(region.resources) else scope.job.spec.learner.resources


def _parts(scope: Scope, region: Region) -> pods.Parts:
    learner = scope.job.spec.learner
    one = learner_plan(scope.job, region, 0)
    limit = scope.job.spec.run_policy.learner_restart_limit
    env = {
        **process_env(
            scope.plan,
            one,
            syncer=scope.syncer_address,
            spec_path=Path(pods.SPEC_PATH),
            state_dir=Path(pods.STATE_DIR),
            tls_dir=Path(pods.TLS_DIR) if tls_secret(scope.job) else None,
            metrics_port=common.METRICS_PORT,
        ),
        "DILOCO_REGION": region.name,
        "DILOCO_PODS_PER_LEARNER": str(learner.pods_per_learner),
        **({"DILOCO_RESTART_LIMIT": str(limit)} if limit is not None else {}),
    }
    return pods.Parts(
        role=ROLE,
        region=region.name,
        argv=one.argv,
        image=learner.image or scope.view.worker_image,
        env=env,
        spec=scope.learner_spec,
        user_env=tuple(learner.env),
        resources=pods.said(resources(scope, region)),
        templates=(learner.pod_template, region.pod_template),
        grace_seconds=GRACE_SECONDS,
        ports={},
    )
