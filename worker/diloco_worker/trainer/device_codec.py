"""
The formats of `diloco.codec.formats` in operations of torch: the same bytes, on any device.

No function waits for the device: how many blocks cannot be encoded is a tensor as well. Each operation rounds once, as
the compiled loops of the codec do; under `torch.compile`, a product and a sum may be fused, and other bytes come out.
Learners do not encode with it yet (docs/adr/0029).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diloco.codec import formats
from diloco.errors import ProtocolError
from diloco.model.fragments import BLOCK

_MAGNITUDE = 0x7FFFFFFF
_INF_BITS = 0x7F800000
_TOO_LARGE_BITS = 0x7F7F8000  # as in codec/kernels.py
_TINY = 2.0**-126
_HALF = BLOCK // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A payload on the device."""

    payload: torch.Tensor
    """uint8, `formats.encoded_bytes` long; garbage if `bad` is not 0."""
    bad: torch.Tensor
    """int64 scalar: blocks with NaN, Inf or a value that the format cannot hold."""


def encode(fmt: int, source_N: torch.Tensor, *, residual_N: torch.Tensor | None = None) -> Encoded:
    """
    As `formats.encode`.

    Args:
        fmt: FP32, BF16, INT8 or INT4.
        source_N: fp32, contiguous, on the CPU or a device.
        residual_N: error feedback on the same device: source + residual is encoded, and the rounding error becomes the
            residual, unless a block cannot be encoded.

    Raises:
        ProtocolError: the format is unknown, or the values do not fill their blocks.
        TypeError: not a contiguous fp32 vector.
    """
    formats.encoded_bytes(fmt, source_N.numel())
    _check(fmt, source_N)
    with torch.no_grad():
        wanted_N = source_N if residual_N is None else source_N + residual_N
        found = _ENCODERS[fmt](wanted_N)
        if residual_N is not None:
            rest_N = wanted_N - decode(fmt, found.payload)
            residual_N.copy_(torch.where(found.bad == 0, rest_N, residual_N))
    return found


def decode(fmt: int, payload: torch.Tensor) -> torch.Tensor:
    """
    The values of a payload, fp32; without a check of what they are.

    Raises:
        ProtocolError: the format is unknown, or the payload has no whole blocks.
    """
    size = formats.encoded_bytes(fmt, BLOCK)
    if fmt not in _ENCODERS or payload.numel() % size:
        raise ProtocolError(f"payload of {payload.numel()} bytes, expected a multiple of {size}")
    with torch.no_grad():
        if fmt == formats.FP32:
            return payload.view(torch.float32)
        if fmt == formats.BF16:
            return (payload.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
        edge = 4 * (payload.numel() // size)
        scales_K1 = payload[:edge].view(torch.float32).view(-1, 1)
        if fmt == formats.INT8:
            values_KB = payload[edge:].view(torch.int8).view(-1, BLOCK)
            return (scales_K1 * values_KB.to(torch.float32)).view(-1)
        pairs_KH = payload[edge:].view(-1, _HALF).to(torch.int32)
        digits_KB = torch.cat([pairs_KH & 15, pairs_KH >> 4], dim=1) - 8
        return (scales_K1 * digits_KB.to(torch.float32)).view(-1)


def _fp32(source_N: torch.Tensor) -> Encoded:
    bad = _largest(source_N) >= _INF_BITS
    return Encoded(payload=source_N.view(torch.uint8).clone(), bad=bad.sum())


def _bf16(source_N: torch.Tensor) -> Encoded:
    bad = _largest(source_N) >= _TOO_LARGE_BITS
    bits_N = source_N.view(torch.int32)
    # Not `.to(torch.bfloat16)`: instructions that do it may flush subnormal values.
    odd_N = (bits_N >> 16) & 1
    half_N = ((bits_N + 0x7FFF + odd_N) >> 16) & 0xFFFF
    # To 16 bits with a sign: torch has few operations without one.
    signed_N = torch.where(half_N > 0x7FFF, half_N - 0x10000, half_N).to(torch.int16)
    return Encoded(payload=signed_N.view(torch.uint8), bad=bad.sum())


def _int8(source_N: torch.Tensor) -> Encoded:
    scales_K1, inverse_K1, bad = _scales(source_N, 127)
    scaled_KB = source_N.view(-1, BLOCK) * inverse_K1
    values_KB = ((scaled_KB + 128.5).to(torch.int32) - 128).to(torch.int8)
    return _joined(scales_K1, values_KB.view(torch.uint8), bad)


def _int4(source_N: torch.Tensor) -> Encoded:
    scales_K1, inverse_K1, bad = _scales(source_N, 7)
    scaled_KB = source_N.view(-1, BLOCK) * inverse_K1
    digits_KB = (scaled_KB + 8.5).to(torch.int32)
    pairs_KH = digits_KB[:, :_HALF] | (digits_KB[:, _HALF:] << 4)
    return _joined(scales_K1, (pairs_KH & 0xFF).to(torch.uint8), bad)


def _scales(source_N: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale and reciprocal of each block, shape (K, 1), and the number of blocks that have none."""
    top_K = _largest(source_N)
    # Between tensors: by a number, a GPU multiplies with its reciprocal, which rounds twice.
    largest_K = top_K.view(torch.float32)
    scales_K = (largest_K / torch.full_like(largest_K, steps)).clamp(min=_TINY)
    inverse_K = torch.ones_like(scales_K) / scales_K
    return scales_K.view(-1, 1), inverse_K.view(-1, 1), (top_K >= _TOO_LARGE_BITS).sum()


def _joined(scales_K1: torch.Tensor, values: torch.Tensor, bad: torch.Tensor) -> Encoded:
    parts = [scales_K1.contiguous().view(-1).view(torch.uint8), values.reshape(-1)]
    return Encoded(payload=torch.cat(parts), bad=bad)


def _largest(source_N: torch.Tensor) -> torch.Tensor:
    """The bits of the largest magnitude of each block; in this order, NaN and Inf are the largest."""
    return (source_N.view(torch.int32) & _MAGNITUDE).view(-1, BLOCK).amax(dim=1)


def _check(fmt: int, vector_N: torch.Tensor) -> None:
    if fmt not in _ENCODERS:
        raise ProtocolError(f"wire format {fmt} carries a file, not numbers")
    if vector_N.dtype != torch.float32 or vector_N.dim() != 1 or not vector_N.is_contiguous():
        raise TypeError(
            f"expected a contiguous fp32 vector, got {vector_N.dtype} {tuple(vector_N.shape)}"
        )


_ENCODERS = {
    formats.FP32: _fp32, formats.BF16: _bf16, formats.INT8: _int8, formats.INT4: _int4,
}  # fmt: skip
