"""
The format of log lines, as text or as one JSON object per line.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from diloco.runtime.formatting import printable


def configure_logging(*, json: bool, name: str, stream: TextIO | None = None) -> None:
    """
    Send all log records of this process to standard error, one line each; call once, in `__main__`.

    Fields given as `log.info("merged", extra={"step": 7})` become key=value pairs or JSON members.
    A trace stays within its line, with newlines written as \\n, so that lines of several processes
    can be mixed.

    Args:
        json: JSON objects instead of key=value.
        name: the process in the lines: "syncer", "eu/0".
        stream: instead of standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Lines(json=json, name=name))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


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
