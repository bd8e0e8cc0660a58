"""Where the output of a process goes, and its last lines: a log file, or our own standard output."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import BinaryIO

from diloco.runtime import files

_TAIL_BYTES = 4096
_TAIL_LINES = 12
_DRAIN_SECONDS = 1.0
_STANDARD_OUTPUT = 1


class Log:
    """Appends to a file that earlier runs of the process may have written to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = 0

    def open(self) -> BinaryIO:
        """The file that the process writes to."""
        # Private, and not through a symbolic link that another user planted.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.fdopen(files.open_unlinked(self._path, flags), "ab")
        self._start = file.seek(0, os.SEEK_END)
        return file

    def last_lines(self) -> tuple[str, ...]:
        """Last lines of this run that are not empty."""
        try:
            with open(files.open_regular(self._path), "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._start, end - _TAIL_BYTES))
                return _last_lines(file.read())
        except OSError:
            return ()


class Stream:
    """
    Copies the output of a process to our standard output as it comes.

    A reader that stops reading ours blocks the process, as if it wrote there itself; once the
    reader is gone, the output is discarded.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._thread: threading.Thread | None = None

    def open(self) -> BinaryIO:
        """The file that the process writes to."""
        ours, theirs = os.pipe()
        self._thread = threading.Thread(target=self._copy, args=(ours,), name="output", daemon=True)
        self._thread.start()
        return os.fdopen(theirs, "wb")

    def last_lines(self) -> tuple[str, ...]:
        """Last lines that are not empty; waits a moment for what a process that just ended left in the pipe."""
        if self._thread is not None:
            self._thread.join(_DRAIN_SECONDS)
        return _last_lines(self._tail)

    def _copy(self, source: int) -> None:
        try:
            while data := os.read(source, 1 << 16):
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                with contextlib.suppress(OSError):
                    while data:
                        data = data[os.write(_STANDARD_OUTPUT, data) :]
        finally:
            os.close(source)


def open_private(path: Path) -> BinaryIO:
    """An empty file for the output of a process, for its user alone and not behind a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return os.fdopen(files.open_unlinked(path, flags), "wb")


def _last_lines(tail: bytes) -> tuple[str, ...]:
    lines = (line.strip() for line in tail.decode(errors="replace").split("\n"))
    return tuple(line for line in lines if line)[-_TAIL_LINES:]
