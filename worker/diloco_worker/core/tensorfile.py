"""
The safetensors format, without the library: headers out, headers in. Pure.

Written by hand because the library copies every tensor into a new bytes object first, which would
stop the training thread; with header and offsets known the bytes can go from where they are.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from diloco.errors import DamagedError

_LENGTH = struct.Struct("<Q")

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""torch's word for a type → safetensors' word."""

NAMES = {code: name for name, code in CODES.items()}

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file; `lo` and `hi` are positions in the whole file."""

    name: str
    dtype: str
    """As torch prints it: "bfloat16"."""
    shape: tuple[int, ...]
    lo: int = 0
    hi: int = 0


def plan(tensors: Iterable[Entry]) -> tuple[bytes, list[Entry], int]:
    """
    Lay a file out.

    Returns: The header, the entries with their positions in the order given, the size of the file.
        The same tensors always give the same bytes.
    """
    facts: dict[str, object] = {}
    ends: list[tuple[Entry, int, int]] = []
    at = 0
    for entry in tensors:
        size = math.prod(entry.shape) * SIZES[CODES[entry.dtype]]
        facts[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + size],
        }
        ends.append((entry, at, at + size))
        at += size
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = _LENGTH.pack(len(text)) + text
    base = len(header)
    placed = [
        Entry(name=e.name, dtype=e.dtype, shape=e.shape, lo=base + lo, hi=base + hi)
        for e, lo, hi in ends
    ]
    return header, placed, base + at


def parse(data: bytes | bytearray | memoryview, size: int) -> dict[str, Entry]:
    """
    Read the header of a file of `size` bytes.

    Raises:
        DamagedError: not a safetensors file, or one that was cut short.
    """
    view = memoryview(data)
    if size < _LENGTH.size:
        raise DamagedError(
            f"safetensors: {size} bytes, expected a header of at least {_LENGTH.size}"
        )
    (length,) = _LENGTH.unpack_from(view)
    base = _LENGTH.size + length
    if base > size:
        raise DamagedError(f"safetensors: a header of {length} bytes in a file of {size}")
    try:
        facts = json.loads(bytes(view[_LENGTH.size : base]))
        entries = {
            name: Entry(
                name=name,
                dtype=NAMES[fact["dtype"]],
                shape=tuple(int(n) for n in fact["shape"]),
                lo=base + int(fact["data_offsets"][0]),
                hi=base + int(fact["data_offsets"][1]),
            )
            for name, fact in facts.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise DamagedError(f"safetensors: a header that cannot be read: {error!r}") from None
    for entry in entries.values():
        want = math.prod(entry.shape) * SIZES[CODES[entry.dtype]]
        if not base <= entry.lo <= entry.hi <= size or entry.hi - entry.lo != want:
            raise DamagedError(
                f"safetensors: {entry.name} lies at {entry.lo}..{entry.hi} of {size} bytes, its shape needs {want}"
            )
    return entries
