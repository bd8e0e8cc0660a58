"""
steps.jsonl: one line per optimizer step, for the report and the audit of what the library costs.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

log = logging.getLogger(__name__)


class Journal:
    """Appends whole lines; a full disk is said once and never stops the training."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._complained = False
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # the line before was torn by a crash

    def append(self, line: dict[str, object]) -> None:
        """Add `line` and the wall clock."""
        stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **line}
        try:
            os.write(self._fd, json.dumps(stamped, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            if not self._complained:
                log.warning("%s: %s; steps are not recorded", self._path, error.strerror)
            self._complained = True

    def close(self) -> None:
        """No more lines."""
        os.close(self._fd)
