"""
The format of log lines, as text or as one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any, TextIO

from diloco.runtime.formatting import printable

CAPACITY = 1024
"""Lines that may wait for standard error."""

FLUSH_SECONDS = 2.0
"""How long the end of the process waits for them."""


def configure_logging(
    *, json: bool, name: str, stream: TextIO | None = None, background: bool = False
) -> None:
    """
    Send all log records of this process to standard error, one line each; call once, in `__main__`.

    Fields given as `log.info("merged", extra={"step": 7})` become key=value pairs or JSON members.
    A trace stays within its line, with newlines written as \\n, so that lines of several processes
    can be mixed.

    Args:
        json: JSON objects instead of key=value.
        name: the process in the lines: "syncer", "eu/0".
        stream: instead of standard error.
        background: lines are written by a separate thread, so that no other thread waits while they
            are not read or their disk hangs; lines beyond CAPACITY are dropped and counted.
            `logging.shutdown` writes what is waiting.
    """
    given = stream or sys.stderr
    handler = _BackgroundHandler(given) if background else logging.StreamHandler(given)
    handler.setFormatter(_Lines(json=json, name=name))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class _BackgroundHandler(logging.Handler):
    """Never waits for its stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(CAPACITY)
        self._dropped = 0
        """Lines since the last warning about them; guarded by the handler's lock."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until the lines so far are written, for FLUSH_SECONDS at most."""
        end = time.monotonic() + FLUSH_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            with contextlib.suppress(OSError, ValueError):  # a stream that is gone or closed
                self._stream.write(line + "\n")
                self._stream.flush()
            self._lines.task_done()
            if self._lines.empty():
                self._report_dropped()

    def _report_dropped(self) -> None:
        with self.lock or contextlib.nullcontext():  # no line is added, so the report has room
            if not self._dropped or not self._lines.empty():
                return
            dropped, self._dropped = self._dropped, 0
            logging.getLogger(__name__).warning(
                "%d lines of the log were dropped: they were not read in time", dropped
            )


_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _Lines(logging.Formatter):
    def __init__(self, *, json: bool, name: str) -> None:
        super().__init__()
        self._json = json
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the record holds."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if self._json:
            return printable(json.dumps(fields, default=str, ensure_ascii=False))
        return " ".join(f"{key}={_plain(value)}" for key, value in fields.items())


def _plain(value: object) -> str:
    """A value that ends at the next space; quoted as JSON where it would not."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if not text or any(c in ' "=\\' or not c.isprintable() for c in text):
        return printable(json.dumps(text, ensure_ascii=False))
    return text
