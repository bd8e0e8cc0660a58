"""
PersistentVolumeClaims: what of the manifest can reach the volumes that exist.

Pure. A claim grows, but never shrinks, and keeps its class. A StatefulSet never changes its
volumeClaimTemplates: one that was made with others, by an operator that did not know the field or
from another job, keeps them with the pod template that fits them, and a condition names it. Claims keep the
labels that their StatefulSet was made with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diloco_job.quantities import amount
from diloco_operator.decide.drift import covers
from diloco_operator.resources.common import marked
from diloco_operator.resources.learners import claim_templates
from diloco_operator.resources.overlay import without_nulls
from diloco_operator.resources.template_record import with_template
from diloco_operator.state.job_state import JobState
from diloco_operator.state.objects import Object, identity, labels


def keep_claims(state: JobState, wants: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The wanted children, with what existing volumes do not let them change."""
    other = set(sets_of_other_claims(state))
    return (_kept(state, want, other) for want in wants)


def sets_of_other_claims(state: JobState) -> tuple[str, ...]:
    """Names of the StatefulSets whose volumeClaimTemplates are not those of the manifest."""
    wanted = claim_templates(state.job)
    regions = {own.region.name for own in state.regions}
    return tuple(
        name
        for (kind, name), live in sorted(state.children.items())
        if kind == "StatefulSet"
        and labels(live).get("diloco.dev/region") in regions
        and not covers(_claim_templates(live), wanted)
    )


def _kept(state: JobState, want: dict[str, Any], other: set[str]) -> dict[str, Any]:
    kind, name = identity(want)
    live = state.child(kind, name)
    if live is None:
        return want
    if kind == "PersistentVolumeClaim":
        return _of_live_claim(live, want)
    if kind == "StatefulSet" and name in other:
        return _with_claim_templates(live, want)
    if kind == "StatefulSet":
        return _with_claim_metadata(live, want)
    return want


def _with_claim_metadata(live: Object, want: dict[str, Any]) -> dict[str, Any]:
    """With the labels and annotations that its claims have had from the beginning, and keep."""
    found = {claim["metadata"].get("name"): claim["metadata"] for claim in _claim_templates(live)}
    templates = [
        {
            **claim,
            "metadata": {
                key: text
                for key in ("name", "labels", "annotations")
                if (text := found.get(claim["metadata"]["name"], {}).get(key))
            },
        }
        for claim in _claim_templates(want)
    ]
    if templates == _claim_templates(want):
        return want
    return marked({**want, "spec": {**want["spec"], "volumeClaimTemplates": templates}})


def _of_live_claim(live: Object, want: dict[str, Any]) -> dict[str, Any]:
    spec, has = want["spec"], live.get("spec") or {}
    kept: dict[str, Any] = {}
    storage_class = has.get("storageClassName")
    if "storageClassName" in spec and storage_class:
        kept["storageClassName"] = storage_class
    if has.get("accessModes"):
        kept["accessModes"] = has["accessModes"]
    size = ((has.get("resources") or {}).get("requests") or {}).get("storage")
    if (amount(size) or 0) > (amount(spec["resources"]["requests"]["storage"]) or 0):
        kept["resources"] = {"requests": {"storage": size}}
    return marked({**want, "spec": {**spec, **kept}}) if kept else want


def _with_claim_templates(live: Object, want: dict[str, Any]) -> dict[str, Any]:
    spec = {key: value for key, value in want["spec"].items() if key != "volumeClaimTemplates"}
    templates = _claim_templates(live)
    if templates:
        spec["volumeClaimTemplates"] = without_nulls(
            [{key: template[key] for key in template if key != "status"} for template in templates]
        )
    template = (live.get("spec") or {}).get("template") or want["spec"]["template"]
    return with_template({**want, "spec": spec}, template)


def _claim_templates(workload: Object) -> list[Mapping[str, Any]]:
    return (workload.get("spec") or {}).get("volumeClaimTemplates") or []
