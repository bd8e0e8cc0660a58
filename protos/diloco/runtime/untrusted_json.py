"""
Reads JSON that a user's program or a peer wrote: whatever it holds, the only error is ValueError.
Standard library only.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_LEVELS = 64
"""Nesting of lists and objects; what handles values by recursion, such as str(), needs a bound."""


def parse(text: str | bytes, *, finite: bool = True) -> Any:
    """
    The value of a JSON text.

    Args:
        text: of bounded length.
        finite: refuse NaN and numbers beyond those of a float, of which int() or float() may raise OverflowError.

    Raises:
        ValueError: it is not JSON, nested too deeply, or has a number that is refused.
    """
    try:
        if finite:
            value = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
        else:
            value = json.loads(text)
    except RecursionError:
        value, levels = None, MAX_LEVELS + 1
    else:
        levels = _levels(value)
    if levels > MAX_LEVELS:
        raise ValueError(f"nested too deeply, expected at most {MAX_LEVELS} levels")
    return value


def _levels(value: Any) -> int:
    """How deep lists and objects are nested, as far as MAX_LEVELS + 1."""
    level, depth = [value], 0
    while level := [inner for inner in level if isinstance(inner, (list, dict))]:
        depth += 1
        if depth > MAX_LEVELS:
            break
        level = [
            item
            for inner in level
            for item in (inner.values() if isinstance(inner, dict) else inner)
        ]
    return depth


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]}, expected a finite one")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)
