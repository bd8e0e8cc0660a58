"""The journal's writer appends whole lines or loses them."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.errors import StorageError
from diloco.journal import reader, records, writer
from diloco.journal.audit import audit_parts
from diloco.journal.parts import Position, parts
from diloco.journal.writer import JournalWriter
from diloco.runtime.disk import LOCAL, Data, LocalFile

APPEND = """
import sys
from pathlib import Path
from diloco.journal.writer import JournalWriter
log = JournalWriter(Path(sys.argv[1]))
for i in range(500):
    log.append({"who": int(sys.argv[2]), "i": i, "fill": "x" * (i * 37 % 3000)})
"""


@pytest.mark.slow
def test_four_processes_append_only_whole_lines(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    children = [
        subprocess.Popen([sys.executable, "-c", APPEND, str(path), str(who)]) for who in range(4)
    ]
    assert [child.wait(60) for child in children] == [0] * 4
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for who in range(4):
        assert [e["i"] for e in events if e["who"] == who] == list(range(500))


@pytest.mark.parametrize("before", ["", '{"a":1}\n'])
def test_a_line_torn_by_a_kill_is_closed_off_on_opening(tmp_path: Path, before: str):
    path = tmp_path / "events.jsonl"
    path.write_text(before + '{"event":"mer')
    log = JournalWriter(path)
    log.append({"event": "start"})
    log.close()
    lines = path.read_text().splitlines()
    assert lines[-2] == '{"event":"mer'
    assert json.loads(lines[-1])["event"] == "start"


def test_a_whole_last_line_is_left_as_it_is(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a":1}\n')
    JournalWriter(path).close()
    assert path.read_text() == '{"a":1}\n'


def test_a_line_cut_by_the_disk_does_not_spoil_the_next(tmp_path: Path):
    code = """
import resource, sys
from pathlib import Path
from diloco.journal.writer import JournalWriter
log = JournalWriter(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (120, resource.RLIM_INFINITY))
log.append({"event": "first"})
log.append({"event": "cut", "fill": "x" * 1000})
log.append({"event": "refused"})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.append({"event": "last"})
print(log.lost)
"""
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "events.jsonl")],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert child.stdout.strip() == "2", child.stderr
    first, cut, dropped, last = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(first)["event"] == "first"
    assert '"cut"' in cut
    stated = records.decode(json.loads(dropped))
    assert stated == records.Dropped(lines=2, events={"cut": 1, "refused": 1}, torn=1)
    assert json.loads(last)["event"] == "last"


def test_a_log_without_room_warns_once_counts_and_never_raises(
    caplog: pytest.LogCaptureFixture,
):
    log = JournalWriter(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.append({"event": "merge"})
    log.close()
    log.append({"event": "after the end"})
    assert log.lost == 6
    assert caplog.text.count(os.strerror(errno.ENOSPC)) == 1


def test_numbers_of_numpy_and_a_given_time_are_written_as_they_are(tmp_path: Path):
    log = JournalWriter(tmp_path / "events.jsonl")
    log.append({"time": "then", "norm": np.float32(0.5), "steps": np.arange(2), "at": Path("a")})
    log.close()
    assert json.loads(log.path.read_text()) == {
        "time": "then", "norm": 0.5, "steps": [0, 1], "at": "a"
    }  # fmt: skip


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(StorageError, match=str(tmp_path)):
        JournalWriter(tmp_path)


def test_a_line_added_after_a_torn_one_is_whole(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"mer')
    writer.append(path, {"time": "then", "event": "restart"})
    writer.append(path, {"time": "then", "event": "restart"})
    assert path.read_text() == '{"event":"mer\n' + 2 * '{"time":"then","event":"restart"}\n'


def test_reading_begins_at_an_offset_and_leaves_torn_lines_out(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    assert list(reader.read(path)) == []
    path.write_bytes(b'{"a":1}\n{"b":\n\n[1]\n{"c":3}\n{"d"')
    assert list(reader.read(path)) == [{"a": 1}, {"c": 3}]
    assert list(reader.read(path, since=Position(1, 8))) == [{"c": 3}]


def filled(path: Path, count: int, *, begin: int = 0) -> None:
    log = JournalWriter(path)
    for i in range(begin, begin + count):
        log.append({"i": i, "fill": "x" * 60})
        log.rotate(needed=99, part_bytes=500, total_bytes=2000)
    log.close()


def test_27_a_journal_in_parts_is_bounded_and_read_in_order(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    filled(path, 60)
    filled(path, 60, begin=60)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 2000 + 200
    found = list(reader.read(path))
    numbers = [row["i"] for row in found if "i" in row]
    assert numbers == list(range(120 - len(numbers), 120))
    heads = [row["part"] for row in found if row.get("event") == "rotate"]
    there = sorted(int(p.suffixes[0][1:]) for p in tmp_path.glob("events.*.jsonl"))
    assert len(there) > 1
    assert heads == [*there, there[-1] + 1], "of every file that is there"
    assert heads == [number for number, _ in parts(path)]
    assert found[0]["event"] == "rotate"
    assert heads[0] > 1


def test_parts_that_a_resume_needs_stay(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    log = JournalWriter(path)
    for i in range(100):
        if i == 14:
            position = log.position()
        log.append({"i": i, "fill": "x" * 60})
        log.rotate(needed=3, part_bytes=500, total_bytes=1000)
    log.close()
    assert 3 <= position.part <= 4
    rows = [row["i"] for row in reader.read(path, since=position) if "i" in row]
    assert rows == list(range(14, 100))
    assert parts(path)[0][0] == 3


def test_the_name_of_a_new_file_is_durable_before_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A power failure would lose the file with all its lines, however often they were synced."""
    path, seen = tmp_path / "events.jsonl", []

    def record(directory: Path) -> None:
        seen.append((directory, path.exists() and path.stat().st_size))

    monkeypatch.setattr("diloco.runtime.files.sync_directory", record)
    log = JournalWriter(path)
    assert seen == [(tmp_path, 0)]
    log.append({"a": 1})
    log.rotate(needed=1, part_bytes=1)
    assert seen[-1] == (tmp_path, 0)
    assert len(seen) == 3
    log.close()
    JournalWriter(path).close()
    assert len(seen) == 3


