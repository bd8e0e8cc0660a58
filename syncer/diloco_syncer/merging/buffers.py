"""
Large fp32 vectors that are reused once no reference to them is left.

A fragment above 32 MiB is not recycled by malloc: every merge would spend a tenth of its time on
new pages (benchmarks/results/merge.md).
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

SLACK = 1.25
"""A buffer serves a vector if it is at most this much longer."""
MOST_IDLE = 4
"""Unused buffers that are kept."""


class Buffers:
    """
    Allocates vectors with arbitrary content; thread-safe.

    A caller gets a view, and in numpy every view of a view refers to the array that owns the
    memory: while anything (a download, a snapshot, an old version) uses it, that array has one
    reference more than ours. So callers need not return a buffer, and none is reused too early.

    Args:
        most_idle: how many unused buffers to keep; more are freed when a new one must be made.
    """

    def __init__(self, *, most_idle: int = MOST_IDLE) -> None:
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._owners: list[npt.NDArray[Any]] = []
        unused = [object()]
        self._alone = sys.getrefcount(unused[0])
        """Number of references to an item of a list that nothing else refers to, as `_idle` counts."""

    @property
    def held_bytes(self) -> int:
        """Of all buffers, in use or not."""
        with self._lock:
            return sum(owner.nbytes for owner in self._owners)

    def take(self, elements: int) -> F32:
        """A vector of that length to which nothing else refers."""
        with self._lock:
            idle = self._idle()
            fitting = [i for i in idle if elements <= self._owners[i].size <= SLACK * elements]
            if fitting:
                best = min(fitting, key=lambda i: self._owners[i].size)
                return self._owners[best][:elements]
            for i in reversed(idle[: max(0, len(idle) - self._most_idle)]):
                del self._owners[i]
            owner = np.empty(elements, np.float32)
            self._owners.append(owner)
            return owner[:]

    def _idle(self) -> list[int]:
        """Indices of the owners to which nothing else refers."""
        owners, alone = self._owners, self._alone
        return [i for i in range(len(owners)) if sys.getrefcount(owners[i]) == alone]
