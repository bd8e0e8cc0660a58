"""
Compiled loops of the merge.

Pure: arrays in, arrays out; every kernel releases the GIL. They check nothing: the caller ensures
lengths (multiples of `BLOCK`), formats and alignment.

Four members are summed in one loop, and an average, which needs no norm first, makes the outer step
tile by tile: memory serves many streams at once, and what several loops read comes from the cache.

The order of every sum is written down (codec/kernels.py): the same bytes on every CPU of an
architecture.

Shape letters used in this file:
    N = elements of one segment, M = members, T = elements of one tile of it,
    G = GROUP, B = BLOCK: lanes of a sum of squares
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from diloco.codec import kernels as codec
from diloco.codec.kernels import kernel, square_sum
from diloco.model.fragments import BLOCK
from diloco.v1 import bulk_pb2

__all__ = ["PAYLOAD", "merge_average", "merge_radial", "square_sum", "step"]

TILE = 1 << 14
GROUP = 4
STRIP = 1 << 13  # what several loops read one after the other stays in the second cache of the core

PAYLOAD = np.dtype([("format", np.int64), ("values", np.int64), ("scales", np.int64)])
"""
A chunk as the kernels see it: bulk_pb2.Format, address of the first value, address of the first
scale (ignored for fp32 and bf16). Addresses, because numba has no cheap list of arrays.
"""

_FP32 = int(bulk_pb2.FP32)
_BF16 = int(bulk_pb2.BF16)
_INT8 = int(bulk_pb2.INT8)


def _to_pointer(_typing: Any, _address: Any) -> Any:
    """The address as a pointer; the caller of a kernel keeps the memory behind it alive."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return numba.types.voidptr(numba.types.int64), code


_pointer: Any = intrinsic(_to_pointer)


