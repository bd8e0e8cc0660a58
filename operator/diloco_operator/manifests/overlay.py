"""
How a podTemplate is laid over a pod.

Three layers, each over the one before: what the operator would do by itself, what the manifest says
(learner.podTemplate, then region.podTemplate), and what the contract with the container needs
(pods.py), which therefore wins. Every layer is laid in the same way, field by field:

- Objects are merged key by key, at any depth: nodeSelector, affinity, securityContext, resources.
- Lists whose entries have a name of their own are merged entry by entry, new entries last:
  `containers` and `initContainers` by name, and what both layers say of one container is merged
  again; `volumes`, `imagePullSecrets` and `env` by name, `volumeMounts` by mountPath, `volumeDevices`
  by devicePath, `ports` by containerPort and protocol, where the later entry replaces the earlier
  whole (a volume has one source, a variable one value).
- `tolerations` are added up.
- Any other list, and any plain value, replaces the earlier one.
- null says nothing, as in a manifest.

Nothing is refused here: what has the wrong shape is left in place for the API server, which refuses
it in its own words. The operator's container is called `main`; any other name is a sidecar.
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


def lay(base: Any, over: Any, field: str = "") -> Any:
    """
    `over` laid over `base`; neither is changed.

    Args:
        base: the earlier layer.
        over: the later one.
        field: the name under which both stand; "" for a whole pod.
    """
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        both = {key: lay(base[key], over[key], key) for key in base if key in over}
        return {**base, **over, **both}
    if isinstance(base, list) and isinstance(over, list):
        if field in _KEYS:
            return _by_key([*base, *over], field)
        if field in _ADDED:
            return [*base, *(entry for entry in over if entry not in base)]
        return over
    if isinstance(base, Mapping | list) == isinstance(over, Mapping | list):
        return over
    # A plain value where another layer has an object or a list is a mistake; it must stay visible.
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
            merged[key] = lay(merged[key], entry)
        else:
            merged[key] = entry
    return list(merged.values())


def _key(entry: Any, field: str, place: int) -> Hashable:
    """What names an entry; its place where it has no name, so that it is kept as it is."""
    if not isinstance(entry, Mapping):
        return place
    key = tuple(entry.get(part, _DEFAULTS.get(part)) for part in _KEYS[field])
    return key if all(isinstance(part, str | int) for part in key) else place
