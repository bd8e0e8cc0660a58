"""
The safetensors format and its element types: writes and parses headers. Pure.

The library would copy every tensor into a new bytes object and so stop the training thread. With
the header and the offsets known, the bytes go to the file from where they are.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from diloco.errors import DamagedError

_LENGTH = struct.Struct("<Q")


class DType(NamedTuple):
    """An element type."""

    code: str
    """Its name in safetensors files."""
    size: int
    """Bytes of one element."""


DTYPES: Mapping[str, DType] = {
    "float64": DType("F64", 8),
    "float32": DType("F32", 4),
    "float16": DType("F16", 2),
    "bfloat16": DType("BF16", 2),
    "int64": DType("I64", 8),
    "int32": DType("I32", 4),
    "int16": DType("I16", 2),
    "int8": DType("I8", 1),
    "uint8": DType("U8", 1),
    "bool": DType("BOOL", 1),
    "uint16": DType("U16", 2),
    "uint32": DType("U32", 4),
    "uint64": DType("U64", 8),
    "complex64": DType("C64", 8),
    "float8_e4m3fn": DType("F8_E4M3", 1),
    "float8_e5m2": DType("F8_E5M2", 1),
}
"""By the name that torch and, where it has the type, numpy use."""

_NAMES = {dtype.code: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file; its bytes are [lo, hi) of the file."""

    name: str
    dtype: str
    """A key of DTYPES."""
    shape: tuple[int, ...]
    lo: int = 0
    hi: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that shape and type need."""
        return math.prod(self.shape) * DTYPES[self.dtype].size


def plan(
    tensors: Iterable[Entry], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[Entry], int]:
    """
    Lay out a file.

    Args:
        tensors: their positions are ignored.
        metadata: texts that are kept in the header.

    Returns:
        The header, the entries with their positions in the order given, the size of the file.
        The same tensors always give the same bytes.
    """
    facts: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends: list[tuple[Entry, int, int]] = []
    at = 0
    for entry in tensors:
        size = entry.size_bytes
        facts[entry.name] = {
            "dtype": DTYPES[entry.dtype].code,
            "shape": list(entry.shape),
            "data_offsets": [at, at + size],
        }
        ends.append((entry, at, at + size))
        at += size
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the tensors behind it: keep them aligned
    header = _LENGTH.pack(len(text)) + text
    base = len(header)
    placed = [
        Entry(name=e.name, dtype=e.dtype, shape=e.shape, lo=base + lo, hi=base + hi)
        for e, lo, hi in ends
    ]
    return header, placed, base + at


def parse(data: bytes | bytearray | memoryview, size: int) -> dict[str, Entry]:
    """
    Parse the header of a file of `size` bytes; `data` is the file, or at least its header.

    Returns:
        The tensors by name, in the order of the header.

    Raises:
        DamagedError: not a safetensors file, or its tensors do not fill it without gap or overlap.
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
                dtype=_NAMES[fact["dtype"]],
                shape=tuple(int(n) for n in fact["shape"]),
                lo=base + int(fact["data_offsets"][0]),
                hi=base + int(fact["data_offsets"][1]),
            )
            for name, fact in facts.items()
            if name != "__metadata__"
        }
    except (
        *(ValueError, TypeError, KeyError, AttributeError, IndexError),
        *(OverflowError, RecursionError),
    ) as error:
        raise DamagedError(f"safetensors: the header cannot be read: {error!r}") from None
    # A file whose tensors overlap would grow when it is written again.
    end = base
    for entry in sorted(entries.values(), key=lambda e: (e.lo, e.hi)):
        if min(entry.shape, default=0) < 0 or (entry.lo, entry.hi) != (end, end + entry.size_bytes):
            raise DamagedError(
                f"safetensors: {entry.name} of shape {list(entry.shape)} lies at bytes {entry.lo}..{entry.hi}, "
                f"expected {end}..{end + entry.size_bytes}"
            )
        end = entry.hi
    if end != size:
        raise DamagedError(f"safetensors: the tensors end at byte {end} of {size}")
    return entries
