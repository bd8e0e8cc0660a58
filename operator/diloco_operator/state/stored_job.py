"""
A DiLoCoJob as the API server stores it, parsed once per reconcile.

Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from diloco_job.rules import rule_problems
from diloco_job.types import DiLoCoJob
from diloco_job.validation_messages import message as describe
from diloco_job.validation_messages import path_text
from diloco_operator.state.objects import Object, is_deleting

_Location = tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """What a GET returned, with the job that it holds."""

    raw: Object
    job: DiLoCoJob | None
    """None: invalid, or not this operator's to reconcile."""
    problems: tuple[str, ...] = ()
    """Everything that is wrong with the spec."""
    unknown_fields: tuple[str, ...] = ()
    """Paths of fields that this version does not know; the job is without them."""

    @classmethod
    def parse(cls, raw: Object) -> StoredJob:
        """Parse and check a live object; never raises for what an API server stores."""
        if is_deleting(raw) or managed_by(raw):
            return cls(raw=raw, job=None)
        # Of the metadata, only these fields are validated: a newer API server may have more.
        metadata = {
            key: raw["metadata"][key] for key in ("name", "namespace") if key in raw["metadata"]
        }
        data = {key: raw[key] for key in ("apiVersion", "kind", "spec") if key in raw}
        job, unknown, problems = _parsed({**data, "metadata": metadata})
        if job is not None:
            problems = tuple(rule_problems(job))
        return cls(
            raw=raw,
            job=None if problems else job,
            problems=problems,
            unknown_fields=tuple(map(path_text, unknown)),
        )

    @property
    def ignored(self) -> bool:
        """Being deleted, or managed by another controller: the operator writes nothing."""
        return is_deleting(self.raw) or bool(managed_by(self.raw))


def _parsed(data: Object) -> tuple[DiLoCoJob | None, list[_Location], tuple[str, ...]]:
    """
    The job without the fields that no type has, their locations, and what is wrong with the rest.

    The API server stores no field that its CRD does not have, so an unknown field comes from a newer
    CRD and is no mistake of the manifest's author.
    """
    try:
        return DiLoCoJob.model_validate(data), [], ()
    except ValidationError as error:
        errors = error.errors(include_url=False)
    unknown = [detail["loc"] for detail in errors if detail["type"] == "extra_forbidden"]
    if not unknown:
        return None, [], tuple(map(describe, errors))
    job, more, problems = _parsed(_without(data, unknown))
    return job, unknown + more, problems


def _without(data: Object, locations: Iterable[_Location]) -> Object:
    data = copy.deepcopy(data)
    for *above, last in locations:
        place: Any = data
        for part in above:
            place = place[part]
        del place[last]
    return data


def managed_by(raw: Object) -> str:
    """spec.managedBy, or its former place, whatever else the spec holds; "": none."""
    spec = raw.get("spec")
    policy = spec.get("runPolicy") if isinstance(spec, Mapping) else None
    places = (place for place in (spec, policy) if isinstance(place, Mapping))
    return next((str(name) for place in places if (name := place.get("managedBy"))), "")


def claimed_by(raw: Object) -> str:
    """The installation of the operator that runs the job (status.operator); "": none yet."""
    status = raw.get("status")
    return str(status.get("operator") or "") if isinstance(status, Mapping) else ""
