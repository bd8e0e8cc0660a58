"""
Refusals in the log, events.jsonl and the metrics, bounded in number and length. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable

from diloco.errors import DilocoError
from diloco.runtime.formatting import shorten
from diloco_syncer.core.refusals import WINDOW_SECONDS, Refusals

log = logging.getLogger(__name__)

MAX_LEARNER = 128
MAX_DETAIL = 2000
"""Characters of a learner's name and of a detail that are written: a peer chose parts of them."""

MAX_TRACE = 8000
"""Characters of the trace of an error of this program, the innermost calls."""


class RefusalLog:
    """
    Writes the first refusals of each minute in full and the others as a count.

    Args:
        record: writes a line of events.jsonl (`Runner.record`).
        clock: monotonic seconds.
    """

    def __init__(
        self, record: Callable[..., None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._record, self._clock = record, clock
        self._lock = threading.Lock()
        self._window = Refusals()

    def refuse(
        self, what: str, learner: str, error: DilocoError, *, cause: Exception | None = None
    ) -> None:
        """
        Record that a request was refused.

        Args:
            what: the kind of request: "a session".
            learner: the name that the peer stated; "": unknown.
            error: why.
            cause: an error of this program, which is logged with its trace; None: the peer's.
        """
        self.flush()
        with self._lock:
            in_full = self._window.refused(error.reason, now=self._clock())
        if in_full:
            name, detail = shorten(learner, MAX_LEARNER), shorten(str(error), MAX_DETAIL)
            peer = name or "an unknown peer"
            if cause is None:
                log.warning("refused %s of %s: %s", what, peer, detail)
            else:
                seen, trace = shorten(repr(cause), MAX_DETAIL), _trace(cause)
                log.error("%s of %s cannot be processed: %s", what, peer, seen, extra=trace)
            self._record("refuse", learner=name, reason=error.reason, detail=detail)

    def flush(self) -> None:
        """Write what was only counted, once its minute is over."""
        with self._lock:
            counts = self._window.ended(now=self._clock())
        for reason, count in counts.items():
            detail = f"{count} more refusals within {WINDOW_SECONDS:g} s were not written"
            log.warning("%s: %s", reason, detail)
            self._record("refuse", learner="", reason=reason, detail=detail, count=count)


def _trace(error: Exception) -> dict[str, str]:
    """As a field of a log line; without the text of the error, which may be of any length."""
    return {"trace": "".join(traceback.format_tb(error.__traceback__))[-MAX_TRACE:]}
