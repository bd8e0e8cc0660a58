"""Lines are written in the background; a disk that hangs costs lines, never time."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import threading
from pathlib import Path

import pytest

from diloco.journal.background import ITEM_BYTES, QUEUE_BYTES, BackgroundWriter, older_part
from diloco.journal.parts import Position, part_path
from diloco.journal.writer import JournalWriter

SECONDS = 60.0


class HangingDisk(JournalWriter):
    """Writes only while `gate` is set; `waiting` is set when a line waits for it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate, self.waiting = threading.Event(), threading.Event()

    def append(self, event) -> None:
        self.waiting.set()
        assert self.gate.wait(SECONDS)
        super().append(event)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


@pytest.fixture
def disk(path: Path):
    disk = HangingDisk(path)
    yield disk
    disk.gate.set()


def test_lines_arrive_in_order_with_the_time_of_their_call(path):
    log = BackgroundWriter(JournalWriter(path))
    assert all(log.append({"i": i}) for i in range(100))
    log.append({"i": 100, "time": "then"})
    log.close()
    assert [row["i"] for row in rows(path)] == list(range(101))
    assert rows(path)[-1]["time"] == "then"
    assert [row["time"] for row in rows(path)[:100]] == sorted(r["time"] for r in rows(path)[:100])


def test_a_disk_that_hangs_drops_lines_counts_them_and_warns_at_most_every_minute(
    path, disk, caplog
):
    now = 100.0
    log = BackgroundWriter(disk, capacity=2, clock=lambda: now)
    assert log.append({"i": 0})
    assert disk.waiting.wait(SECONDS)
    assert [log.append({"i": i}) for i in range(1, 6)] == [True, True, False, False, False]
    assert caplog.text.count("lines dropped") == 1
    now += 60
    assert not log.append({"i": 6})
    assert caplog.text.count("lines dropped") == 2
    assert log.dropped == 4
    disk.gate.set()
    assert log.flush(SECONDS)
    assert log.append({"i": 7})
    assert log.append({"i": 8})
    log.close()
    assert [(row["i"], row.get("dropped")) for row in rows(path)] == [
        (0, None), (1, None), (2, None), (7, 4), (8, None)
    ]  # fmt: skip


@pytest.mark.slow
def test_long_lines_that_wait_have_a_limit_in_bytes(path, disk):
    """The queue would hold 0.74 GB of the merges of 1000 learners while the disk hangs."""
    log = BackgroundWriter(disk)
    members = [{"learner": f"eu/{i}", "incarnation": i, "step": i} for i in range(1000)]
    added = [log.append({"event": "merge", "members": members}) for _ in range(100)]
    most = QUEUE_BYTES // (1001 * ITEM_BYTES)
    assert added == [True] * most + [False] * (100 - most)
    assert log.append({"event": "join"}), "a short line fits"
    disk.gate.set()
    assert log.flush(SECONDS)
    assert log.append({"event": "merge", "members": 100 * members}), "nothing else waits"
    log.close()
    written = rows(path)
    assert [row["events"] for row in written if row["event"] == "dropped"] == [
        {"merge": 100 - most}
    ]
    assert sum(row["event"] == "merge" for row in written) == most + 1


def test_closing_does_not_wait_for_ever(path, disk, caplog):
    log = BackgroundWriter(disk)
    log.append({"i": 0})
    assert disk.waiting.wait(SECONDS)
    assert not log.flush(0.01)
    with caplog.at_level(logging.WARNING):
        log.close(0.01)
    log.close()
    assert "does not answer" in caplog.text
    assert not log.append({"i": 1})


def test_two_parts_of_a_fixed_size_hold_the_newest_lines(path):
    log = BackgroundWriter(JournalWriter(path), part_bytes=1000)
    for i in range(300):
        log.append({"i": i})
        assert log.flush(SECONDS)
    log.close()
    assert sorted(p.name for p in path.parent.iterdir()) == ["steps.1.jsonl", "steps.jsonl"]
    longest = len(json.dumps({"time": "2000-01-01T00:00:00.000+00:00", "i": 299}))
    assert all(p.stat().st_size < 1000 + longest for p in path.parent.iterdir())
    found = [row["i"] for row in rows(older_part(path)) + rows(path)]
    assert found == list(range(300 - len(found), 300))
    assert len(found) > 15


