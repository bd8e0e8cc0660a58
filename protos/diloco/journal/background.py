"""Appends lines in a thread of its own, so that its caller never waits for a disk."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.journal.parts import PART_BYTES, TOTAL_BYTES, Position, part_path
from diloco.journal.writer import JournalWriter

log = logging.getLogger(__name__)

CAPACITY = 1024
"""Lines that may wait for the disk."""
QUEUE_BYTES = 64 << 20
"""Of all lines that wait, as estimated by `_size_bytes`: a merge of 1000 learners has 0.7 MB in memory."""
ITEM_BYTES = 1024
"""Estimate of a line, and of each item of its lists: a member of a merge has 720."""

WARNING_SECONDS = 60.0
"""Least time between two warnings about dropped lines."""


@dataclass(frozen=True, slots=True)
class _Line:
    event: Mapping[str, Any]
    size_bytes: int
    dropped: Mapping[str, int] | None = None
    """Lines that were dropped before it, by event."""


class BackgroundWriter:
    """
    A bounded queue of lines and the thread that hands them to a `JournalWriter`.

    A line that does not fit in the queue is dropped and counted, as one that the disk refuses, and a
    warning appears at most every minute.

    Args:
        writer: belongs to this object from now on.
        capacity: lines that may wait, of at most `QUEUE_BYTES` together.
        part_bytes: a file that has reached this size becomes the older part (`older_part`) before
            the next line, and replaces the previous older part, so both together have at most
            twice this size and a line each; None: no limit. A disk that refuses is tried again once
            the file has grown by a tenth, so that each attempt, and its warning, is rare.
        clock: monotonic seconds.
    """

    def __init__(
        self, writer: JournalWriter, *, capacity: int = CAPACITY, part_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.path = writer.path
        self.dropped = 0
        """Lines dropped since the start."""
        self._writer, self._part_bytes, self._clock = writer, part_bytes, clock
        self._replace_bytes = part_bytes or 0
        """Size at which the file is next tried to become the older part."""
        self._queue: queue.Queue[_Line | Callable[[], object] | None] = queue.Queue(capacity)
        self._lock = threading.Lock()
        self._unreported: Counter[str] = Counter()
        """Dropped lines that no line has reported yet, by event."""
        self._warn_at = 0.0
        self._closed = False
        self._changed = threading.Condition(self._lock)
        self._accepted = self._finished = self._waiting_bytes = 0
        self._lost = 0
        """Lines that the disk had refused at the last `flush`."""
        self._thread = threading.Thread(
            target=self._run, name=f"writer of {self.path.name}", daemon=True
        )
        self._thread.start()

    def append(self, event: Mapping[str, Any]) -> bool:
        """
        Add one line with the time of this call, without waiting; the event's values must not
        change afterwards.

        Returns:
            False: it was dropped.
        """
        stamped = {"time": _now(), **event}
        with self._lock:
            size_bytes = _size_bytes(event)
            # The longest line fits, too, once no other one waits.
            fits = not self._waiting_bytes or self._waiting_bytes + size_bytes <= QUEUE_BYTES
            if fits and self._put(_Line(stamped, size_bytes, self._unreported or None)):
                self._waiting_bytes += size_bytes
                self._unreported = Counter()
                return True
            self.dropped += 1
            self._unreported[str(event.get("event", ""))] += 1
            now, dropped = self._clock(), self.dropped
            due = now >= self._warn_at
            if due:
                self._warn_at = now + WARNING_SECONDS
        if due:
            log.warning("%s: the disk is too slow, %d lines dropped so far", self.path, dropped)
        return False

    def position(self) -> Position:
        """A place before which all lines are that the disk has, or earlier; never waits."""
        return self._writer.position()

    def rotate(
        self, *, needed: int, heading: Mapping[str, Any] | None = None,
        part_bytes: int = PART_BYTES, total_bytes: int = TOTAL_BYTES,
    ) -> bool:  # fmt: skip
        """
        Bound the journal as `JournalWriter.rotate` does, after the lines that were added so far. Does
        not wait.

        Returns:
            False, without an effect: the queue is full.
        """

        def rotate() -> None:
            self._writer.rotate(
                needed=needed, heading=heading, part_bytes=part_bytes, total_bytes=total_bytes
            )

        with self._lock:
            return self._put(rotate)

    def flush(self, timeout_seconds: float) -> bool:
        """
        Wait until what was added so far is handed to the disk; False after the timeout, or if the disk
        refused a line since the last call.
        """
        handed = self._wait(timeout_seconds)
        lost, self._lost = self._lost, self._writer.lost
        return handed and lost == self._lost

    def sync(self, timeout_seconds: float) -> bool:
        """
        Wait until what was added so far is durable, and so is the number of the lines that were lost; False
        after the timeout, or if it is not.
        """
        durable: list[bool] = []

        def sync() -> None:
            self._report_dropped()
            durable.append(self._writer.sync())

        with self._lock:
            if not self._put(sync):
                return False
        return self._wait(timeout_seconds) and durable == [True]

    def close(self, timeout_seconds: float = 5.0) -> None:
        """
        Write what is waiting and close the file; after the timeout, the thread is left behind.

        Lines that are added later are dropped.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("%s: the disk does not answer, the last lines may be missing", self.path)

    def _wait(self, timeout_seconds: float) -> bool:
        with self._changed:
            target = self._accepted
            return self._changed.wait_for(lambda: self._finished >= target, timeout_seconds)

    def _put(self, item: _Line | Callable[[], object]) -> bool:
        if self._closed:
            return False
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return False
        self._accepted += 1
        return True

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, _Line):
                    self._write(item)
                else:
                    item()
                if self._queue.empty():
                    self._report_dropped()
            except Exception:  # without this thread every later line would be dropped
                log.exception("%s: a line was lost", self.path)
            with self._changed:
                self._finished += 1
                self._waiting_bytes -= item.size_bytes if isinstance(item, _Line) else 0
                self._changed.notify_all()
        self._report_dropped()
        self._writer.close()

    def _write(self, line: _Line) -> None:
        size_bytes = self._writer.position().offset
        if self._part_bytes is not None and size_bytes >= self._replace_bytes:
            replaced = self._writer.replace_older(older_part(self.path))
            self._replace_bytes = (
                self._part_bytes if replaced else size_bytes + size_bytes // 10 + 1
            )
        if line.dropped is not None:
            self._writer.missed(line.dropped)
        self._writer.append(line.event)

    def _report_dropped(self) -> None:
        """Do not wait for the next line."""
        with self._lock:
            dropped, self._unreported = self._unreported, Counter()
        self._writer.missed(dropped)
        self._writer.report()


def older_part(path: Path) -> Path:
    """Where the lines before those of `path` are: "steps.1.jsonl" for "steps.jsonl"."""
    return part_path(path, 1)


def _size_bytes(event: Mapping[str, Any]) -> int:
    """Estimated, since to encode a long line here would take the time of the caller."""
    return ITEM_BYTES + sum(
        len(value) * (1 if isinstance(value, str) else ITEM_BYTES)
        for value in event.values()
        if isinstance(value, Collection)
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
