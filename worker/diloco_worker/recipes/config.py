"""
Converts the JSON object of DILOCO_CONFIG to a recipe's frozen dataclass; one message lists all problems.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from diloco.errors import ConfigError

C = TypeVar("C")

Ranges = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Field → (whether a value is allowed, description of what is allowed)."""


def read(cls: type[C], raw: Mapping[str, Any]) -> C:
    """
    `cls(**raw)`, with camelCase keys for its snake_case fields and every value checked.

    A fraction may be a number or a string ("3e-4"): the manifest's own fractions are quoted, and
    YAML reads 3e-4 as a string anyway. The dataclass checks ranges itself and raises ConfigError.

    Raises:
        ConfigError: unknown keys (with the closest known one), or values of another type.
    """
    types = typing.get_type_hints(cls)
    fields = {_camel(f.name): f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in raw.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(fields)}"
            problems.append(f"config.{key}: there is no such key; {hint}")
            continue
        try:
            values[fields[key]] = _value(value, types[fields[key]])
        except ValueError as error:
            problems.append(f"config.{key}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return cls(**values)


def out_of_range(config: object, ranges: Ranges) -> list[str]:
    """One sentence for each field whose value is not allowed; None is always allowed."""
    values = {name: getattr(config, name) for name in ranges}
    return [
        f"config.{_camel(name)}: {value!r} is not {ranges[name][1]}"
        for name, value in values.items()
        if value is not None and not ranges[name][0](value)
    ]


def _value(value: Any, kind: Any) -> Any:
    optional = type(None) in typing.get_args(kind)
    if optional:
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if value is None and optional:
        return None
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a number") from None
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    raise ValueError(f"{value!r} is not {names[kind]}")


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
