"""Where the output of a process goes, and its end: a log file of limited size, or our own standard output."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import BinaryIO

from diloco.runtime import files

MAX_LOG_BYTES = 32 << 20
"""Of a log file: then its content replaces that of `<name>.1.log`, and it starts over."""

TAIL_LINES = 12

_TAIL_BYTES = 16 << 10
"""torchrun's banner and its own traceback, which follow the error of a rank, take 4 KiB."""
_DRAIN_SECONDS = 1.0
_STANDARD_OUTPUT = 1


class Log:
    """Appends to a file that earlier runs of the process may have written to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier = path.with_suffix(f".1{path.suffix}")
        self._start = 0
        self._moved_from: int | None = None
        """Where this run's output begins in the earlier file; None: nowhere."""

    def open(self) -> BinaryIO:
        """The file that the process writes to."""
        # Private, and not through a symbolic link that another user planted.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.fdopen(files.open_unlinked(self._path, flags), "ab")
        self._start = file.seek(0, os.SEEK_END)
        return file

    def limit(self, most_bytes: int = MAX_LOG_BYTES) -> None:
        """
        Move the content to the earlier file if it is too long; call it often.

        The process keeps writing to the same file, at its end: what it writes in between may be lost, and so may
        all before the last `most_bytes`. A disk that refuses the copy costs the content, not the limit, and the
        earlier file stays as it is.
        """
        with contextlib.suppress(OSError):
            size = self._path.stat().st_size
            if size <= most_bytes:
                return
            moved_from = None
            with open(files.open_unlinked(self._path, os.O_RDWR), "r+b") as file:
                try:
                    begin = max(0, size - most_bytes)
                    with contextlib.suppress(OSError):
                        self._copy(file, begin, most_bytes)
                        moved_from = max(0, self._start - begin)
                finally:
                    file.truncate(0)
            self._start, self._moved_from = 0, moved_from

    def _copy(self, file: BinaryIO, begin: int, size: int) -> None:
        """Replace the earlier file with this part of `file`."""
        file.seek(begin)
        with files.replacing(self._earlier, mode=files.PRIVATE) as earlier:
            while size and (data := file.read(min(size, 1 << 20))):
                files.write_all(earlier, data)
                size -= len(data)

    def tail(self) -> str:
        """The end of what this run wrote."""
        own = _end(self._path, self._start)
        missing = _TAIL_BYTES - len(own)
        if self._moved_from is not None and missing > 0:
            own = _end(self._earlier, self._moved_from)[-missing:] + own
        return own.decode(errors="replace")


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

    def limit(self) -> None:
        """Nothing is kept."""

    def tail(self) -> str:
        """The end of the output; waits a moment for what a process that just ended left in the pipe."""
        if self._thread is not None:
            self._thread.join(_DRAIN_SECONDS)
        return self._tail.decode(errors="replace")

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


def last_lines(tail: str) -> tuple[str, ...]:
    """The last lines that are not empty."""
    lines = (line.strip() for line in tail.split("\n"))
    return tuple(line for line in lines if line)[-TAIL_LINES:]


def _end(path: Path, start: int) -> bytes:
    """The end of a file, from `start` on at the earliest; empty if it cannot be read."""
    try:
        with open(files.open_regular(path), "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)
    except OSError:
        return b""
