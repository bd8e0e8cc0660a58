"""The log file of a process: its size, and what its end shows. No processes."""

from __future__ import annotations

import errno

import pytest

from diloco.runtime import files
from diloco_agent.output import Log


@pytest.fixture
def log(tmp_path):
    """A log whose earlier runs wrote "old" and a line."""
    (tmp_path / "eu.log").write_bytes(b"old banner\n")
    made = Log(tmp_path / "eu.log")
    made.file = made.open()
    yield made
    made.file.close()


def write(log, data):
    log.file.write(data)
    log.file.flush()


def test_a_process_that_writes_faster_than_its_log_is_limited_leaves_no_more_than_the_limit(
    log, tmp_path
):
    write(log, b"x" * 5000 + b"the end\n")
    log.limit(1000)
    assert (tmp_path / "eu.log").stat().st_size == 0
    earlier = (tmp_path / "eu.1.log").read_bytes()
    assert len(earlier) == 1000
    assert earlier.endswith(b"the end\n")


def test_a_disk_that_refuses_the_copy_keeps_the_earlier_part(log, tmp_path, monkeypatch):
    (tmp_path / "eu.1.log").write_bytes(b"earlier\n")

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_all", refuse)
    write(log, b"x" * 5000)
    log.limit(1000)
    assert (tmp_path / "eu.log").stat().st_size == 0
    assert (tmp_path / "eu.1.log").read_bytes() == b"earlier\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eu.1.log", "eu.log"]


def test_what_earlier_runs_wrote_is_not_the_end_of_this_one_after_a_move(log):
    write(log, b"this run\n")
    log.limit(5)
    assert log.tail() == " run\n"[-5:]
    write(log, b"more\n")
    assert log.tail() == " run\nmore\n"
    other = Log(log._path)
    with other.open() as file:
        file.write(b"another\n")
        file.flush()
        other.limit(10)
        assert other.tail() == "another\n"
