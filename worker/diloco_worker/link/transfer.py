"""What uploads and downloads share: the sender's identity, cancellation, and what an error means."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diloco.errors import EXIT_REFUSED, DilocoError, NotFiniteError
from diloco.model.fragments import CHUNK
from diloco_worker.core import events as ev

U8 = npt.NDArray[np.uint8]

RAW_CHUNK = CHUNK * 4
"""Bytes of one chunk of the constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who transfers: the learner, its incarnation, and the syncer's epoch and start."""

    learner: str
    epoch: int
    incarnation: int
    start_id: str = ""
    """Empty: not stated."""


class CancelToken:
    """Stops one transfer from another thread, even while it waits for the network."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._interrupt: Callable[[], object] | None = None

    @property
    def stopped(self) -> bool:
        """Whether the transfer was stopped."""
        return self._stopped.is_set()

    def wait(self, seconds: float) -> bool:
        """Pause; True if stopped meanwhile."""
        return self._stopped.wait(seconds)

    def on_stop(self, interrupt: Callable[[], object]) -> None:
        """Call `interrupt` on `stop`; at once if that has already happened."""
        with self._lock:
            self._interrupt = interrupt
            stopped = self.stopped
        if stopped:
            interrupt()

    def stop(self) -> None:
        """End the transfer."""
        with self._lock:
            self._stopped.set()
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt()


def initial_ended(request: int, error: DilocoError) -> ev.InitialUploaded:
    """
    What the error that ended an upload of Θ^(0) means.

    Values that are not finite will not become finite: the process ends, and the syncer asks the next learner.
    """
    if isinstance(error, NotFiniteError):
        text = f"the initial parameters of this learner are not finite: {error}"
        return ev.InitialUploaded(request=request, error=text, refused_exit=EXIT_REFUSED)
    return ev.InitialUploaded(request=request, error=f"{error.reason}: {error}")
