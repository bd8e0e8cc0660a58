"""How long this thread was ready to run and had no core: what tells a busy machine from a wait."""

from __future__ import annotations

import os

_SCHEDSTAT = "/proc/thread-self/schedstat"


class CoreQueue:
    """The calling thread's time in the run queue; 0 where the kernel does not tell (not Linux)."""

    def __init__(self) -> None:
        try:
            self._fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def seconds(self) -> float:
        """Since the thread began."""
        if self._fd < 0:
            return 0.0
        # "ns on a core, ns in the queue, slices"
        return int(os.pread(self._fd, 96, 0).split()[1]) / 1e9

    def close(self) -> None:
        """No more questions."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
