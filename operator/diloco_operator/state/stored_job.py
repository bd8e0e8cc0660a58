"""
A DiLoCoJob as the API server stores it, parsed once per reconcile.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from diloco_job.rules import rule_problems
from diloco_job.types import DiLoCoJob
from diloco_job.validation_messages import message as describe
from diloco_operator.state.objects import Object, is_deleting


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """What a GET returned, with the job that it holds."""

    raw: Object
    job: DiLoCoJob | None
    """None: invalid, or not this operator's to reconcile."""
    problems: tuple[str, ...] = ()
    """Everything that is wrong with the spec."""

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
        try:
            job = DiLoCoJob.model_validate({**data, "metadata": metadata})
        except ValidationError as error:
            problems = tuple(describe(detail) for detail in error.errors(include_url=False))
            return cls(raw=raw, job=None, problems=problems)
        if problems := tuple(rule_problems(job)):
            return cls(raw=raw, job=None, problems=problems)
        return cls(raw=raw, job=job)

    @property
    def ignored(self) -> bool:
        """Being deleted, or managed by another controller: the operator writes nothing."""
        return is_deleting(self.raw) or bool(managed_by(self.raw))


def managed_by(raw: Object) -> str:
    """Value of spec.runPolicy.managedBy, whatever else the spec holds; "": none."""
    spec = raw.get("spec")
    policy = spec.get("runPolicy") if isinstance(spec, Mapping) else None
    return str(policy.get("managedBy") or "") if isinstance(policy, Mapping) else ""
