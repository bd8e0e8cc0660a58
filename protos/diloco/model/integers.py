"""
Integers in a fragment, which is fp32: digits of 16 bits, which fp32 and any difference of two hold exactly. Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

DIGITS = 4
"""fp32 values of one integer of 64 bits."""

DTYPES = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})
"""Types that 64 bits with a sign hold."""

_MOST = np.float32(0xFFFF)


def to_digits(values_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """
    The digits of integers, lowest first.

    >>> to_digits(np.array([65538]))
    array([2., 1., 0., 0.], dtype=float32)
    """
    return np.ascontiguousarray(values_N, "<i8").reshape(-1).view("<u2").astype(np.float32)


def from_digits(digits_N: npt.NDArray[np.float32], dtype: str = "int64") -> npt.NDArray[Any]:
    """
    The integers of `to_digits`, cast to one of DTYPES; what is no digit becomes the nearest one.

    >>> from_digits(to_digits(np.array([-3, 1 << 40])))
    array([           -3, 1099511627776])
    """
    digits = np.clip(np.rint(digits_N), np.float32(0), _MOST).astype("<u2")
    return digits.view("<i8").astype(dtype)
