"""
Reasons to leave a job with a valid spec as it is: nothing is created, changed or deleted.

A job that already runs is tracked nevertheless, and ends: otherwise the learners of a complete job
would keep their accelerators until a person notices the objection.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from diloco_job.names import MAX_CHILD_NAME, MAX_QUEUED, MAX_TEMPLATE_BYTES, learner_set_name
from diloco_job.reasons import ConditionState, condition
from diloco_job.types import DiLoCoJob, PodTemplate
from diloco_operator.decide.pruning import MANAGED_BY
from diloco_operator.resources import template_bytes
from diloco_operator.resources.operator_scope import MANAGER
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import controller_uid, labels

_OWN_PART_BYTES = 16 * 1024
"""More than a template has besides the values of the manifest and of the operator's settings."""


def objection(state: JobState) -> ConditionState | None:
    """The condition Accepted of a job that this operator leaves as it is; None: no objection."""
    if others := sorted(set(_other_regions(state))):
        return condition(
            "Accepted",
            "RegionChanged",
            own=_setting(state.scope.region),
            others=" and ".join(map(_setting, others)),
        )
    if found := list(forbidden_fields(state.job, state.scope.forbidden_pod_fields)):
        return condition("Accepted", "PodFieldForbidden", fields=", ".join(found))
    if state.sets.too_many(own.region for own in state.regions):
        num_learners = sum(own.region.learners for own in state.regions)
        return condition("Accepted", "TooManyForQueue", learners=num_learners, most=MAX_QUEUED)
    if refused := _too_large(state):
        return refused
    if state.sets.queue is not None:
        longest = max(_names_of_sets(state), key=len, default="")
        if len(longest) > MAX_CHILD_NAME:
            return condition(
                "Accepted",
                "NameTooLongForQueue",
                name=longest,
                length=len(longest),
                most=MAX_CHILD_NAME,
            )
    return None


def _too_large(state: JobState) -> ConditionState | None:
    """A job that an earlier version made larger is not refused while it does not grow."""
    regions, sets = [own.region for own in state.regions], state.sets
    if sum(map(sets.num_sets, regions)) * largest_template(state) <= MAX_TEMPLATE_BYTES:
        return None
    sizes = template_bytes(state.job, state.owner, state.scope, state.plan, sets)
    num_sets = {region.name: sets.num_sets(region) for region in regions}
    size = sum(num_sets[name] * sizes[name] for name in num_sets)
    if size <= MAX_TEMPLATE_BYTES:
        return None
    live = [child for (kind, _), child in state.children.items() if kind == "StatefulSet"]
    # The API server has added its defaults to those.
    live_size = sum(len(json.dumps(child["spec"].get("template")).encode()) for child in live)
    num_kept = {name: len(indexes) for name, indexes in sets.kept.items()}
    if sets.queue is None:
        num_kept = {labels(child).get("diloco.dev/region", ""): 1 for child in live}
    existing = sum(num_kept.get(name, 0) * sizes[name] for name in sizes)
    # One that was deleted is made again. Anyone may have set the label with the highest index.
    if not sets.grows(regions) and existing <= live_size and size - existing <= MAX_TEMPLATE_BYTES:
        return None
    return condition(
        "Accepted", "TemplatesTooLarge",
        sets=sum(num_sets.values()), size=size, most=MAX_TEMPLATE_BYTES,
    )  # fmt: skip


def largest_template(state: JobState) -> int:
    """
    Bytes that no pod template of the job exceeds, without making one, which takes long.

    A template has each value once or twice, and at most four bytes for one of the manifest: a quote or a
    non-ASCII character is escaped in the JSON of a command line, and the result in that of the template.
    """
    values = state.job.spec.model_dump_json(), str(state.owner.metadata), str(state.scope)
    return _OWN_PART_BYTES + 8 * sum(map(len, values))


def is_tracked(state: JobState, refused: ConditionState) -> bool:
    """Whether the job's status is updated and its end carried out despite the objection."""
    # What an operator of another region would see and stop is not this operator's.
    runs = any(child["kind"] in ("StatefulSet", "Deployment") for child in state.children.values())
    return runs and state.in_scope and refused.reason != "RegionChanged"


def _names_of_sets(state: JobState) -> Iterator[str]:
    for own in state.regions:
        if own.region.learners:
            last = own.region.learners - 1
            yield learner_set_name(state.job.metadata.name, own.region.name, last)


def _other_regions(state: JobState) -> Iterator[str]:
    """
    Values of region.name with which an operator made children that this job still has here.

    Also where the present name is in no region of the job: a region that was removed from the job has
    children with the present name only.
    """
    for child in state.children.values():
        manager = labels(child).get(MANAGED_BY, "")
        ours = manager == MANAGER or manager.startswith(f"{MANAGER}-")
        if ours and manager != state.scope.manager and controller_uid(child) == state.owner.uid:
            yield manager.removeprefix(MANAGER).removeprefix("-")


def _setting(region: str) -> str:
    return f"region.name {region}" if region else "no region.name"


def forbidden_fields(job: DiLoCoJob, forbidden: tuple[str, ...]) -> Iterator[str]:
    """
    Where the job's podTemplates set a forbidden field.

    Args:
        job: the job.
        forbidden: names of fields at any depth, such as hostPath; with dots, names below each other,
            such as capabilities.add.
    """
    spec = job.spec
    templates: dict[str, PodTemplate] = {
        "spec.learner": spec.learner.pod_template,
        "spec.syncer": spec.syncer.pod_template,
        **{f"spec.regions[{i}]": region.pod_template for i, region in enumerate(spec.regions)},
    }
    endings = tuple(f".{name}" for name in forbidden)
    for place, template in templates.items() if forbidden else ():
        for path, names in _set_fields(template.spec, f"{place}.podTemplate.spec", ""):
            if names.endswith(endings):
                yield path


def _set_fields(value: Any, path: str, names: str) -> Iterator[tuple[str, str]]:
    """Path and names of each field with a value; the names are without indices of lists."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner is not None and inner is not False and inner not in ("", [], {}):
                yield f"{path}.{key}", f"{names}.{key}"
                yield from _set_fields(inner, f"{path}.{key}", f"{names}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _set_fields(inner, f"{path}[{index}]", names)
