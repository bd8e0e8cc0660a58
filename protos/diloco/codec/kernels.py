"""
Compiled loops of the wire codec: fp32, bf16, int8 and int4 in blocks of 128.

Pure: arrays in, arrays out, no I/O, no Python objects; every kernel releases the GIL. Only `formats`
calls them, because they check nothing: it makes sizes, alignment and read-only flags uniform, so
that each kernel has exactly one machine-code version. `python -m diloco.codec.kernels` compiles all of
them into numba's cache.

Shape letters used in this file:
    N = elements, a multiple of B; B = 128 elements of one block; K = N / B blocks; H = B / 2

Every loop runs over a slice from 0: an index that may be negative costs numba the vector
instructions (3-5 times).

The same bytes on every CPU of an architecture: the order of every sum is written down. Squares are
added to B lanes, a loop that is vectorized without changing the order within a lane; the lanes are
summed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from diloco.model.fragments import BLOCK

_B = BLOCK
_H = BLOCK // 2
_INF_BITS = np.uint32(0x7F800000)
# From here on bf16 rounds to infinity, and so may 127 times the 127th part in fp32.
_TOO_LARGE_BITS = np.uint32(0x7F7F8000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_TINY = np.float32(2.0**-126)  # a smaller scale would have an infinite reciprocal
_OPTIONS: dict[str, Any] = {
    # Never fastmath: the compiler would choose the order of sums, and where to fuse a product and a
    # sum, by what the CPU has.
    "nogil": True,
    "error_model": "numpy",
}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first call; keep the machine code on disk if a folder can be written."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba found no folder for its cache
        return numba.njit(**_OPTIONS)(function)


def read_only(array: Any) -> Any:
    """A view that cannot be written, as of bytes: a kernel is compiled for one kind of array only."""
    view = array.view()
    view.flags.writeable = False
    return view


@kernel
def add_squares(x_N: Any, lanes_B: Any) -> None:
    """
    lanes += x² in float64, that of element i to lane i mod B; N need not be a multiple of B.

    Four blocks at a time, so that the lanes are loaded and stored a quarter as often.
    """
    fours = x_N.size // (4 * _B) * (4 * _B)
    for start in range(0, fours, 4 * _B):
        x0, x1 = x_N[start : start + _B], x_N[start + _B : start + 2 * _B]
        x2, x3 = x_N[start + 2 * _B : start + 3 * _B], x_N[start + 3 * _B : start + 4 * _B]
        for i in range(_B):
            a, b = np.float64(x0[i]), np.float64(x1[i])
            c, d = np.float64(x2[i]), np.float64(x3[i])
            lanes_B[i] += (a * a + b * b) + (c * c + d * d)
    for start in range(fours, x_N.size, _B):
        x = x_N[start : start + _B]
        for i in range(x.size):
            lanes_B[i] += np.float64(x[i]) * np.float64(x[i])


@kernel
def add_squares_fp32(x_N: Any, lanes_B: Any) -> None:
    """lanes += x² in fp32, for a sum that need not be exact; N need not be a multiple of B."""
    for start in range(0, x_N.size, _B):
        x = x_N[start : start + _B]
        for i in range(x.size):
            lanes_B[i] += x[i] * x[i]


@kernel
def lane_sum(lanes_B: Any) -> Any:
    """The sum of the lanes, from the first to the last."""
    total = 0.0
    for i in range(_B):
        total += lanes_B[i]
    return total


@kernel
def square_sum(x_N: Any) -> Any:
    """Σ x² in float64."""
    lanes_B = np.zeros(_B)
    add_squares(x_N, lanes_B)
    return lane_sum(lanes_B)


@kernel
def encode_fp32(bits_N: Any, out_N: Any) -> Any:
    """Copy; returns how many blocks hold a NaN or an Inf."""
    bad = 0
    for start in range(0, bits_N.size, _B):
        bits = bits_N[start : start + _B]
        out = out_N[start : start + _B]
        top = np.uint32(0)
        for i in range(_B):
            top = max(top, bits[i] & _MAGNITUDE)
            out[i] = bits[i]
        bad += int(top >= _INF_BITS)
    return bad


@kernel
def decode_fp32(x_N: Any, out_N: Any) -> Any:
    """Copy; returns Σ x²."""
    lanes_B = np.zeros(_B)
    for start in range(0, x_N.size, _B):
        x = x_N[start : start + _B]
        out = out_N[start : start + _B]
        for i in range(_B):
            out[i] = x[i]
            lanes_B[i] += np.float64(x[i]) * np.float64(x[i])
    return lane_sum(lanes_B)


@kernel
def accumulate_fp32(x_N: Any, acc_N: Any, scale: Any) -> Any:
    """acc += scale · x; returns Σ x²."""
    lanes_B = np.zeros(_B)
    for start in range(0, x_N.size, _B):
        x = x_N[start : start + _B]
        acc = acc_N[start : start + _B]
        for i in range(_B):
            acc[i] += scale * x[i]
            lanes_B[i] += np.float64(x[i]) * np.float64(x[i])
    return lane_sum(lanes_B)


@kernel
def encode_bf16(bits_N: Any, out_N: Any) -> Any:
    """
    Round to nearest, ties to even; returns how many blocks hold what bf16 cannot: NaN, Inf, above
    3.39e38.
    """
    bad = 0
    for start in range(0, bits_N.size, _B):
        bits = bits_N[start : start + _B]
        out = out_N[start : start + _B]
        top = np.uint32(0)
        for i in range(_B):
            u = bits[i]
            top = max(top, u & _MAGNITUDE)
            odd = (u >> np.uint32(16)) & np.uint32(1)
            out[i] = np.uint16((u + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        bad += int(top >= _TOO_LARGE_BITS)
    return bad


@kernel
def _widen(half: Any, bits: Any) -> None:
    for i in range(_B):
        bits[i] = np.uint32(half[i]) << np.uint32(16)


@kernel
def decode_bf16(half_N: Any, out_N: Any) -> Any:
    """Widen; returns Σ x²."""
    # Through a block of its own: reading back what was just stored in out_N costs a quarter.
    bits = np.empty(_B, np.uint32)
    x = bits.view(np.float32)
    lanes_B = np.zeros(_B)
    for start in range(0, half_N.size, _B):
        _widen(half_N[start : start + _B], bits)
        out = out_N[start : start + _B]
        for i in range(_B):
            out[i] = x[i]
            lanes_B[i] += np.float64(x[i]) * np.float64(x[i])
    return lane_sum(lanes_B)


@kernel
def accumulate_bf16(half_N: Any, acc_N: Any, scale: Any) -> Any:
    """acc += scale · x; returns Σ x²."""
    bits = np.empty(_B, np.uint32)
    x = bits.view(np.float32)
    lanes_B = np.zeros(_B)
    for start in range(0, half_N.size, _B):
        _widen(half_N[start : start + _B], bits)
        acc = acc_N[start : start + _B]
        for i in range(_B):
            acc[i] += scale * x[i]
            lanes_B[i] += np.float64(x[i]) * np.float64(x[i])
    return lane_sum(lanes_B)


@kernel
def _largest(bits: Any) -> Any:
    # As integers the magnitudes of floats keep their order, so one pass finds absmax, NaN and Inf
    # alike.
    top = np.uint32(0)
    for i in range(_B):
        top = max(top, bits[i] & _MAGNITUDE)
    return top


@kernel
def encode_int8(x_N: Any, bits_N: Any, scales_K: Any, out_N: Any) -> Any:
    """q = round(x / scale), scale = absmax / 127; returns the bad blocks as `encode_bf16`."""
    top = np.empty(1, np.uint32)
    absmax = top.view(np.float32)
    bad = 0
    for block in range(scales_K.size):
        start = block * _B
        x = x_N[start : start + _B]
        out = out_N[start : start + _B]
        top[0] = _largest(bits_N[start : start + _B])
        if top[0] >= _TOO_LARGE_BITS:
            bad += 1
            continue
        scale = max(absmax[0] / np.float32(127), _TINY)
        scales_K[block] = scale
        inverse = np.float32(1) / scale
        for i in range(_B):
            out[i] = np.int8(np.int32(x[i] * inverse + np.float32(128.5)) - np.int32(128))
    return bad


@kernel
def decode_int8(q_N: Any, scales_K: Any, out_N: Any) -> Any:
    """out = scale · q; returns Σ out²."""
    total = 0.0
    for block in range(scales_K.size):
        start = block * _B
        q = q_N[start : start + _B]
        out = out_N[start : start + _B]
        scale = scales_K[block]
        squares = np.int32(0)
        for i in range(_B):
            value = np.int32(q[i])
            out[i] = scale * np.float32(value)
            squares += value * value
        total += np.float64(scale) * np.float64(scale) * squares
    return total


@kernel
def accumulate_int8(q_N: Any, scales_K: Any, acc_N: Any, weight: Any) -> Any:
    """acc += weight · scale · q; returns Σ (scale · q)²."""
    total = 0.0
    for block in range(scales_K.size):
        start = block * _B
        q = q_N[start : start + _B]
        acc = acc_N[start : start + _B]
        scale = scales_K[block]
        factor = scale * weight
        squares = np.int32(0)
        for i in range(_B):
            value = np.int32(q[i])
            acc[i] += factor * np.float32(value)
            squares += value * value
        total += np.float64(scale) * np.float64(scale) * squares
    return total


@kernel
def encode_int4(x_N: Any, bits_N: Any, scales_K: Any, out_N2: Any) -> Any:
    """
    q = round(x / scale) in −7..7, scale = absmax / 7, stored as q + 8; byte j holds q[j] low and
    q[j + H] high.

    Returns the bad blocks as `encode_bf16`.
    """
    top = np.empty(1, np.uint32)
    absmax = top.view(np.float32)
    bad = 0
    for block in range(scales_K.size):
        start = block * _B
        low = x_N[start : start + _H]
        high = x_N[start + _H : start + _B]
        out = out_N2[block * _H : block * _H + _H]
        top[0] = _largest(bits_N[start : start + _B])
        if top[0] >= _TOO_LARGE_BITS:
            bad += 1
            continue
        scale = max(absmax[0] / np.float32(7), _TINY)
        scales_K[block] = scale
        inverse = np.float32(1) / scale
        for j in range(_H):
            first = np.uint32(np.int32(low[j] * inverse + np.float32(8.5)))
            second = np.uint32(np.int32(high[j] * inverse + np.float32(8.5)))
            out[j] = np.uint8(first | (second << np.uint32(4)))
    return bad


@kernel
def decode_int4(pairs_N2: Any, scales_K: Any, out_N: Any) -> Any:
    """out = scale · q; returns Σ out²."""
    total = 0.0
    for block in range(scales_K.size):
        start = block * _B
        pairs = pairs_N2[block * _H : block * _H + _H]
        low = out_N[start : start + _H]
        high = out_N[start + _H : start + _B]
        scale = scales_K[block]
        squares = np.int32(0)
        for j in range(_H):
            pair = np.int32(pairs[j])
            first = (pair & np.int32(15)) - np.int32(8)
            second = (pair >> np.int32(4)) - np.int32(8)
            low[j] = scale * np.float32(first)
            high[j] = scale * np.float32(second)
            squares += first * first + second * second
        total += np.float64(scale) * np.float64(scale) * squares
    return total


@kernel
def accumulate_int4(pairs_N2: Any, scales_K: Any, acc_N: Any, weight: Any) -> Any:
    """acc += weight · scale · q; returns Σ (scale · q)²."""
    total = 0.0
    for block in range(scales_K.size):
        start = block * _B
        pairs = pairs_N2[block * _H : block * _H + _H]
        low = acc_N[start : start + _H]
        high = acc_N[start + _H : start + _B]
        scale = scales_K[block]
        factor = scale * weight
        squares = np.int32(0)
        for j in range(_H):
            pair = np.int32(pairs[j])
            first = (pair & np.int32(15)) - np.int32(8)
            second = (pair >> np.int32(4)) - np.int32(8)
            low[j] += factor * np.float32(first)
            high[j] += factor * np.float32(second)
            squares += first * first + second * second
        total += np.float64(scale) * np.float64(scale) * squares
    return total


def warm_up() -> None:
    """Compile every kernel, or load it from numba's cache: so that no first chunk pays for it."""

    def given(size: int, kind: Any) -> Any:
        array = np.zeros(size, kind)
        array.flags.writeable = False
        return array

    x_N, out_N = given(_B, np.float32), np.zeros(_B, np.float32)
    bits_N, scales_K = given(_B, np.uint32), np.zeros(1, np.float32)
    weight = np.float32(1)
    square_sum(x_N)
    encode_fp32(bits_N, np.zeros(_B, np.uint32))
    decode_fp32(x_N, out_N)
    accumulate_fp32(x_N, out_N, weight)
    encode_bf16(bits_N, np.zeros(_B, np.uint16))
    decode_bf16(given(_B, np.uint16), out_N)
    accumulate_bf16(given(_B, np.uint16), out_N, weight)
    encode_int8(x_N, bits_N, scales_K, np.zeros(_B, np.int8))
    decode_int8(given(_B, np.int8), given(1, np.float32), out_N)
    accumulate_int8(given(_B, np.int8), given(1, np.float32), out_N, weight)
    encode_int4(x_N, bits_N, scales_K, np.zeros(_H, np.uint8))
    decode_int4(given(_H, np.uint8), given(1, np.float32), out_N)
    accumulate_int4(given(_H, np.uint8), given(1, np.float32), out_N, weight)


if __name__ == "__main__":
    # Under its real name: numba's cache holds what a module compiled under that module's name.
    from diloco.codec import kernels

    kernels.warm_up()
