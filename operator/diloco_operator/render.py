"""
`diloco render`: what the operator would apply for a job, without a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from diloco.errors import ConfigError
from diloco_operator.api import DiLoCoJob
from diloco_operator.manifest import Dumper
from diloco_operator.manifests import Owner, Wanted, desired
from diloco_operator.view import View

NO_UID = "00000000-0000-0000-0000-000000000000"
"""In place of the uid that only a cluster gives."""


def render(job: DiLoCoJob, view: View, namespace: str = "") -> tuple[dict[str, Any], ...]:
    """
    The children of a job that runs, as an operator with this view would apply them.

    Args:
        job: a validated job.
        view: what the operator was told.
        namespace: where the job lives; "": what the manifest says, else default.

    Raises:
        ConfigError: the view's region is none of the job's.
    """
    if not (view.own_regions(job) or view.has_syncer(job)):
        known = ", ".join(region.name for region in job.spec.regions)
        raise ConfigError(f"--region {view.region}: none of the job's regions; they are: {known}")
    owner = Owner(namespace=namespace or job.metadata.namespace or "default", uid=NO_UID)
    return desired(job, owner, view, Wanted())


def to_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """One YAML document for each object, each begun by `---`."""
    text: str = yaml.dump_all(
        objects, Dumper=_Dumper, explicit_start=True, sort_keys=False, allow_unicode=True, width=100
    )
    return text


class _Dumper(Dumper):
    """Files inside an object stand there as they are, line by line."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if text.endswith("\n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
