"""SIGTERM as a wish that the training loop notices at its next step boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Termination:
    """Notices SIGTERM, and lets the user's own handler have it too; only from the main thread."""

    def __init__(self) -> None:
        self.received = False
        self._pid = os.getpid()
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A child that was forked (a data loader's worker) inherits handlers; it has to die as ever.
            signal.signal(number, self._before if callable(self._before) else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = True
        if callable(self._before):
            self._before(number, frame)

    def restore(self) -> None:
        """The handler that was there before; unless somebody put another one there since."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            with contextlib.suppress(TypeError):
                signal.signal(signal.SIGTERM, self._before)
        self._installed = False
