"""
Ends this process soon after its learner has failed on any machine.

The training thread may be in a collective that never ends, so another thread reads the board (core/agreement.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from diloco.errors import EXIT_TRY_AGAIN
from diloco_worker.core.agreement import Board
from diloco_worker.trainer.rank_processes import RankProcess, named

POLL_SECONDS = 0.25

GRACE_SECONDS = 2.0
"""For the training thread to end by itself, which closes its files."""


class RankWatch:
    """
    Watches one rank's machine, from `start` to `close`.

    Args:
        board: of this machine.
        processes: of the ranks to watch.
        learner: its name, for messages.
        check: called after a failure; in the first rank of a machine, it reports it to the other machines.
    """

    def __init__(
        self, board: Board, processes: Mapping[int, RankProcess], *, learner: str, check: Callable[[], None],
    ) -> None:  # fmt: skip
        self._board, self._processes = board, processes
        self._learner, self._check = learner, check
        self._closed = threading.Event()
        self._previous = sys.excepthook
        self._thread = threading.Thread(target=self._watch, name="diloco-ranks", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        sys.excepthook = self._ended_by_error
        self._thread.start()

    def close(self) -> None:
        """This rank leaves the job, or ends by itself; afterwards the board may be gone."""
        self._closed.set()
        self._thread.join()
        if sys.excepthook == self._ended_by_error:
            sys.excepthook = self._previous

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self._look()
            if text := self._board.failure:
                self._check()
                if not self._closed.wait(GRACE_SECONDS):
                    self._exit(text)

    def _look(self) -> None:
        """Notice a rank that ended before it left the job."""
        if self._board.failure:
            return
        ended = [rank for rank, process in self._processes.items() if process.ended]
        if early := [rank for rank in ended if not self._board.left(rank)]:
            self._board.fail(f"{named(early, self._processes)} exited, so this learner exits")

    def _ended_by_error(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        """The program ends with an error: if the learner has failed, show why."""
        self._previous(kind, value, trace)
        deadline = time.monotonic() + GRACE_SECONDS
        while not (text := self._board.failure) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        if text:
            self._check()
            self._exit(text)

    def _exit(self, text: str) -> None:
        print(f"diloco: {self._learner}: {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(EXIT_TRY_AGAIN)
