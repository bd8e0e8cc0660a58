"""Appends lines to events.jsonl, eval.jsonl and steps.jsonl."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.errors import StorageError
from diloco.journal import reader
from diloco.journal.parts import PART_BYTES, TOTAL_BYTES, Position, numbers, part_path
from diloco.runtime.disk import LOCAL, Disk, File, Mode

log = logging.getLogger(__name__)

ROTATE = "rotate"
"""The event that begins a part."""
DROPPED = "dropped"
"""The event that states how many lines are missing before it."""
RESTART = "restart"
"""The event that a supervisor adds to the file of its syncer."""

TORN_CHECKS, TORN_SECONDS = 5, 0.01
"""A line counts as torn if it has no end in this many checks, this far apart."""


class JournalWriter:
    """
    Appends JSON objects as whole lines to a file that other processes may append to as well.

    A line torn by the death of an earlier writer is terminated on opening. A disk that refuses
    costs lines, counted in `lost` and logged once, never an exception: training continues without.
    Where lines with an `event` are missing, the file has a line `dropped` with their number by event;
    other journals have the number in the field `dropped` of the next line.

    Args:
        path: of the newest part.
        disk: holds the files.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, disk: Disk = LOCAL) -> None:
        self.path, self._disk = path, disk
        self.lost = 0
        self._warned = False
        self._lock = threading.Lock()
        self._file: File | None
        try:
            disk.make_directory(path.parent)
            self._file, self._torn = _open(disk, path)
            self._size = self._file.size()
            number = max(numbers(path, disk.names(path.parent)), default=0) + 1
            begins = number > 1 and _lacks_heading(disk, path)
        except OSError as error:
            raise StorageError(f"opening {path}: {error.strerror or error}") from error
        self._position = Position(number, self._size)
        self._heading: Mapping[str, Any] | None = None
        """The line `rotate`, while the disk has not taken it."""
        self._missing: Counter[str] = Counter()
        """Lines that were lost and that no line has reported yet, by event."""
        self._cut = 0
        """Lines of which the disk took a part, or which it may have lost, not reported yet."""
        self._unsynced = 0
        """Lines since the file was last made durable, or counted as cut because it could not be."""
        if self._torn:
            self._write(b"")
        if begins:
            self._heading = {"event": ROTATE, "part": number}
        self._settle()

    def position(self) -> Position:
        """
        A place before which all lines are that were written so far, or earlier; never waits.

        Lines of other processes count only when the file is opened.
        """
        return self._position

    def sync(self) -> bool:
        """
        Make the lines so far durable, and the number of those that were lost; False: the disk reported an error.
        """
        with self._lock:
            if not self._settle():
                return False
            try:
                if self._file is not None:
                    self._sync(self._file)
            except OSError as error:
                log.warning("%s: not durable: %s", self.path, error.strerror or error)
                return False
        return True

    def rotate(
        self, *, needed: int, heading: Mapping[str, Any] | None = None,
        part_bytes: int = PART_BYTES, total_bytes: int = TOTAL_BYTES,
    ) -> bool:  # fmt: skip
        """
        Bound the journal: begin a new part if this one is large enough, delete the oldest ones.

        Args:
            needed: number of the oldest part that must stay, however large the journal is.
            heading: further fields of the line `rotate` that begins the new part.
            part_bytes: size from which on the newest file becomes an earlier part.
            total_bytes: of all parts.

        Returns:
            False: the disk reported an error. Lines that were not durable may then be lost if the
            machine crashes; the file states how many.
        """
        with self._lock:
            settled = self._settle()
            try:
                if settled and self._file is not None and self._size >= part_bytes:
                    settled = self._begin_part(heading or {})
                self._delete_old(needed, total_bytes)
            except OSError as error:
                log.warning("%s: cannot rotate: %s", self.path, error.strerror or error)
                return False
        return settled

    def append(self, event: Mapping[str, Any]) -> None:
        """
        Add one line; `time` (UTC, ISO 8601) is filled in unless the event has it.

        numpy scalars and arrays become numbers and lists, other values their text.
        """
        with self._lock:
            counts = "event" not in event and self._missing
            line = {**event, "dropped": self._missing.total()} if counts else event
            if not (self._settle() and self._write(_line(line))):
                self.lost += 1
                self._missing[str(event.get("event", ""))] += 1
            elif counts:
                self._reported()

    def missed(self, lines: Mapping[str, int]) -> None:
        """Report that these lines, by event, are missing: before the next line, or with it."""
        with self._lock:
            self._missing.update(lines)

    def report(self) -> bool:
        """Write what is due before the next line now; False: the disk reported an error."""
        with self._lock:
            return self._settle()

    def replace_older(self, older: Path) -> bool:
        """
        Give the file this name, in place of what has it, and begin an empty one.

        Returns:
            False: the disk reported an error; no line is lost by that.
        """
        with self._lock:
            try:
                self._rename(older)
                self._begin_file(older)
            except OSError as error:
                log.warning("%s: cannot begin a new file: %s", self.path, error.strerror or error)
                return False
        return True

    def close(self) -> None:
        """Close the file; further events are lost."""
        with self._lock:
            self._settle()
            file, self._file = self._file, None
        if file is not None:
            self._close(file)

    def _begin_part(self, heading: Mapping[str, Any]) -> bool:
        number = self._position.part + 1
        earlier = part_path(self.path, number - 1)
        # Never onto a part that is there, whose lines would be lost. It is the open file, if a rotation
        # before this one ended in the middle, which continues here.
        if self._disk.size(earlier) is None:
            if self._file is not None:
                self._sync(self._file)  # a later `sync` is of the new file only
            self._rename(earlier)
        self._begin_file(earlier)
        self._position = Position(number, 0)
        self._heading = {"event": ROTATE, "part": number, **heading}
        return self._settle()

    def _sync(self, file: File) -> None:
        try:
            file.sync()
        except OSError:
            # The kernel reports it once: the next fsync succeeds, and what was not written is lost in a
            # crash of the machine, its last line end included: the next line must not be joined to it.
            self._cut += self._unsynced
            self._torn = True
            raise
        finally:
            self._unsynced = 0

    def _rename(self, earlier: Path) -> None:
        # None if another process deleted it or an attempt before renamed it, empty if that created another.
        if self._disk.size(self.path):
            self._disk.rename(self.path, earlier)

    def _begin_file(self, earlier: Path) -> None:
        try:
            # An attempt before may have created it, and failed to make its name durable.
            file = _create(self._disk, self.path, new=True)
        except OSError:
            # The open file still takes the lines, so it must have its name again. If the disk refuses
            # that too, the next attempt continues with what it finds.
            with contextlib.suppress(OSError):
                if self._disk.size(self.path) is None:
                    self._disk.rename(earlier, self.path)
            raise
        before, self._file, self._torn = self._file, file, False
        self._size, self._position = 0, Position(self._position.part, 0)
        if before is not None:
            self._close(before)

    def _close(self, file: File) -> None:
        try:
            file.close()
        except OSError as error:  # of a network file system, which takes lines as late as this
            log.warning("%s: closing: %s", self.path, error.strerror or error)

    def _delete_old(self, needed: int, total_bytes: int) -> None:
        known = numbers(self.path, self._disk.names(self.path.parent))
        sizes = {n: self._disk.size(part_path(self.path, n)) or 0 for n in known}
        total = self._size + sum(sizes.values())
        for number in known:
            if total <= total_bytes or number >= needed:
                return
            self._disk.remove(part_path(self.path, number))
            total -= sizes[number]

    def _settle(self) -> bool:
        """Write what is due before the next line; False: the disk reported an error, and the line would be too."""
        if self._heading is not None:
            if not self._write(_line(self._heading)):
                return False
            self._heading = None
        # The next line has the number, where lines are without an event.
        if self._missing.keys() == {""} or not (self._missing or self._cut):
            return True
        dropped: dict[str, Any] = {
            "event": DROPPED, "lines": self._missing.total(), "events": dict(self._missing)
        }  # fmt: skip
        if not self._write(_line({**dropped, "torn": self._cut} if self._cut else dropped)):
            return False
        self._reported()
        return True

    def _reported(self) -> None:
        self._missing.clear()
        self._cut = 0

    def _write(self, line: bytes) -> bool:
        end = b"\n" if self._torn else b""
        data = end + line
        if self._file is None:
            self._warn("the file is closed")
            return False
        try:
            # One write in append mode: the kernel puts whole lines one after the other.
            written = self._file.write(data)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return False
        self._size += written
        self._position = Position(self._position.part, self._size)
        if written == len(data):
            self._torn = False
            self._unsynced += 1
            return True
        if written > len(end):
            self._torn = True
            if written == len(data) - 1:
                self._unsynced += 1
                return True  # the next line ends it
            self._cut += 1
        elif written:
            self._torn = False
        self._warn(f"only {written} of {len(data)} bytes were written")
        return False

    def _warn(self, why: str) -> None:
        if not self._warned:
            log.warning("%s: lines are being lost, training continues: %s", self.path, why)
        self._warned = True


