"""
Reads JSON that a user's program or a peer wrote: whatever it holds, the only error is ValueError.
Standard library only.
"""

from __future__ import annotations

import json
import math
from typing import Any


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
        if not finite:
            return json.loads(text)
        return json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]}, expected a finite one")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)
