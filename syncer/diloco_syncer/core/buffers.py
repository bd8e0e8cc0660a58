"""
Big fp32 vectors, used again once nobody looks at them any more.

A fragment above 32 MiB is not recycled by malloc: every merge would spend a tenth of its time on
fresh pages (benchmarks/results/merge.md).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

SLACK = 1.25
"""A buffer serves a vector if it is at most this much longer."""


class Buffers:
    """
    Hands out vectors of any content; thread-safe.

    What is handed out is a view, and numpy lets every view of a view refer to the array that owns
    the memory: while anything (a download, a snapshot, an old version) still sees it, that array
    has a reference more than ours. So nobody gives a buffer back, and none is given away too soon.

    Args:
        most_idle: how many unused buffers to keep; more are freed when a new one must be made.
    """

    def __init__(self, *, most_idle: int = 4) -> None:
        self._most_idle = most_idle
        self._lock = threading.Lock()
        self._owners: list[npt.NDArray[Any]] = []
        self._alone = _references([object()], 0)

    def take(self, elements: int) -> F32:
        """A vector of that length which nobody else can see."""
        with self._lock:
            idle = [
                i for i in range(len(self._owners)) if _references(self._owners, i) == self._alone
            ]
            fitting = [i for i in idle if elements <= self._owners[i].size <= SLACK * elements]
            if fitting:
                best = min(fitting, key=lambda i: self._owners[i].size)
                return self._owners[best][:elements]
            for i in reversed(idle[: max(0, len(idle) - self._most_idle)]):
                del self._owners[i]
            owner = np.empty(elements, np.float32)
            self._owners.append(owner)
            return owner[:]


def _references(items: Sequence[object], index: int) -> int:
    """How many references there are to an item, the list's and this call's included."""
    return sys.getrefcount(items[index])
