"""
Messages of a bulk stream: a payload in a 16-byte envelope with its kind, index and checksum. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import xxhash

from diloco.codec.formats import Buffer
from diloco.errors import DamagedError, ProtocolError

_PREFIX = struct.Struct("<IIQ")
PREFIX_BYTES: int = _PREFIX.size


class Kind(IntEnum):
    """What a message of a bulk stream holds."""

    CHUNK = 0
    END = 1
    HEADER = 2
    TRAILER = 3
    """Also every reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A verified message; `payload` is a view of it, not a copy."""

    kind: Kind
    index: int
    payload: memoryview


def pack(kind: int, index: int, payload: Buffer = b"") -> bytes:
    """A message: prefix and payload in one new bytes object (gRPC takes nothing else); one copy."""
    parts: tuple[Any, ...] = (_PREFIX.pack(index, kind, _checksum(kind, index, payload)), payload)
    return b"".join(parts)


def unpack(message: bytes) -> Envelope:
    """
    Verify a message and split it.

    Raises:
        DamagedError: shorter than its prefix, an unknown kind, or any byte differs from what was
            packed.
    """
    if len(message) < PREFIX_BYTES:
        raise DamagedError(
            f"message of {len(message)} bytes is shorter than its prefix of {PREFIX_BYTES}"
        )
    index, kind, stated = _PREFIX.unpack_from(message)
    payload = memoryview(message)[PREFIX_BYTES:]
    found = _checksum(kind, index, payload)
    if found != stated:
        raise DamagedError(
            f"message {index} of {len(payload)} bytes has checksum {found:016x}, "
            f"its prefix states {stated:016x}"
        )
    try:
        return Envelope(kind=Kind(kind), index=index, payload=payload)
    except ValueError:
        raise DamagedError(
            f"message kind: {kind} is not one of {[k.value for k in Kind]}; update the older program"
        ) from None


class Arrivals:
    """Chunks of a transfer that arrived undamaged, in any order, possibly repeated."""

    def __init__(self, chunks: int) -> None:
        self._missing = dict.fromkeys(range(chunks))
        self._chunks = chunks

    def received(self, index: int) -> bool:
        """
        Record an undamaged chunk; False if it had arrived before.

        Raises:
            ProtocolError: the transfer has no such chunk.
        """
        if index >= self._chunks:
            raise ProtocolError(f"chunk {index} of a transfer of {self._chunks}")
        if index not in self._missing:
            return False
        del self._missing[index]
        return True

    def missing(self) -> tuple[int, ...]:
        """Chunks that have not arrived, in order; empty when the transfer is complete."""
        return tuple(self._missing)


def _checksum(kind: int, index: int, payload: Any) -> int:
    # Seeded with the prefix, so that a flipped bit of kind or index is detected as well.
    return xxhash.xxh3_64_intdigest(payload, kind << 32 | index)
