"""
Buffers of transfers: sized by the payload, reused while transfers run, freed when they do not.

What a link can hold at most, with R(p) and U(p) bytes for the payload of fragment p in the job's
formats (`wire.down`, `wire.up`), R and U for the largest fragment, and n = min(τ, 8) + 1 transfers
of each direction at a time (bulk.py):

    1.25 · (Σ R(p) + n · (R + U))  +  min(τ, 8) · (R + U)

that is at most one held result per fragment (core/inbox.py), the transfers in flight, each in a
buffer at most 1.25 times its payload, and the idle buffers. A result that was downloaded counts as
in flight until the protocol has decided about it. A transfer in fp32 (the initial model, a fragment
without a base in common with the syncer) or of the constants counts with its own size instead of R
or U. Not in the pool: 2 MiB of scratch per upload that is encoded, and with error feedback 8 bytes
per value of the model (what rounding lost, before and after the last upload).
"""

from __future__ import annotations

import threading

import numpy as np

from diloco.codec import formats
from diloco.model.fragments import Layout
from diloco.spec import RunSpec
from diloco_worker.link.transfer import U8

SLACK = 1.25
"""A buffer serves a payload if it is at most this much longer."""

MAX_TRANSFERS = 8
"""Rounds in flight that have an upload and a download of their own; more do not help."""


class BufferPool:
    """
    Byte buffers; thread-safe. Reuse avoids page faults, which cost more than the copy itself.

    Args:
        most_idle_bytes: of unused buffers; those unused for the longest time are freed first.
    """

    def __init__(self, *, most_idle_bytes: int) -> None:
        self._most_idle_bytes = most_idle_bytes
        self._lock = threading.Lock()
        self._used: dict[int, U8] = {}
        self._idle: list[U8] = []
        """Unused buffers, the longest unused first."""
        self._active = False
        """Whether a buffer was acquired since the last sweep."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers that were acquired and not released."""
        with self._lock:
            return sum(b.size for b in self._used.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, idle ones included."""
        with self._lock:
            return sum(b.size for b in (*self._used.values(), *self._idle))

    def acquire(self, size_bytes: int) -> U8:
        """A buffer of at least that many bytes for exclusive use, with arbitrary contents."""
        with self._lock:
            self._active = True
            fitting = [
                i for i, b in enumerate(self._idle) if size_bytes <= b.size <= SLACK * size_bytes
            ]
            if fitting:
                buffer = self._idle.pop(min(fitting, key=lambda i: self._idle[i].size))
            else:
                buffer = np.empty(size_bytes, np.uint8)
            self._used[id(buffer)] = buffer
            return buffer

    def release(self, buffer: U8) -> None:
        """
        Return a buffer to the pool.

        Raises:
            KeyError: it was not acquired, or was released before.
        """
        with self._lock:
            self._idle.append(self._used.pop(id(buffer)))
            self._trim(self._most_idle_bytes)

    def sweep(self) -> None:
        """Free the idle buffers if none was acquired since the last call; call it regularly."""
        with self._lock:
            if not self._active:
                self._trim(0)
            self._active = False

    def _trim(self, most_bytes: int) -> None:
        idle = sum(b.size for b in self._idle)
        while idle > most_bytes:
            idle -= self._idle.pop(0).size


def most_transfers(spec: RunSpec) -> int:
    """Transfers of one direction at a time: a cancelled one may take a moment to end."""
    return min(spec.overlap, MAX_TRANSFERS) + 1


def most_idle_bytes(layout: Layout, spec: RunSpec) -> int:
    """Idle buffers worth keeping: those of a steady state, with τ rounds in flight."""
    return min(spec.overlap, MAX_TRANSFERS) * sum(_largest(layout, spec))


def _largest(layout: Layout, spec: RunSpec) -> tuple[int, int]:
    """Payload of the largest fragment: of a result, and of an upload."""

    def largest(wire: str) -> int:
        return max(
            formats.encoded_bytes(formats.of_fragment(wire, f), f.elements)
            for f in layout.fragments
        )

    return largest(spec.wire_down), largest(spec.wire_up)