@kernel
def _values(payload: Any, start: Any, scratch_T: Any) -> Any:
    """As many values of a chunk as fit, from `start` on: in place, or decoded to `scratch_T`."""
    size = scratch_T.size
    if payload.format == _FP32:
        return carray(_pointer(payload.values + 4 * start), size, np.float32)
    if payload.format == _BF16:
        half_T = carray(_pointer(payload.values + 2 * start), size, np.uint16)
        codec.decode_bf16(half_T, scratch_T)
        return scratch_T
    blocks = size // BLOCK
    scales = carray(_pointer(payload.scales + 4 * (start // BLOCK)), blocks, np.float32)
    if payload.format == _INT8:
        q_T = carray(_pointer(payload.values + start), size, np.int8)
        codec.decode_int8(q_T, scales, scratch_T)
    else:
        pairs = carray(_pointer(payload.values + start // 2), size // 2, np.uint8)
        codec.decode_int4(pairs, scales, scratch_T)
    return scratch_T


@kernel
def _four(payloads_M: Any, m: Any, start: Any, size: Any, used: Any, scratch_GT: Any) -> Any:
    """Values of members m to m + 3, without padding; the last member again where there are fewer."""
    last = payloads_M.size - 1
    x0_T = _values(payloads_M[m], start, scratch_GT[0, :size])
    x1_T = _values(payloads_M[min(m + 1, last)], start, scratch_GT[1, :size])
    x2_T = _values(payloads_M[min(m + 2, last)], start, scratch_GT[2, :size])
    x3_T = _values(payloads_M[min(m + 3, last)], start, scratch_GT[3, :size])
    return x0_T[:used], x1_T[:used], x2_T[:used], x3_T[:used]


@kernel
def _factor(factors_M: Any, m: Any) -> Any:
    """Of a member; 0 past the last one."""
    return factors_M[m] if m < factors_M.size else np.float32(0)


@kernel
def _lane_sums(lanes_MB: Any, squares_M: Any) -> None:
    for m in range(squares_M.size):
        squares_M[m] = codec.lane_sum(lanes_MB[m])


@kernel
def _zero(x_T: Any) -> None:
    for i in range(x_T.size):
        x_T[i] = 0


@kernel
def _add(x_G: Any, lo: Any, factors_M: Any, m: Any, total: Any, lanes_MB: Any) -> None:
    """
    total += Σ factor·v over four members, for the strip of their tiles that begins at `lo`.

    lanes += v² of each member, unless there is no room.
    """
    hi = lo + total.size
    x0, x1, x2, x3 = x_G[0][lo:hi], x_G[1][lo:hi], x_G[2][lo:hi], x_G[3][lo:hi]
    f0, f1 = _factor(factors_M, m), _factor(factors_M, m + 1)
    f2, f3 = _factor(factors_M, m + 2), _factor(factors_M, m + 3)
    for i in range(total.size):
        total[i] += f0 * x0[i] + f1 * x1[i] + f2 * x2[i] + f3 * x3[i]
    _add_squares(x0, m, lanes_MB)
    _add_squares(x1, m + 1, lanes_MB)
    _add_squares(x2, m + 2, lanes_MB)
    _add_squares(x3, m + 3, lanes_MB)


@kernel
def _add_squares(x_T: Any, m: Any, lanes_MB: Any) -> None:
    if m < lanes_MB.shape[0]:
        codec.add_squares(x_T, lanes_MB[m])


@kernel
def _add_and_step(
    x_G: Any,
    lo: Any,
    factors_M: Any,
    m: Any,
    theta: Any,
    momentum: Any,
    new_theta: Any,
    new_momentum: Any,
    factors: Any,
    delta: Any,
    lanes_MB: Any,
) -> None:
    """
    As `_add` with the last members, whose total is `delta` then, and the outer step with it.

    One loop: the strip is not read again where memory is the limit.
    """
    hi = lo + new_theta.size
    x0, x1, x2, x3 = x_G[0][lo:hi], x_G[1][lo:hi], x_G[2][lo:hi], x_G[3][lo:hi]
    f0, f1 = _factor(factors_M, m), _factor(factors_M, m + 1)
    f2, f3 = _factor(factors_M, m + 2), _factor(factors_M, m + 3)
    learning_rate, mu, from_delta, from_momentum = factors
    for i in range(new_theta.size):
        total = new_momentum[i] + (f0 * x0[i] + f1 * x1[i] + f2 * x2[i] + f3 * x3[i])
        buf = mu * momentum[i] + total
        delta[i] = total
        new_momentum[i] = buf
        new_theta[i] = theta[i] - learning_rate * (from_delta * total + from_momentum * buf)
    _add_squares(x0, m, lanes_MB)
    _add_squares(x1, m + 1, lanes_MB)
    _add_squares(x2, m + 2, lanes_MB)
    _add_squares(x3, m + 3, lanes_MB)


@kernel
def _add_sizes(theta: Any, new_theta: Any, sizes_2B: Any) -> None:
    """sizes += Θ² before and after."""
    codec.add_squares_fp32(theta, sizes_2B[0])
    codec.add_squares_fp32(new_theta, sizes_2B[1])


@kernel
def _bound(
    payloads_M: Any, start: Any, used: Any, theta_T: Any, new_theta_T: Any, scratch_GT: Any
) -> None:
    """Θ between the smallest and the largest Θ − v of the members: a mean leaves them only by rounding."""
    size = new_theta_T.size
    least_T, most_T = scratch_GT[1, :used], scratch_GT[2, :used]
    for m in range(payloads_M.size):
        x_T = _values(payloads_M[m], start, scratch_GT[0, :size])
        for i in range(used):
            value = theta_T[i] - x_T[i]
            least_T[i] = value if m == 0 else min(least_T[i], value)
            most_T[i] = value if m == 0 else max(most_T[i], value)
    for i in range(used):
        new_theta_T[i] = min(max(new_theta_T[i], least_T[i]), most_T[i])


@kernel
def _outer(
    theta: Any,
    momentum: Any,
    new_theta: Any,
    new_momentum: Any,
    scale: Any,
    factors: Any,
) -> None:
    """The outer step of a strip with Δ = scale · `new_momentum`."""
    learning_rate, mu, from_delta, from_momentum = factors
    for i in range(new_theta.size):
        delta = scale * new_momentum[i]
        buf = mu * momentum[i] + delta
        new_momentum[i] = buf
        new_theta[i] = theta[i] - learning_rate * (from_delta * delta + from_momentum * buf)


@kernel
def _encode(new_theta_T: Any, encoded_T: Any) -> Any:
    """To bf16 (uint16) or fp32 (uint32); returns how many blocks the format cannot hold."""
    bits_T = new_theta_T.view(np.uint32)
    if encoded_T.itemsize == 2:
        return codec.encode_bf16(bits_T, encoded_T)
    return codec.encode_fp32(bits_T, encoded_T)


@kernel
def merge_radial(
    payloads_M: Any,
    start: Any,
    used: Any,
    squares_M: Any,
    factors_M: Any,
    shares_M: Any,
    u_N: Any,
    mean_N: Any,
) -> Any:
    """
    u = Σ factor·v and mean = Σ share·v, each in the order of members.

    Args:
        payloads_M: of dtype PAYLOAD: the chunk of each member.
        start: where the segment begins in the chunk.
        used: elements of the segment from here on are padding: zero, whatever was sent.
        squares_M: receives Σ v² of each member; NaN or Inf if it holds one.
        factors_M, shares_M: fp32.
        u_N, mean_N: receive the sums.

    Returns:
        Σ u².
    """
    scratch_GT = np.empty((GROUP, TILE), np.float32)
    lanes_MB, lanes_B = np.zeros((payloads_M.size, BLOCK)), np.zeros(BLOCK)
    for lo in range(0, u_N.size, TILE):
        u_T, mean_T = u_N[lo : lo + TILE], mean_N[lo : lo + TILE]
        _zero(u_T)
        _zero(mean_T)
        n = max(0, min(u_T.size, used - lo))
        for m in range(0, payloads_M.size, GROUP):
            x_G = _four(payloads_M, m, start + lo, u_T.size, n, scratch_GT)
            for at in range(0, n, STRIP):
                end = min(at + STRIP, n)
                _add(x_G, at, factors_M, m, u_T[at:end], lanes_MB)
                _add(x_G, at, shares_M, m, mean_T[at:end], lanes_MB[:0])
        codec.add_squares(u_T, lanes_B)
    _lane_sums(lanes_MB, squares_M)
    return codec.lane_sum(lanes_B)


@kernel
def merge_average(
    payloads_M: Any,
    start: Any,
    used: Any,
    squares_M: Any,
    factors_M: Any,
    theta_N: Any,
    momentum_N: Any,
    new_theta_N: Any,
    new_momentum_N: Any,
    encoded_N: Any,
    sizes_2: Any,
    bounded: Any,
    learning_rate: Any,
    mu: Any,
    from_delta: Any,
    from_momentum: Any,
) -> Any:
    """
    Δ = Σ factor·v, and `step` with it.

    Args: as of `merge_radial` and `step`, and
        bounded: Θ stays between the values of the members. Only without an outer optimizer.

    Returns:
        Σ Δ², and how many blocks of Θ the payload cannot hold.
    """
    scratch_GT = np.empty((GROUP, TILE), np.float32)
    lanes_MB, lanes_B = np.zeros((payloads_M.size, BLOCK)), np.zeros(BLOCK)
    sizes_2B = np.zeros((2, BLOCK), np.float32)
    delta_S = np.empty(STRIP, np.float32)
    factors = learning_rate, mu, from_delta, from_momentum
    bad = 0
    for lo in range(0, theta_N.size, TILE):
        theta_T, momentum_T = theta_N[lo : lo + TILE], momentum_N[lo : lo + TILE]
        new_theta_T, new_momentum_T = new_theta_N[lo : lo + TILE], new_momentum_N[lo : lo + TILE]
        n = max(0, min(new_theta_T.size, used - lo))
        _zero(new_theta_T[n:])
        _zero(new_momentum_T[n:])
        for m in range(0, payloads_M.size, GROUP):
            x_G = _four(payloads_M, m, start + lo, new_theta_T.size, n, scratch_GT)
            for at in range(0, n, STRIP):
                end = min(at + STRIP, n)
                after, momentum = new_theta_T[at:end], new_momentum_T[at:end]
                if m == 0:
                    _zero(momentum)
                if m + GROUP < payloads_M.size:
                    _add(x_G, at, factors_M, m, momentum, lanes_MB)
                    continue
                before, delta = theta_T[at:end], delta_S[: end - at]
                _add_and_step(
                    x_G, at, factors_M, m, before, momentum_T[at:end], after, momentum, factors,
                    delta, lanes_MB,
                )  # fmt: skip
                codec.add_squares(delta, lanes_B)
                _add_sizes(before, after, sizes_2B)
        if bounded:
            _bound(payloads_M, start + lo, n, theta_T, new_theta_T, scratch_GT)
        bad += _encode(new_theta_T, encoded_N[lo : lo + TILE])
    _lane_sums(lanes_MB, squares_M)
    _lane_sums(sizes_2B, sizes_2)
    return codec.lane_sum(lanes_B), bad


@kernel
def step(
    theta_N: Any,
    momentum_N: Any,
    new_theta_N: Any,
    new_momentum_N: Any,
    encoded_N: Any,
    sizes_2: Any,
    scale: Any,
    learning_rate: Any,
    mu: Any,
    from_delta: Any,
    from_momentum: Any,
) -> Any:
    """
    buf ← μ·buf + Δ;  Θ ← Θ − lr·(from_delta·Δ + from_momentum·buf);  Δ = scale · `new_momentum_N`.

    Δ is taken from where buf goes: one array less to hold apart, which keeps the loop vectorized.

    Args:
        theta_N, momentum_N: before.
        new_theta_N, new_momentum_N: receive Θ and buf; the latter brings Δ / scale.
        encoded_N: receives Θ as a payload of bf16 (uint16) or fp32 (uint32) values.
        sizes_2: receives Σ Θ² before and after, summed in fp32: it only has to show a tenfold growth.
        scale, learning_rate, mu, from_delta, from_momentum: fp32.

    Returns:
        How many blocks of Θ the payload cannot hold: NaN, Inf, too large.
    """
    sizes_2B = np.zeros((2, BLOCK), np.float32)
    factors = learning_rate, mu, from_delta, from_momentum
    bad = 0
    for lo in range(0, theta_N.size, STRIP):
        hi = min(lo + STRIP, theta_N.size)
        theta, momentum, new_theta = theta_N[lo:hi], momentum_N[lo:hi], new_theta_N[lo:hi]
        _outer(theta, momentum, new_theta, new_momentum_N[lo:hi], scale, factors)
        _add_sizes(theta, new_theta, sizes_2B)
        bad += _encode(new_theta, encoded_N[lo:hi])
    _lane_sums(sizes_2B, sizes_2)
    return bad
