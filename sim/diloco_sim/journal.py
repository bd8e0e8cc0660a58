"""events.jsonl of a simulated syncer: what `BackgroundWriter` does, without its thread."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from diloco.journal.background import CAPACITY
from diloco.journal.parts import Position
from diloco.journal.writer import JournalWriter
from diloco_sim.clock import Process
from diloco_sim.disk import SimulatedDisk

PARTS = 4
"""Parts that are kept, unless a snapshot needs older ones."""


class Journal:
    """
    A bounded queue of lines that the disk takes one after the other.

    Args:
        writer: of the process.
        disk: holds the file.
        process: ends with it.
        part_bytes: size from which on the file is rotated.
    """

    def __init__(
        self, writer: JournalWriter, disk: SimulatedDisk, process: Process, part_bytes: int
    ) -> None:
        self._writer, self._disk, self._process = writer, disk, process
        self._part_bytes = part_bytes
        self._queue: deque[Mapping[str, Any]] = deque()
        self._dropped: Counter[str] = Counter()
        self._free_at = 0.0
        """Virtual time at which the disk has taken what it was given."""
        self._waiting = False

    @property
    def waiting(self) -> int:
        """Lines that wait for the disk."""
        return len(self._queue)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line, or count it as dropped."""
        if len(self._queue) >= CAPACITY:
            self._dropped[str(line.get("event", ""))] += 1
            return
        self._queue.append(line)
        self._proceed()

    def position(self) -> Position:
        """See `BackgroundWriter`."""
        return self._writer.position()

    def sync(self, timeout_seconds: float) -> bool:
        """See `BackgroundWriter`; within a call on the disk."""
        self._write()
        return self._writer.sync()

    def rotate(self, *, needed: int, heading: Mapping[str, Any] | None = None) -> bool:
        """See `BackgroundWriter`; within a call on the disk."""
        self._write()
        return self._writer.rotate(
            needed=needed, heading=heading, part_bytes=self._part_bytes,
            total_bytes=PARTS * self._part_bytes,
        )  # fmt: skip

    def _proceed(self) -> None:
        clock = self._process.clock
        if clock.now >= self._free_at:
            self._free_at = self._disk.call(self._write).done_at
        elif not self._waiting:
            self._waiting = True
            clock.at(self._free_at, self._wake, process=self._process)

    def _wake(self) -> None:
        self._waiting = False
        if self._queue:
            self._proceed()

    def _write(self) -> None:
        while self._queue:
            self._writer.append(self._queue.popleft())
        if self._dropped:
            dropped, self._dropped = self._dropped, Counter()
            self._writer.missed(dropped)
        self._writer.report()
