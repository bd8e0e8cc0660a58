"""The socket between trainer and link: states in order, of which a newer one replaces an unsent one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from diloco_sim.clock import Process

T = TypeVar("T")

CAPACITY = 64
"""States that the socket's buffer holds while its reader does not read."""


class Pipe(Generic[T]):
    """
    One direction.

    Args:
        reader: the process that reads.
        arrived: called in it soon after something was sent.
    """

    def __init__(self, reader: Process, arrived: Callable[[], object]) -> None:
        self._reader, self._arrived = reader, arrived
        self._life = reader.life
        self._sent: deque[T] = deque()
        self._next: T | None = None
        self._notified = False

    def offer(self, state: T) -> None:
        """Send a state, in place of any that was not sent yet."""
        self._next = state
        self._flush()

    def newest(self) -> T | None:
        """The newest state since the last call; None if there is none."""
        newest = self._sent[-1] if self._sent else None
        self._sent.clear()
        self._flush()
        return newest

    def _flush(self) -> None:
        if self._next is None or len(self._sent) >= CAPACITY:
            return
        self._sent.append(self._next)
        self._next = None
        if not self._notified and self._reader.life == self._life:
            self._notified = True
            self._reader.clock.at(self._reader.clock.now, self._notify, process=self._reader)

    def _notify(self) -> None:
        self._notified = False
        self._arrived()
