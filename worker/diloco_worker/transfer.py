"""
What uploads and downloads have in common: who we are, how to stop, buffers that are used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Under which name, and in which lives of learner and syncer, bytes travel."""

    learner: str
    epoch: int
    incarnation: int


class Cancel:
    """Stops one transfer from another thread, also while it waits for the network."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._cut: Callable[[], object] | None = None

    @property
    def stopped(self) -> bool:
        """It is over."""
        return self._stopped.is_set()

    def wait(self, seconds: float) -> bool:
        """Pause; True when stopped meanwhile."""
        return self._stopped.wait(seconds)

    def on_stop(self, cut: Callable[[], object]) -> None:
        """Call `cut` when stopped; at once if that was before."""
        with self._lock:
            self._cut = cut
            stopped = self.stopped
        if stopped:
            cut()

    def stop(self) -> None:
        """End the transfer."""
        with self._lock:
            self._stopped.set()
            cut = self._cut
        if cut is not None:
            cut()


class Buffers:
    """
    Byte buffers of one size; fresh memory costs more than copying into used one (page faults).
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[U8] = []
        self._lock = threading.Lock()

    def take(self) -> U8:
        """One that nobody else has; what it holds is arbitrary."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return np.empty(self._size_bytes, np.uint8)

    def give(self, buffer: U8) -> None:
        """Hand one back."""
        with self._lock:
            self._free.append(buffer)