def test_a_disk_that_refuses_a_new_part_is_tried_again_when_the_file_has_grown_by_a_tenth(
    path, monkeypatch
):
    writer = JournalWriter(path)
    log, real, tried = BackgroundWriter(writer, part_bytes=1000), writer.replace_older, []

    def refusing(older):
        tried.append(writer.position().offset)
        return False

    monkeypatch.setattr(writer, "replace_older", refusing)
    for i in range(300):
        log.append({"i": i})
        assert log.flush(SECONDS)
    assert tried[0] < 1100
    assert all(later > 1.1 * earlier for earlier, later in itertools.pairwise(tried))
    assert 10 < len(tried) < 30
    monkeypatch.setattr(writer, "replace_older", real)
    for i in range(300):
        log.append({"i": i})
        assert log.flush(SECONDS)
    log.close()
    assert all(p.stat().st_size < 1100 for p in path.parent.iterdir()), "the limit holds again"


def test_a_requested_rotation_keeps_the_order(path):
    log = BackgroundWriter(JournalWriter(path))
    log.append({"i": 0})
    assert log.rotate(needed=1, part_bytes=1, heading={"fragments": 2})
    log.append({"i": 1})
    log.close()
    assert [row["i"] for row in rows(part_path(path, 1))] == [0]
    heading, row = rows(path)
    assert (heading["event"], heading["part"], heading["fragments"]) == ("rotate", 2, 2)
    assert row["i"] == 1


@pytest.mark.parametrize("part_bytes", [None, 1])
def test_a_rotation_that_fails_loses_no_line(path, caplog, monkeypatch, part_bytes):
    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    log = BackgroundWriter(JournalWriter(path), part_bytes=part_bytes)
    monkeypatch.setattr(os, "replace", refuse)
    log.append({"i": 0})
    log.rotate(needed=1, part_bytes=1)
    log.append({"i": 1})
    log.close()
    assert [row["i"] for row in rows(path)] == [0, 1]
    assert os.strerror(errno.EIO) in caplog.text


def test_13_a_full_queue_is_visible_in_the_file_with_the_events_that_are_missing(path, disk):
    log = BackgroundWriter(disk, capacity=1)
    log.append({"event": "start"})
    assert disk.waiting.wait(SECONDS)
    added = [log.append({"event": event}) for event in ("join", "merge", "merge", "leave")]
    assert added == [True, False, False, False]
    disk.gate.set()
    assert log.flush(SECONDS)
    log.append({"event": "stop"})
    log.close()
    assert [row["event"] for row in rows(path)] == ["start", "join", "dropped", "stop"]
    dropped = rows(path)[2]
    assert (dropped["lines"], dropped["events"]) == (3, {"merge": 2, "leave": 1})


def test_the_number_of_dropped_lines_is_durable_after_a_sync(path, disk, monkeypatch):
    log = BackgroundWriter(disk, capacity=1)
    log.append({"event": "start"})
    assert disk.waiting.wait(SECONDS)
    assert [log.append({"event": "merge"}) for _ in range(2)] == [True, False]
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.extend(row["event"] for row in rows(path)))
    log._queue.maxsize = 2  # the sync is added before the disk answers
    threading.Timer(0.1, disk.gate.set).start()
    assert log.sync(SECONDS)
    assert synced == ["start", "merge", "dropped"]
    log.close()


def test_lines_that_the_disk_refuses_are_stated_before_the_next(path, monkeypatch):
    log = BackgroundWriter(JournalWriter(path))
    write = os.write

    def refuse(fd, data):
        if b'"event"' in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse)
    log.append({"event": "merge"})
    assert not log.sync(SECONDS)
    assert not log.flush(SECONDS), "an evaluator would not send its score again"
    assert log.flush(SECONDS)
    monkeypatch.setattr(os, "write", write)
    log.append({"event": "stop"})
    assert log.sync(SECONDS)
    log.close()
    assert [(row["event"], row.get("events")) for row in rows(path)] == [
        ("dropped", {"merge": 1}), ("stop", None)
    ]  # fmt: skip


def test_what_was_added_is_durable_after_a_sync(path, disk, monkeypatch):
    log = BackgroundWriter(disk)
    log.append({"i": 0})
    assert not log.sync(0.01)
    disk.gate.set()
    assert log.sync(SECONDS)
    assert log.position() == Position(1, path.stat().st_size)

    def refuse(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    assert not log.sync(SECONDS)
    log.close()
