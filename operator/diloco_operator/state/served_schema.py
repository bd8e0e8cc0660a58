"""
Fields of a DiLoCoJob that the API server does not store, because its CRD is older than this operator.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diloco_job.crd import GROUP, VERSION, schema
from diloco_job.types import KIND

_NAME = ".".join((*reversed(GROUP.split(".")), VERSION, KIND))


def missing_fields(document: Mapping[str, Any]) -> tuple[str, ...] | None:
    """
    The fields that the CRD of the API server lacks, without those below them.

    Args:
        document: OpenAPI v3 of the API group, as the server publishes it.

    Returns:
        Their paths; None: the document does not describe the kind.
    """
    served = ((document.get("components") or {}).get("schemas") or {}).get(_NAME)
    if not isinstance(served, Mapping):
        return None
    own = schema()
    parts = {name: own["properties"][name] for name in ("spec", "status")}
    return tuple(_missing({"properties": parts}, served, ""))


def _missing(own: Mapping[str, Any], served: Mapping[str, Any], path: str) -> Iterator[str]:
    if served.get("x-kubernetes-preserve-unknown-fields"):
        return
    has = served.get("properties") or {}
    for name, below in (own.get("properties") or {}).items():
        if name in has:
            yield from _missing(below, has[name], f"{path}{name}.")
        else:
            yield f"{path}{name}"
    for values in ("items", "additionalProperties"):
        if isinstance(own.get(values), Mapping) and isinstance(served.get(values), Mapping):
            yield from _missing(own[values], served[values], path)
