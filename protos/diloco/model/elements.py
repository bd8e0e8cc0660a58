"""Element types of tensors in files: their bytes as numbers, and numbers as another type. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.errors import ConfigError

Values = npt.NDArray[Any]


def numbers(raw: bytes | bytearray | memoryview, dtype: str) -> Values:
    """
    The elements of a tensor's bytes, exactly, in a type with which numpy computes.

    Args:
        raw: the elements, little-endian.
        dtype: one of `tensorfile.DTYPES`.

    Returns:
        float32 for bfloat16 and float16, otherwise the type itself; not writable if `raw` is not.

    Raises:
        ConfigError: numpy has no such type.
    """
    if dtype == "bfloat16":
        return _of_bfloat16(np.frombuffer(raw, np.uint16))
    try:
        values = np.frombuffer(raw, np.dtype(dtype))
    except TypeError:
        raise ConfigError(f"elements of type {dtype} cannot be converted to another type") from None
    return values.astype(np.float32) if dtype == "float16" else values


def rounded(values: Values, dtype: str) -> bytes:
    """
    Floating-point numbers as elements of another type, rounded to nearest, ties to even.

    Args:
        values: float64, float32 or float16.
        dtype: float32, bfloat16 or float16.

    Returns:
        The elements, little-endian.

    Raises:
        ConfigError: a finite value is too large for `dtype`.
    """
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        nearest = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        halves = np.where(np.isnan(values), np.uint32(0x7FC0), nearest).astype(np.uint16)
        raw, back = halves.tobytes(), _of_bfloat16(halves)
    else:
        with np.errstate(over="ignore"):
            back = values.astype(np.dtype(dtype))
        raw = back.tobytes()
    lost = np.isinf(back) & np.isfinite(values)
    if lost.any():
        raise ConfigError(f"{values[lost][0]:.6g} is too large for {dtype}")
    return raw


def _of_bfloat16(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (halves.astype(np.uint32) << 16).view(np.float32)
