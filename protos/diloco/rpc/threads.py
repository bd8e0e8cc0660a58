"""The threads of a gRPC server, or of one of its services."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class _NoneIdle(threading.Semaphore):
    """Counts no thread as idle."""

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        return False

    def release(self, n: int = 1) -> None:
        pass


class Threads(ThreadPoolExecutor):
    """
    As many threads as calls, up to the most. One that the system refuses is started later; its call waits.

    gRPC submits calls on its only thread that serves: an error there would end all service for good.

    The executor's own count of idle threads is not used. From Python 3.12 on, a thread that finds no call, and
    takes one before it is counted as idle, is counted although it is busy. Then no thread is started for a later
    call, which waits until a stream ends: a session, or the upload that its own round waits for.
    """

    def __init__(self, most: int, *, thread_name_prefix: str) -> None:
        super().__init__(most, thread_name_prefix)
        self._idle_semaphore = _NoneIdle(0)
        self._counting = threading.Lock()
        self._calls = 0
        """Submitted, and not over."""

    @property
    def missing(self) -> int:
        """Threads that could not be started."""
        return max(0, min(self._calls, self._max_workers) - len(self._threads))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As the executor does, whether or not a thread can be started."""
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._count(-1))
        return future

    def recover(self) -> None:
        """Start the threads that are missing, as far as the system permits now."""
        with self._shutdown_lock:
            self._start()

    def _count(self, calls: int) -> None:
        with self._counting:
            self._calls += calls

    def _adjust_thread_count(self) -> None:
        """Called by `submit`, with the executor's lock."""
        before = self.missing
        self._count(1)
        self._start(log_refusal=not before)

    def _start(self, *, log_refusal: bool = True) -> None:
        """Called with the executor's lock."""
        try:
            for _ in range(self.missing):
                super()._adjust_thread_count()
        except (RuntimeError, MemoryError) as error:
            if log_refusal:
                log.error("a call waits, its thread cannot be started: %s", error)