def test_positions_that_are_gone_leave_nothing_out(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a":1}\n{"a":2}\n')
    for gone in (Position(1, 1000), Position(7, 8)):
        assert [row["a"] for row in reader.read(path, since=gone)] == [1, 2]


def test_a_kill_in_the_middle_of_a_rotation_is_made_up_for(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a":1}\n')
    path.rename(tmp_path / "events.1.jsonl")
    assert [row["a"] for row in reader.read(path)] == [1]
    log = JournalWriter(path)
    log.append({"a": 2})
    log.close()
    assert [row.get("a", row.get("part")) for row in reader.read(path)] == [1, 2, 2]


class RefusingFile(LocalFile):
    """A file of a `RefusingDisk`."""

    def __init__(self, fd: int, disk: RefusingDisk) -> None:
        super().__init__(fd)
        self._disk = disk

    def write(self, data: Data) -> int:
        room = self._disk.room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(data[:room])
        if room is not None:
            self._disk.room = room - written
        return written

    def sync(self) -> None:
        self._disk.answer("sync", super().sync)

    def close(self) -> None:
        self._disk.answer("close", super().close)


class RefusingDisk:
    """The local disk, but for calls that are refused once each, before or after they take effect; "pass": not."""

    def __init__(self, *refused: tuple[str, str]) -> None:
        self._refused = list(refused)
        self.room: int | None = None
        """Bytes that it still takes; None: any number."""

    def answer(self, name: str, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        refused = bool(self._refused) and self._refused[0][0] == name
        when = self._refused.pop(0)[1] if refused else "pass"
        result = None if when == "before" else call(*arguments, **more)
        if when != "pass":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if name == "open":
            fd, result._fd = result._fd, -1
            return RefusingFile(fd, self)
        return result

    def __getattr__(self, name: str) -> Any:
        return partial(self.answer, name, getattr(LOCAL, name))


@pytest.mark.parametrize(
    "refused",
    [
        (("rename", "before"),),
        (("rename", "after"),),
        (("rename", "after"), ("open", "before")),
        (("open", "before"),),
        (("open", "before"), ("rename", "before")),
        (("open", "before"), ("rename", "after")),
        (("open", "before"), ("rename", "before"), ("open", "before"), ("rename", "before")),
        (("sync", "before"),),
    ],
)
def test_a_journal_rotates_again_after_a_disk_failed_in_the_middle_of_a_rotation(
    tmp_path: Path, refused: tuple[tuple[str, str], ...]
):
    """Seed 20261126584: a rotation that could not be undone either was the last one."""
    path, disk = tmp_path / "events.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    log.append({"a": 0})
    disk._refused = list(refused)
    rotated = [log.rotate(needed=100, part_bytes=1)]
    writer.append(path, {"a": 1})  # as another process does, which opens the file by its name
    for a in range(2, 6):
        log.append({"a": a})
        rotated.append(log.rotate(needed=100, part_bytes=1))
        if rotated[-1]:
            assert parts(path)[-1][0] == log.position().part, "as it is after a restart"
    log.close()
    assert not rotated[0]
    assert rotated[-1]
    assert disk._refused == []
    assert sorted(row["a"] for row in reader.read(path) if "a" in row) == list(range(6))
    numbered = [row["part"] for row in reader.read(path) if "part" in row]
    assert numbered == list(range(2, log.position().part + 1))
    assert len(parts(path)) >= 3
    again = JournalWriter(path)
    assert again.position().part == log.position().part, "a snapshot may have stored it"
    assert again.rotate(needed=100, part_bytes=1)
    again.close()
    found = audit_parts(reader.lines(path))
    assert found.violations == ()


def test_a_part_whose_file_cannot_be_closed_is_not_replaced_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A network file system may report only then that it has no room."""
    path, disk = tmp_path / "events.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    for a in range(4):
        log.append({"a": a})
        disk._refused = [("close", "after")]
        assert log.rotate(needed=100, part_bytes=1)
        assert disk._refused == []
    disk._refused = [("close", "after")]
    log.close()
    assert [row.get("a", row.get("part")) for row in reader.read(path)] == [0, 2, 1, 3, 2, 4, 3, 5]
    assert caplog.text.count("closing") == 5


def test_a_rotation_never_replaces_a_part_that_is_there(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    log = JournalWriter(path)
    log.append({"a": 1})
    (tmp_path / "events.1.jsonl").write_text('{"a":0}\n')
    assert log.rotate(needed=100, part_bytes=1)
    log.append({"a": 2})
    log.close()
    assert [row["a"] for row in reader.read(path) if "a" in row] == [0, 1, 2]


def test_lines_are_durable_before_their_file_becomes_an_earlier_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those written while a snapshot was; the sync before the next one is of the new part only."""
    path, synced = tmp_path / "events.jsonl", []
    log = JournalWriter(path)
    log.append({"a": 1})
    monkeypatch.setattr(LocalFile, "sync", lambda file: synced.append(file.size()))
    size_bytes = path.stat().st_size
    assert log.rotate(needed=100, part_bytes=1)
    log.close()
    assert synced == [size_bytes]


def test_the_name_of_a_new_part_is_made_durable_when_the_first_attempt_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, synced = tmp_path / "events.jsonl", []
    log = JournalWriter(path)
    log.append({"a": 1})

    def record(directory: Path) -> None:
        synced.append(sorted(os.listdir(directory)))
        if len(synced) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("diloco.runtime.files.sync_directory", record)
    assert not log.rotate(needed=100, part_bytes=1)
    assert log.rotate(needed=100, part_bytes=1)
    log.close()
    assert synced[1:] == [["events.1.jsonl", "events.jsonl"]] * 2
    assert [row.get("a", row.get("part")) for row in reader.read(path)] == [1, 2]


@pytest.mark.parametrize(
    "refused",
    [
        (("rename", "before"),),
        (("rename", "after"),),
        (("open", "before"), ("rename", "before")),
        (("open", "before"), ("rename", "after")),
        (("rename", "pass"), ("rename", "after"), ("close", "after")),
    ],
)
def test_a_file_takes_the_place_of_the_older_one_after_a_disk_failed_in_the_middle(
    tmp_path: Path, refused: tuple[tuple[str, str], ...]
):
    path, disk = tmp_path / "steps.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    older = tmp_path / "steps.1.jsonl"
    older.write_text("")
    log.append({"a": 0})
    disk._refused = list(refused)
    assert not log.replace_older(older)
    assert disk._refused == []
    log.append({"a": 1})
    assert log.replace_older(older)
    log.append({"a": 2})
    log.close()
    assert [row["a"] for row in reader.read(path)] == [0, 1, 2]


START = {"event": "start", "epoch": 1, "fragments": 1, "interval": 1, "learners": {"eu": 1}}


def merge_of(step: int) -> dict[str, Any]:
    member = {
        "learner": "eu/0",
        "incarnation": 1,
        "step": step,
        "steps": 1,
        "tokens": 2,
        "weight": 4,
    }
    return {
        "event": "merge",
        "epoch": 1,
        "step": step,
        "fragment": 0,
        "quorum": 1,
        "members": [member],
    }


@pytest.mark.parametrize("room", [*range(0, 330, 7), 255])
def test_the_audit_knows_which_lines_a_full_disk_did_not_take(tmp_path: Path, room: int):
    path, disk = tmp_path / "events.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    log.append(START)
    disk.room = room
    for step in range(1, 4):
        log.append(merge_of(step))
    disk.room = 70
    log.append(merge_of(4))
    assert not log.sync(), "a snapshot waits"
    disk.room = None
    assert log.sync()
    log.append(merge_of(5))
    log.close()
    found = audit_parts(reader.lines(path))
    assert found.violations == ()
    assert found.merges + log.lost == 5
    stated = [row for row in reader.read(path) if row["event"] == "dropped"]
    assert sum(row["lines"] for row in stated) == log.lost > 0
    assert sum(row.get("torn", 0) for row in stated) == found.torn_lines


@pytest.mark.parametrize("lost", ["all but the last byte", "all"])
def test_lines_that_a_disk_could_not_make_durable_may_be_unreadable_after_a_crash(
    tmp_path: Path, lost: str
):
    """
    Seeds 20261138120 and 600169: fsync fails once, the next one succeeds, and the crash leaves zeros.

    If the end of the last line is lost as well, the line that states the loss must not be lost with it.
    """
    path, disk = tmp_path / "events.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    log.append(START)
    assert log.sync()
    log.append(merge_of(1))
    begin, end = len(path.read_bytes().splitlines(keepends=True)[0]), path.stat().st_size
    disk._refused = [("sync", "before")]
    assert not log.sync()
    assert log.sync(), "as Linux does"
    log.append(merge_of(2))
    log.close()
    whole = path.read_bytes()
    assert audit_parts(reader.lines(path)).merges == 2, "nothing is lost without a crash"
    hole = end - begin - (lost != "all")
    path.write_bytes(whole[:begin] + bytes(hole) + whole[begin + hole :])
    found = audit_parts(reader.lines(path))
    assert (found.violations, found.merges, found.torn_lines) == ((), 1, 1)
    [stated] = [row for row in reader.read(path) if row["event"] == "dropped"]
    assert (stated["lines"], stated["torn"]) == (0, 1)


def test_a_line_of_which_the_disk_took_a_part_is_torn_once_also_if_it_is_not_durable(
    tmp_path: Path,
):
    path, disk = tmp_path / "events.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    log.append(START)
    assert log.sync()
    disk.room = 10
    log.append(merge_of(1))
    disk.room = None
    disk._refused = [("sync", "before")]
    assert not log.sync(), "the line that states the torn one is not durable"
    log.close()
    stated = [row["torn"] for row in reader.read(path) if row["event"] == "dropped"]
    assert stated == [1, 1]


def test_a_start_that_the_disk_did_not_take_is_not_held_against_the_merges_after_it(
    tmp_path: Path,
):
    path, disk = tmp_path / "events.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    disk.room = 0
    log.append(START)
    disk.room = None
    log.append(merge_of(1))
    log.close()
    found = audit_parts(reader.lines(path))
    assert (found.violations, found.merges) == ((), 1)
    assert found.unseen == ("lines that the disk did not take (1 start)",)


@pytest.mark.parametrize("room", range(0, 80, 5))
def test_the_heading_of_a_part_is_its_first_line_though_the_disk_refused_it(
    tmp_path: Path, room: int
):
    path, disk = tmp_path / "events.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    log.append(START)
    disk.room = room
    heading = {"epoch": 1, "fragments": 1, "interval": 1}
    assert log.rotate(needed=100, part_bytes=1, heading=heading) is (room > 75)
    writer.append(path, {"event": "restart", "epoch": 0, "process": "eu/0"})
    log.append(merge_of(1))
    assert not log.rotate(needed=100, part_bytes=1, heading=heading)
    disk.room = None
    log.append(merge_of(2))
    assert log.rotate(needed=100, part_bytes=1, heading=heading)
    log.close()
    (tmp_path / "events.1.jsonl").unlink()
    assert [row["part"] for row in reader.read(path) if row["event"] == "rotate"] == [2, 3]
    found = audit_parts(reader.lines(path))
    assert found.violations == ()
    assert found.unseen[0] == "1 older part that rotation deleted"


def test_a_part_that_the_supervisor_began_gets_its_heading_at_the_next_start(tmp_path: Path):
    """A syncer is killed between the two calls that create the part and write its first line."""
    path = tmp_path / "events.jsonl"
    (tmp_path / "events.1.jsonl").write_text(json.dumps(START) + "\n")
    for epoch in (2, 3):
        writer.append(path, {"event": "restart", "epoch": 0, "process": "syncer"})
        log = JournalWriter(path)
        log.append({**START, "epoch": epoch})
        log.close()
    kinds = [row["event"] for row in reader.read(path)]
    assert kinds == ["start", "restart", "rotate", "start", "restart", "start"]
    assert audit_parts(reader.lines(path)).violations == ()


def test_lines_without_an_event_state_how_many_before_them_were_lost(tmp_path: Path):
    path, disk = tmp_path / "steps.jsonl", RefusingDisk()
    log = JournalWriter(path, disk=disk)
    disk.room = 5
    for step in range(3):
        log.append({"step": step})
    disk.room = None
    assert log.sync()
    log.append({"step": 3})
    log.append({"step": 4})
    log.close()
    rows = [(row["step"], row.get("dropped")) for row in reader.read(path)]
    assert rows == [(3, 3), (4, None)]


def test_a_journal_whose_file_was_deleted_begins_a_new_part(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    log = JournalWriter(path)
    log.append({"a": 0})
    path.unlink()
    assert log.rotate(needed=100, part_bytes=1)
    log.append({"a": 1})
    log.close()
    assert [row.get("a", row.get("part")) for row in reader.read(path)] == [2, 1]


def test_a_copy_of_a_file_that_has_become_a_part_counts_once(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a":1}\n')
    (tmp_path / "events.1.jsonl").write_text('{"a":1}\n{"a":2}\n')
    assert [row["a"] for row in reader.read(path)] == [1, 2]


def test_a_line_of_another_process_written_during_a_rotation_is_kept(tmp_path: Path):
    """The supervisor has the file open while the syncer gives it another name."""
    path = tmp_path / "events.jsonl"
    log = JournalWriter(path)
    log.append({"event": "start"})
    with path.open("a") as other:
        log.rotate(needed=1, part_bytes=1)
        other.write('{"event":"restart"}\n')
    log.append({"event": "stop"})
    log.close()
    assert [row["event"] for row in reader.read(path)] == ["start", "restart", "rotate", "stop"]


def test_long_lines_are_read_across_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "_READ_BYTES", 7)
    path = tmp_path / "events.jsonl"
    path.write_text('{"a":"ÄÖÜ and more"}\n\n{"b":2}')
    assert list(reader.lines(path)) == [
        ("events.jsonl line 1", '{"a":"ÄÖÜ and more"}'),
        ("events.jsonl line 2", ""),
        ("events.jsonl line 3", '{"b":2}'),
    ]
