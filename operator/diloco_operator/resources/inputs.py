"""
The manifest's values that the pod template of each role is made of.

Pure. Values of the manifest only: neither the chart's values nor what this version of the operator
makes of them, so that another version gives the same hash. Values at their default are left out: a
field that a later version adds changes no hash. A value that a template reads and that is missing
here would not reach running pods; a test changes every field of the manifest to find one.

A change of what is hashed needs another `template_record.FORMAT`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from diloco_job.types import DiLoCoJob, PodTemplate, Ports, Region
from diloco_operator.resources import pod_templates
from diloco_operator.resources.common import JobContext
from diloco_operator.resources.operator_scope import tls_secret
from diloco_operator.resources.overlay import overlay, without_nulls


def of_learners(context: JobContext, region: Region) -> dict[str, Any]:
    """Of the learners of a region; without what they get from the syncer (`learner_spec`)."""
    job, spec, queue = context.job, context.job.spec, context.sets.queue
    own_loop = spec.learner.recipe is None
    return {
        "region": region.name,
        "syncer": _dialled(context),
        "tls": tls_secret(job),
        "seed": spec.seed,
        "sync": _values(spec.sync, "quorum", "guard"),
        # Of its volumes, the template has only that there are some.
        "learner": {
            **_values(spec.learner, "resources", "pod_template", "storage"),
            **({"storage": True} if spec.learner.storage else {}),
        },
        "config": region.config,
        "restartLimit": spec.run_policy.learner_restart_limit,
        "resources": _values(pod_templates.learner_resources(job, region)),
        "podTemplates": [_values(template) for template in _learner_templates(job, region)],
        # An index within the job depends on the set of regions.
        "regions": sorted(other.name for other in spec.regions) if own_loop else [],
        **({"volcano": queue.volcano} if queue is not None and queue.volcano else {}),
        **({"podGroups": True} if queue is not None and queue.pod_groups else {}),
    }


def of_syncer(context: JobContext) -> dict[str, Any]:
    """Of the syncer."""
    syncer = context.job.spec.syncer
    return {
        "run": _run(context),
        "image": syncer.image,
        **_ports(syncer.ports),
        "resources": _values(syncer.resources),
        "podTemplates": [_values(syncer.pod_template)],
    }


def of_evaluator(context: JobContext, region: Region) -> dict[str, Any]:
    """Of the evaluator, which runs in the syncer's region."""
    job, learner = context.job, context.job.spec.learner
    return {
        "run": _run(context),
        "syncer": _dialled(context),
        "image": learner.image,
        **(_ports(job.spec.evaluation.ports) if job.spec.evaluation else {}),
        "env": [_values(variable) for variable in learner.env],
        "resources": _values(pod_templates.learner_resources(job, region)),
        "podTemplates": [_values(template) for template in _learner_templates(job, region)],
    }


def stated_pod(job: DiLoCoJob, role: str, region: str) -> dict[str, Any]:
    """
    The fields of a pod's spec that the manifest itself states, without the operator's part.

    Args:
        job: the job.
        role: learner, syncer or evaluator.
        region: name of its region.
    """
    spec = job.spec
    found = next((own for own in spec.regions if own.name == region), None)
    main: dict[str, Any] = {"name": pod_templates.MAIN}
    if role == "syncer":
        image, templates = spec.syncer.image, [spec.syncer.pod_template]
        main["resources"] = _values(spec.syncer.resources)
    else:
        image, templates = spec.learner.image, [spec.learner.pod_template]
        main["env"] = [without_nulls(_values(variable)) for variable in spec.learner.env]
        if found is not None:
            templates = _learner_templates(job, found)
            if role == "learner":
                # The evaluator gets only some of them.
                main["resources"] = _values(pod_templates.learner_resources(job, found))
    if image:
        main["image"] = image
    pod: Any = {"containers": [main]}
    for template in templates:
        pod = overlay(pod, without_nulls(template.spec))
    return dict(pod)


def _run(context: JobContext) -> dict[str, Any]:
    """
    What the document of the syncer and the evaluator is made of, without the numbers of learners:
    the syncer takes those over while it runs.
    """
    spec = context.job.spec
    return {
        "region": spec.syncer_region,
        "tls": tls_secret(context.job),
        "steps": spec.steps,
        "seed": spec.seed,
        "sync": _values(spec.sync),
        "recipe": _values(spec.learner.recipe),
        "learnerCheckpoint": _values(spec.learner.checkpoint),
        "syncerCheckpoint": _values(spec.syncer.checkpoint),
        "evaluation": _values(spec.evaluation, "ports"),
        **({"output": spec.output} if spec.output else {}),
    }


def _dialled(context: JobContext) -> str | int:
    """How the manifest determines the address: the port of the Service, or the endpoint."""
    syncer = context.job.spec.syncer
    return syncer.service.port if context.has_syncer else syncer.endpoint


def _learner_templates(job: DiLoCoJob, region: Region) -> list[PodTemplate]:
    return [job.spec.learner.pod_template, region.pod_template]


def _ports(ports: Ports) -> dict[str, Any]:
    """Nothing, if they are the defaults: a hash from before this field."""
    return {"ports": values} if (values := _values(ports)) else {}


def _values(model: BaseModel | None, *without: str) -> dict[str, Any]:
    if model is None:
        return {}
    return model.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=set(without))
