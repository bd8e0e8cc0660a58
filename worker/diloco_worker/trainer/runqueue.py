"""Time that this thread was ready to run but had no core: distinguishes a busy machine from waiting."""

from __future__ import annotations

import os

_SCHEDSTAT = "/proc/thread-self/schedstat"


class RunQueue:
    """The calling thread's time in the run queue; 0 where the kernel does not report it (not Linux)."""

    def __init__(self) -> None:
        try:
            self._fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def seconds(self) -> float:
        """Total since the thread started."""
        if self._fd < 0:
            return 0.0
        # nanoseconds on a core, nanoseconds in the queue, time slices
        return int(os.pread(self._fd, 96, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
