"""
Which transfers of one direction run: at most so many, and at most one per key. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from diloco_worker.link.transfer import CancelToken

Job = TypeVar("Job")


@dataclass(frozen=True, slots=True)
class _Transfer(Generic[Job]):
    key: Hashable
    round: int
    job: Job


class Schedule(Generic[Job]):
    """
    Starts transfers in the order of their arrival; call it from one thread.

    When a transfer has ended, whether cancelled or not, call `ended`, and `proceed` once its result
    was placed, held or discarded: so results that are not decided about yet are bounded as well.

    Args:
        most: transfers that may run at a time.
        start: begins one.
    """

    def __init__(self, most: int, start: Callable[[Job, CancelToken], None]) -> None:
        self._most, self._start = most, start
        self._waiting: dict[Hashable, _Transfer[Job]] = {}
        self._running: dict[CancelToken, _Transfer[Job]] = {}

    @property
    def running(self) -> int:
        """Number of transfers that were started and have not ended."""
        return len(self._running)

    def add(self, key: Hashable, job: Job, *, round: int = 0) -> None:  # noqa: A002
        """
        Start a transfer, or let it wait, in place of any that waits with this key.

        A running transfer of the same key and round is cancelled: the attempt is over. That of
        another round ends first, or a link that needs longer for a fragment than the syncer until
        its next round would never complete any.
        """
        for cancel, transfer in self._running.items():
            if (transfer.key, transfer.round) == (key, round):
                cancel.stop()
        self._waiting.pop(key, None)
        self._waiting[key] = _Transfer(key, round, job)
        self.proceed()

    def cancel_all(self) -> None:
        """Cancel every transfer."""
        self._waiting.clear()
        for cancel in self._running:
            cancel.stop()

    def ended(self, cancel: CancelToken) -> bool:
        """A transfer has ended: True if its result counts, False if it was cancelled meanwhile."""
        del self._running[cancel]
        return not cancel.stopped

    def proceed(self) -> None:
        """Start what waits, as far as there is room."""
        busy = {t.key for cancel, t in self._running.items() if not cancel.stopped}
        for transfer in [t for t in self._waiting.values() if t.key not in busy]:
            if len(self._running) >= self._most:
                return
            del self._waiting[transfer.key]
            cancel = CancelToken()
            self._running[cancel] = transfer
            self._start(transfer.job, cancel)
