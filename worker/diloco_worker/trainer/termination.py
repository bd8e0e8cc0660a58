"""How a training process ends: SIGTERM, noticed at the next step boundary, or an exit with a reason."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Termination:
    """
    Notices SIGTERM and passes it on to the user's own handler.

    Outside of the main thread, where Python allows no handlers, it notices nothing.
    """

    def __init__(self) -> None:
        self.received = self._ended = False
        self._pid = os.getpid()
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child (a worker of a data loader) inherits the handler but must still die.
            signal.signal(number, self._previous if callable(self._previous) else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._ended and signal.getsignal(number) == self._handle:
            # The learner ended in another thread, which could not put the previous handler back.
            self.restore()
            os.kill(os.getpid(), number)
            return
        self.received = True
        if callable(self._previous):
            self._previous(number, frame)

    def restore(self) -> None:
        """
        Put the previous handler back, unless the user has installed another one since.

        Another thread than the main one cannot: the next signal does.
        """
        self._ended = True
        if threading.current_thread() is not threading.main_thread():
            return
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            with contextlib.suppress(TypeError):
                signal.signal(signal.SIGTERM, self._previous)
        self._installed = False


def exit_with(code: int, message: str) -> SystemExit:
    """Print the message to standard error; raise the result to end the process with `code`."""
    print(f"diloco: {message}", file=sys.stderr, flush=True)
    error = SystemExit(code)
    error.add_note(message)
    return error


def once_more(caught: SystemExit) -> SystemExit:
    """One that the program has caught: its message is to be the last line of the log, which states why it ended."""
    return exit_with(int(caught.code or 0), "; ".join(getattr(caught, "__notes__", ())))
