"""
Encodes a delta on a device: the bytes of `diloco.codec.formats`, in operations of torch.

No function waits for the device: how many blocks cannot be encoded is a tensor as well. Each operation rounds once, as
the compiled loops of the codec do; under `torch.compile`, a product and a sum may be fused, and other bytes come out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from diloco.codec import formats
from diloco.errors import ProtocolError
from diloco.model.fragments import BLOCK, CHUNK

BAD_BYTES = 8
"""Of the number that follows the payload."""

_MAGNITUDE = 0x7FFFFFFF
_TOO_LARGE_BITS = 0x7F7F8000  # as in codec/kernels.py
_TINY = 2.0**-126
_HALF = BLOCK // 2
_CHUNKS_AT_ONCE = 32  # temporary tensors of 32 MiB


def encoded_bytes(fmt: int, elements: int) -> int:
    """
    Bytes that `encode_delta` writes.

    Raises:
        ProtocolError: the format is unknown or has none on a device, or the values do not fill their blocks.
    """
    if fmt not in _ENCODERS:
        raise ProtocolError(f"wire format {fmt} is none that a device encodes")
    return formats.encoded_bytes(fmt, elements) + BAD_BYTES


def encode_delta(fmt: int, base_N: torch.Tensor, values_N: torch.Tensor) -> None:
    """
    Overwrite values with the payloads of all chunks of base − values, and the number of blocks that have none.

    Such a block has NaN, Inf or a value that the format cannot hold; the payloads are garbage then.

    Args:
        fmt: BF16, INT8 or INT4.
        base_N: fp32, contiguous, on any device.
        values_N: of the same kind; its memory is that of the result.

    Raises:
        ProtocolError: see `encoded_bytes`.
        TypeError: not contiguous fp32 vectors.
    """
    encoded_bytes(fmt, values_N.numel())
    for vector_N in (base_N, values_N):
        if vector_N.dtype != torch.float32 or vector_N.dim() != 1 or not vector_N.is_contiguous():
            found = f"{vector_N.dtype} {tuple(vector_N.shape)}"
            raise TypeError(f"expected a contiguous fp32 vector, got {found}")
    with torch.no_grad():
        out = values_N.view(torch.uint8)
        bad, at = torch.zeros(1, dtype=torch.int64, device=values_N.device), 0
        for lo, hi, rows in _groups(values_N.numel()):
            # A payload is shorter than its values: it overwrites none that are still to be read.
            payload, found_bad = _ENCODERS[fmt]((base_N[lo:hi] - values_N[lo:hi]).view(rows, -1))
            out[at : at + payload.numel()] = payload.view(-1)
            at += payload.numel()
            bad += found_bad
        out[at : at + BAD_BYTES] = bad.view(torch.uint8)


def _groups(elements: int) -> Iterator[tuple[int, int, int]]:
    """Begin, end and number of chunks that are encoded together: all but the last chunk are whole."""
    whole = elements // CHUNK
    for first in range(0, whole, _CHUNKS_AT_ONCE):
        last = min(whole, first + _CHUNKS_AT_ONCE)
        yield first * CHUNK, last * CHUNK, last - first
    if elements > whole * CHUNK:
        yield whole * CHUNK, elements, 1


def _bf16(source_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bad = _largest(source_RN) >= _TOO_LARGE_BITS
    bits_RN = source_RN.view(torch.int32)
    # Not `.to(torch.bfloat16)`: instructions that do it may flush subnormal values.
    odd_RN = (bits_RN >> 16) & 1
    half_RN = ((bits_RN + 0x7FFF + odd_RN) >> 16) & 0xFFFF
    # To 16 bits with a sign: torch has few operations without one.
    signed_RN = torch.where(half_RN > 0x7FFF, half_RN - 0x10000, half_RN).to(torch.int16)
    return signed_RN.view(torch.uint8), bad.sum()


def _int8(source_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales_K1, inverse_K1, bad = _scales(source_RN, 127)
    scaled_KB = source_RN.view(-1, BLOCK) * inverse_K1
    values_KB = ((scaled_KB + 128.5).to(torch.int32) - 128).to(torch.int8)
    return _joined(len(source_RN), scales_K1, values_KB.view(torch.uint8)), bad


def _int4(source_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales_K1, inverse_K1, bad = _scales(source_RN, 7)
    scaled_KB = source_RN.view(-1, BLOCK) * inverse_K1
    digits_KB = (scaled_KB + 8.5).to(torch.int32)
    pairs_KH = digits_KB[:, :_HALF] | (digits_KB[:, _HALF:] << 4)
    return _joined(len(source_RN), scales_K1, (pairs_KH & 0xFF).to(torch.uint8)), bad


def _scales(source_RN: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale and reciprocal of each block, shape (K, 1), and the number of blocks that have none."""
    top_K = _largest(source_RN)
    # Between tensors: by a number, a GPU multiplies with its reciprocal, which rounds twice.
    largest_K = top_K.view(torch.float32)
    scales_K = (largest_K / torch.full_like(largest_K, steps)).clamp(min=_TINY)
    inverse_K = torch.ones_like(scales_K) / scales_K
    return scales_K.view(-1, 1), inverse_K.view(-1, 1), (top_K >= _TOO_LARGE_BITS).sum()


def _joined(rows: int, scales_K1: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of each chunk the scales, then the values."""
    scales = scales_K1.contiguous().view(rows, -1).view(torch.uint8)
    return torch.cat([scales, values.reshape(rows, -1)], dim=1)


def _largest(source_RN: torch.Tensor) -> torch.Tensor:
    """The bits of the largest magnitude of each block; in this order, NaN and Inf are the largest."""
    return (source_RN.view(torch.int32) & _MAGNITUDE).view(-1, BLOCK).amax(dim=1)


_ENCODERS = {formats.BF16: _bf16, formats.INT8: _int8, formats.INT4: _int4}
