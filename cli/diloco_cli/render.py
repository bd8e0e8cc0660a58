"""`diloco render`: the objects that the operator applies for a job, without a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from diloco.errors import ConfigError
from diloco_job.manifest_file import Dumper
from diloco_job.types import DiLoCoJob
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.extra_metadata import Metadata
from diloco_operator.resources.operator_scope import OperatorScope, listed_regions

NO_UID = "00000000-0000-0000-0000-000000000000"
"""Placeholder for the uid, which only a cluster assigns."""


def render(job: DiLoCoJob, scope: OperatorScope, namespace: str = "") -> tuple[dict[str, Any], ...]:
    """
    The objects that an operator with this scope applies for a running job.

    Args:
        job: a validated job.
        scope: the part of the job that the operator runs.
        namespace: of the job; "": that of the manifest, else default.

    Raises:
        ConfigError: the scope's region is not one of the job's.
    """
    if not (scope.own_regions(job) or scope.has_syncer(job)):
        known = listed_regions(job)
        raise ConfigError(f"--region {scope.region}: not one of the job's regions: {known}")
    metadata = job.metadata
    owner = Owner(
        namespace=namespace or metadata.namespace or "default",
        uid=NO_UID,
        metadata=Metadata(labels=metadata.labels, annotations=metadata.annotations),
    )
    return desired(job, owner, scope, Wanted())


def to_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """One YAML document per object, each preceded by `---`."""
    text: str = yaml.dump_all(
        objects, Dumper=_Dumper, explicit_start=True, sort_keys=False, allow_unicode=True, width=100
    )
    return text


class _Dumper(Dumper):
    """Writes text with several lines as a literal block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if text.endswith("\n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