def append(path: Path, event: Mapping[str, Any], *, disk: Disk = LOCAL) -> None:
    """
    Add one line, as `JournalWriter.append` does, to a file that is not kept open.

    Raises:
        OSError: the disk reported an error; a part of the line may be there.
    """
    file, torn = _open(disk, path)
    with file:
        file.write(b"\n" + _line(event) if torn else _line(event))


def _lacks_heading(disk: Disk, path: Path) -> bool:
    """A syncer was killed in the middle of a rotation; only its supervisor wrote lines since then."""
    with disk.open(path, Mode.READ) as file:
        return all(line.get("event") == RESTART for line in reader.objects(reader.split(file)))


def _open(disk: Disk, path: Path) -> tuple[File, bool]:
    """The file, and whether its last line is torn."""
    file = _create(disk, path)
    last = bytearray(1)
    # Another process may be in the middle of its write; a line that a crash has torn stays torn.
    for _ in range(TORN_CHECKS):
        size_bytes = file.size()
        if size_bytes == 0:
            return file, False
        file.read_into(memoryview(last), size_bytes - 1)
        if last == b"\n":
            return file, False
        time.sleep(TORN_SECONDS)
    return file, True


def _create(disk: Disk, path: Path, *, new: bool = False) -> File:
    """The file for appending; a new one, which may be there, keeps its name after a crash of the machine."""
    # An empty one may be that of a start that could not make its name durable.
    new = new or not disk.size(path)
    file = disk.open(path, Mode.APPEND)
    if new:
        try:
            # To its own name, which changes nothing: another process may have it open already.
            disk.rename(path, path, durable=True)
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()
            raise
    return file


def _line(event: Mapping[str, Any]) -> bytes:
    stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **event}
    return json.dumps(stamped, separators=(",", ":"), default=_plain).encode() + b"\n"


def _plain(value: Any) -> object:
    return value.tolist() if hasattr(value, "tolist") else str(value)
