"""
How a podTemplate overlays a pod.

Three layers, each over the previous one: the operator's defaults, the manifest's templates
(learner.podTemplate, then region.podTemplate), and the fields that the container's first process
relies on (pod_templates.py), which therefore win. Every layer is merged in the same way, field by field:

- Objects are merged key by key, at any depth: nodeSelector, affinity, securityContext, resources.
- Lists with a key are merged entry by entry, new entries last. `containers` and `initContainers`
  have the key name, and entries of the same name are merged in turn. `volumes`, `imagePullSecrets`
  and `env` have the key name, `volumeMounts` mountPath, `volumeDevices` devicePath, `ports`
  containerPort and protocol; there the later entry replaces the earlier (a volume has one source, a
  variable one value).
- `tolerations` are concatenated.
- Any other list, and any plain value, replaces the earlier one.
- null has no effect, as in a manifest.

Nothing is rejected here: a value of the wrong shape stays in place, so that the API server rejects
it. The operator's container is called `main`; any other name is a sidecar.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

_MERGED = {"containers": ("name",), "initContainers": ("name",)}
_REPLACED = {
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
}
_KEYS = {**_MERGED, **_REPLACED}
_ADDED = ("tolerations",)
_DEFAULTS = {"protocol": "TCP"}


def overlay(base: Any, over: Any, field: str = "") -> Any:
    """
    `base` with `over` merged into it; neither is changed.

    Args:
        base: the earlier layer.
        over: the later one.
        field: name of the field that holds both; "" for a whole pod.
    """
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        both = {key: overlay(base[key], over[key], key) for key in base if key in over}
        return {**base, **over, **both}
    if isinstance(base, list) and isinstance(over, list):
        if field in _KEYS:
            return _by_key([*base, *over], field)
        if field in _ADDED:
            return [*base, *(entry for entry in over if entry not in base)]
        return over
    if isinstance(base, Mapping | list) == isinstance(over, Mapping | list):
        return over
    # A plain value where another layer has an object or a list is an error and must stay visible.
    return base if isinstance(over, Mapping | list) else over


def without_nulls(value: Any) -> Any:
    """A copy without null, at any depth: server-side apply has no null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value if inner is not None]
    return value


def _by_key(entries: Iterable[Any], field: str) -> list[Any]:
    merged: dict[Hashable, Any] = {}
    for place, entry in enumerate(entries):
        key = _key(entry, field, place)
        if key in merged and field in _MERGED:
            merged[key] = overlay(merged[key], entry)
        else:
            merged[key] = entry
    return list(merged.values())


def _key(entry: Any, field: str, place: int) -> Hashable:
    """The key of an entry; its position where it has none, so that it is kept unchanged."""
    if not isinstance(entry, Mapping):
        return place
    key = tuple(entry.get(part, _DEFAULTS.get(part)) for part in _KEYS[field])
    return key if all(isinstance(part, str | int) for part in key) else place
