r"""
Wire formats: fp32 values ↔ payloads.

Pure: no I/O, no clock. A *payload* is one chunk of a fragment in one format (`bulk_pb2.Format`). All
numbers are little-endian, all element counts multiples of `fragments.BLOCK`:

| format | payload | values |
| --- | --- | --- |
| FP32 | f32[N] | as they are |
| BF16 | u16[N] | upper half of f32, rounded to nearest, ties to even |
| INT8 | f32[K], i8[N] | K = N / 128 scales, then q in −127..127; value = scale · q |
| INT4 | f32[K], u8[N / 2] | q in 1..15; value = scale · (q − 8); byte j of a block = q[j] \| q[j + 64] << 4 |
| RAW | u8[N] | the bytes of a file, never encoded |

Differs from the paper: it names int4 but gives no scheme; blocks, scales and rounding are ours.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from diloco.codec import kernels
from diloco.errors import ConfigError, DamagedError, NotFiniteError, ProtocolError
from diloco.model.fragments import BLOCK, Fragment
from diloco.v1 import bulk_pb2

FP32: int = bulk_pb2.FP32
BF16: int = bulk_pb2.BF16
INT8: int = bulk_pb2.INT8
INT4: int = bulk_pb2.INT4
RAW: int = bulk_pb2.RAW

F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = "bytes | bytearray | memoryview | U8"

_FORMATS = {"FP32": FP32, "BF16": BF16, "Int8": INT8, "Int4": INT4}
_VALUE_BITS = {FP32: 32, BF16: 16, INT8: 8, INT4: 4, RAW: 8}
_SCALED = (INT8, INT4)


def format_of(name: str) -> int:
    """The `bulk_pb2.Format` of its name in a RunSpec: FP32, BF16, Int8, Int4."""
    try:
        return _FORMATS[name]
    except KeyError:
        raise ConfigError(f"wire format: {name!r} is not one of {', '.join(_FORMATS)}") from None


def of_fragment(name: str, fragment: Fragment) -> int:
    """
    The format in which a fragment travels if `name` is the job's.

    Buffers travel in FP32: the rounding error of a delta can exceed a small variance, and make it negative.
    """
    return FP32 if fragment.buffers else format_of(name)


def encoded_bytes(fmt: int, elements: int) -> int:
    """
    Length of the payload of `elements` values (for RAW: bytes).

    Raises:
        ProtocolError: the format is unknown, or the values do not fill their blocks.
    """
    if fmt not in _VALUE_BITS:
        raise ProtocolError(
            f"wire format {fmt} is not one of FP32, BF16, INT8, INT4, RAW; update the older program"
        )
    if elements < 0 or (fmt != RAW and elements % BLOCK):
        raise ProtocolError(f"{elements} elements are not a multiple of the block of {BLOCK}")
    scales = 4 * (elements // BLOCK) if fmt in _SCALED else 0
    return scales + elements * _VALUE_BITS[fmt] // 8


def encode(fmt: int, source_N: F32, out: U8, *, residual_N: F32 | None = None) -> int:
    """
    Write the payload of `source_N` to the start of `out`.

    Args:
        fmt: FP32, BF16, INT8 or INT4.
        source_N: fp32, contiguous.
        out: uint8, contiguous, writable, at least `encoded_bytes(fmt, N)` long, at an address
            divisible by 4.
        residual_N: error feedback. source + residual is encoded, and the rounding error
            becomes the residual.

    Returns:
        The number of bytes written.

    Raises:
        NotFiniteError: a value is NaN or Inf, or too large for bf16. `out` holds garbage, the
            residual is untouched.
    """
    _check(source_N)
    size = encoded_bytes(fmt, source_N.size)
    if out.size < size:
        raise ProtocolError(f"a buffer of {out.size} bytes for a payload of {size}")
    values, scales = _split(fmt, out[:size])
    if residual_N is None:
        bad = _encode(fmt, source_N, values, scales)
    else:
        wanted_N = np.empty_like(source_N)
        np.add(source_N, residual_N, out=wanted_N)
        bad = _encode(fmt, wanted_N, values, scales)
        if not bad:
            decode(fmt, out[:size], residual_N)
            np.subtract(wanted_N, residual_N, out=residual_N)
    if bad:
        raise NotFiniteError(
            f"{bad} of {source_N.size // BLOCK} blocks hold NaN, Inf or a value that "
            f"{_name(fmt)} cannot hold; nothing was encoded; check the loss and the learning rate"
        )
    return size


def decode(fmt: int, payload: Buffer, out_N: F32, *, part: tuple[int, int] | None = None) -> float:
    """
    Write the values of a payload to `out_N`.

    Args:
        fmt: FP32, BF16, INT8 or INT4.
        payload: written by `encode`.
        out_N: fp32, contiguous; as long as the payload, or as `part`.
        part: element range [lo, hi) of the payload, multiples of BLOCK; None: all.

    Returns:
        The sum of squares of the values, in float64.

    Raises:
        DamagedError: the payload has another length than `out_N` needs.
        NotFiniteError: a value is NaN or Inf. `out_N` holds garbage.
    """
    values, scales = _parts(fmt, payload, out_N, part)
    if fmt == FP32:
        total = kernels.decode_fp32(values, out_N)
    elif fmt == BF16:
        total = kernels.decode_bf16(values, out_N)
    elif fmt == INT8:
        total = kernels.decode_int8(values, scales, out_N)
    else:
        total = kernels.decode_int4(values, scales, out_N)
    return _finite(total)


def accumulate(
    fmt: int, payload: Buffer, acc_N: F32, scale: float, *, part: tuple[int, int] | None = None
) -> float:
    """
    acc += scale · values, in fp32, without storing the values; otherwise as `decode`.

    Returns:
        The sum of squares of the values (not scaled), in float64.

    Raises:
        DamagedError: the payload has another length than `acc_N` needs.
        NotFiniteError: a value is NaN or Inf. `acc_N` holds garbage.
    """
    values, scales = _parts(fmt, payload, acc_N, part)
    factor = np.float32(scale)
    if fmt == FP32:
        total = kernels.accumulate_fp32(values, acc_N, factor)
    elif fmt == BF16:
        total = kernels.accumulate_bf16(values, acc_N, factor)
    elif fmt == INT8:
        total = kernels.accumulate_int8(values, scales, acc_N, factor)
    else:
        total = kernels.accumulate_int4(values, scales, acc_N, factor)
    return _finite(total)


def address_of(array: npt.NDArray[Any]) -> int:
    """Where its data lies; `array.ctypes` would import and make objects for it."""
    address: int = array.__array_interface__["data"][0]
    return address


def slot_norms(fragment: Fragment, flat_N: F32) -> list[float]:
    """
    L2 norm of every tensor of the fragment, in fragment order, summed in float64.

    NaN or Inf where the tensor holds one.
    """
    view_N = kernels.read_only(flat_N)
    return [
        math.sqrt(kernels.square_sum(view_N[slot.offset : slot.end])) for slot in fragment.slots
    ]


def warm_up() -> None:
    """Compile or load every kernel, so that no first chunk waits for a compiler."""
    kernels.warm_up()


def _encode(fmt: int, source_N: F32, values: npt.NDArray[Any], scales: Any) -> int:
    view_N = kernels.read_only(source_N)
    bits_N = view_N.view(np.uint32)
    if fmt == FP32:
        return int(kernels.encode_fp32(bits_N, values.view(np.uint32)))
    if fmt == BF16:
        return int(kernels.encode_bf16(bits_N, values))
    if fmt == INT8:
        return int(kernels.encode_int8(view_N, bits_N, scales, values))
    return int(kernels.encode_int4(view_N, bits_N, scales, values))


def _parts(
    fmt: int, payload: Buffer, target_N: F32, part: tuple[int, int] | None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Values and scales of `part` of a payload, as long as `target_N`, aligned and read-only."""
    _check(target_N)
    raw = np.frombuffer(payload, np.uint8)
    lo, hi = part or (0, target_N.size)
    if lo % BLOCK or hi % BLOCK or hi - lo != target_N.size or lo < 0:
        raise ProtocolError(
            f"part [{lo}, {hi}) does not fit {target_N.size} elements in blocks of {BLOCK}"
        )
    blocks, rest = divmod(raw.size, encoded_bytes(fmt, BLOCK))
    if rest or blocks * BLOCK < hi or (part is None and blocks * BLOCK != hi):
        raise DamagedError(
            f"payload of {raw.size} bytes, expected {encoded_bytes(fmt, hi)} "
            f"for {hi} elements of {_name(fmt)}"
        )
    if address_of(raw) % 4:
        raw = raw.copy()
    values, scales = _split(fmt, kernels.read_only(raw))
    first, last = (lo, hi) if fmt != INT4 else (lo // 2, hi // 2)
    return values[first:last], scales[lo // BLOCK : hi // BLOCK]


def _split(fmt: int, raw: U8) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The values and the scales (empty without blocks) inside a payload, as views."""
    if address_of(raw) % 4:
        raise ProtocolError("a payload must start at an address divisible by 4")
    if fmt == FP32:
        return raw.view(np.float32), raw[:0].view(np.float32)
    if fmt == BF16:
        return raw.view(np.uint16), raw[:0].view(np.float32)
    if fmt not in _SCALED:
        raise ProtocolError(f"format {_name(fmt)} carries a file, not numbers")
    edge = 4 * (raw.size // encoded_bytes(fmt, BLOCK))
    return raw[edge:].view(np.int8 if fmt == INT8 else np.uint8), raw[:edge].view(np.float32)


def _check(vector: npt.NDArray[Any]) -> None:
    # Any other type would compile a kernel that misreads the bytes.
    if vector.dtype != np.float32 or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise TypeError(f"expected a contiguous fp32 vector, got {vector.dtype} {vector.shape}")


def _name(fmt: int) -> str:
    return bulk_pb2.Format.Name(bulk_pb2.Format.ValueType(fmt))


def _finite(total: float) -> float:
    if not math.isfinite(total):
        raise NotFiniteError("a payload holds NaN or Inf and must not be merged")
    return total
