"""
Whether a live object has drifted from the desired one.

Pure. The API server adds defaults and other writers add fields of their own, so a live object
matches when it holds at least the desired fields. The hash of our last apply, which every child
carries (`diloco.dev/applied`), shows a field that is no longer desired.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_job.quantities import amount
from diloco_operator.resources import APPLIED
from diloco_operator.state.objects import labels

_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ownerReferences": ("uid",),
    "hostAliases": ("ip",),
    "ports": ("containerPort", "port", "protocol"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists that Kubernetes merges by key: additional entries of other writers are no drift."""

_QUANTITIES = ("requests", "limits")
"""Maps whose values are quantities; `_QUANTITY` has single fields."""

_QUANTITY = ("sizeLimit", "divisor")


def has_drifted(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether `wanted` must be applied: it changed, or another writer changed the live object."""
    if is_changed(live, wanted):
        return True
    if wanted["kind"] == "PersistentVolumeClaim":
        # Of its spec only the size can change, and it only grows (`volume_claims`).
        return not covers(labels(live), labels(wanted))
    return not covers(live, wanted)


def is_changed(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """
    Whether `wanted` differs from our last apply, and not only from the live object.

    A webhook may change a value of every apply. The live object then differs for good.
    """
    return applied(live) != applied(wanted)


def applied(child: Mapping[str, Any]) -> str | None:
    """Hash of what was applied, from the object's annotation; None: it has none."""
    annotations = (child.get("metadata") or {}).get("annotations") or {}
    return annotations.get(APPLIED)


def covers(live: Any, wanted: Any, field: str = "") -> bool:
    """
    Whether `live` holds all fields of `wanted`.

    Args:
        live: a value of the live object, as JSON; None: the field is missing.
        wanted: the value to apply, as JSON.
        field: name of the field that holds both; "" for a whole object.
    """
    if live is None:
        # The API server omits empty values.
        return not wanted
    if (
        type(wanted) is str and field not in _QUANTITY
    ):  # most values: without asking what else it is
        return bool(live == wanted)
    if isinstance(wanted, dict):
        if not isinstance(live, dict):
            return False
        if field in _QUANTITIES:
            return all(same_quantity(live.get(key), value) for key, value in wanted.items())
        return all(covers(live.get(key), value, key) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, list) and _list_covers(live, wanted, field)
    if field in _QUANTITY:
        return same_quantity(live, wanted)
    # In Python, 1 equals True.
    return bool(live == wanted) and isinstance(live, bool) == isinstance(wanted, bool)


def _list_covers(live: list[Any], wanted: list[Any], field: str) -> bool:
    keys = _KEYS.get(field)
    if keys is None or not all(isinstance(entry, dict) for entry in (*live, *wanted)):
        return len(live) == len(wanted) and all(map(covers, live, wanted))
    found = {_key(entry, keys): entry for entry in live}
    return all(covers(found.get(_key(entry, keys), {}), entry) for entry in wanted)


def _key(entry: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    # As text: values from a user's podTemplate may have any type.
    return repr([entry.get(key, "TCP" if key == "protocol" else None) for key in keys])


def same_quantity(first: Any, second: Any) -> bool:
    """
    Whether two quantities have the same value.

    >>> same_quantity("1000m", 1), same_quantity("1Gi", "1G")
    (True, False)
    """
    if first == second:
        return True
    values = amount(first), amount(second)
    return None not in values and values[0] == values[1]
