"""
Generated manifests: every field of the schema with values at its bounds, beyond them, and of wrong types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from diloco_job.crd import schema

Json = dict[str, Any]

HOSTILE: list[Any] = [None, True, 0, -1, 1, 2, 24, 1.5, 10**9, 2**31, 2**63 - 1, 10**20, "", "0", "1", "0.5", "eu",
     "us", "a\nb", "ü", "x" * 300, "10Gi", "-1", "1e3", "Secret", [], [1], ["a"], [{}], {}, {"a": 1},
     {"a": None}, {"name": "eu"}, [{"name": "eu", "learners": 1}] * 2]  # fmt: skip


def paths(node: Json, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every location of a manifest in its schema; lists are represented by their first entry."""
    for name, inner in node.get("properties", {}).items():
        yield (*above, name)
        yield from paths(inner, (*above, name))
        if inner.get("type") == "array":
            yield from paths(inner["items"], (*above, name, 0))


SCHEMA = schema()
PLACES = [path for path in paths(SCHEMA) if path[0] == "spec" or path == ("metadata", "name")]
"""Locations that can be set in a manifest."""


def edges(node: Json) -> list[Any]:
    """Values at the bounds of a field's own schema and one beyond."""
    if "enum" in node:
        return [*node["enum"], node["enum"][0].lower()]
    match node.get("type"):
        case "integer":
            bounds = [node["minimum"], node.get("maximum", 2**63 - 1)]
            return [bound + more for bound in bounds for more in (-1, 0, 1)] + [2, 3, 25]
        case "string":
            most = ["x" * (node["maxLength"] + more) for more in (-1, 0, 1)]
            return [*most, "", "0.5", "eu", "us", "job", "1", "0.999999999", "a:1", "[::1]:65536"]
        case "array" if node["items"].get("type") == "string":
            longest = "x" * node["items"]["maxLength"]
            counts = [["x"] * (node["maxItems"] + more) for more in (0, 1)]
            return [[], [longest], [longest + "x"], *counts]
        case "object" if "additionalProperties" in node:
            texts = node["additionalProperties"].get("maxLength", 1)
            maps = [{"a": "1" * (texts + more)} for more in (0, 1)]
            most = node["maxProperties"]
            return maps + [{str(key): "1" for key in range(most + more)} for more in (0, 1)]
        case "boolean":
            return [True, False]
        case _:
            return [{}]


def node_at(place: tuple[str | int, ...]) -> Json:
    """The schema of a place."""
    node = SCHEMA
    for part in place:
        node = node["items"] if isinstance(part, int) else node["properties"][part]
    return node


NODES = {place: node_at(place) for place in PLACES}
CHANGE = st.sampled_from(PLACES).flatmap(
    lambda place: st.tuples(st.just(place), st.sampled_from([*edges(NODES[place]), *HOSTILE]))
)
"""A place and a value for it."""


def put(data: Any, place: tuple[str | int, ...], value: Any) -> None:
    """Set a value, with everything above it that is missing."""
    *above, last = place
    for part in above:
        if isinstance(part, int):
            if not isinstance(data, list):
                return
            if not data:
                data.append({})
        elif not isinstance(data, dict):
            return
        elif not isinstance(data.get(part), dict | list):
            data[part] = [] if part in ("env", "regions", "claims") else {}
        data = data[part]
    if isinstance(data, dict):
        data[last] = value
