"""The disk of the machine: files appear whole or not at all, private, and never through a link."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from diloco.runtime import disk
from diloco.runtime.disk import LOCAL, Mode


def test_a_created_file_replaces_the_old_one_only_when_it_is_renamed(tmp_path: Path):
    path = tmp_path / "file"
    disk.replace(LOCAL, path, "old")
    with LOCAL.open(tmp_path / "new", Mode.CREATE, expected_bytes=3) as file:
        disk.write_all(file, b"new and padding")
        file.truncate(3)
        file.sync()
        assert disk.read(LOCAL, path) == b"old"
    LOCAL.rename(tmp_path / "new", path)
    assert disk.read(LOCAL, path) == b"new"
    assert LOCAL.names(tmp_path) == ["file"]


def test_appending_goes_to_the_end_and_can_be_read(tmp_path: Path):
    path = tmp_path / "lines"
    for text in (b"a\n", b"bc\n"):
        with LOCAL.open(path, Mode.APPEND) as file:
            assert file.write(text) == len(text)
    with LOCAL.open(path, Mode.READ) as file:
        assert file.size() == 5
        data = bytearray(9)
        assert file.read_into(memoryview(data), 2) == 3
        assert bytes(data[:3]) == b"bc\n"
        assert file.read_into(memoryview(data), 5) == 0


def test_what_is_not_there_has_no_size_and_can_be_removed(tmp_path: Path):
    assert LOCAL.size(tmp_path / "file") is None
    LOCAL.remove(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"123")
    assert LOCAL.size(tmp_path / "file") == 3
    assert LOCAL.size(tmp_path) is None


def test_a_planted_link_is_not_followed(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "state"
    link.symlink_to(victim)
    for mode in (Mode.READ, Mode.APPEND):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            LOCAL.open(link, mode)
    assert LOCAL.size(link) is None
    (tmp_path / "state.tmp").symlink_to(victim)
    disk.replace(LOCAL, link, "new")
    assert (victim.read_text(), link.read_text(), link.is_symlink()) == ("precious", "new", False)


def test_a_new_directory_is_private_and_one_that_is_there_keeps_its_mode(tmp_path: Path):
    before = os.umask(0)
    try:
        LOCAL.make_directory(tmp_path / "new")
        (tmp_path / "old").mkdir(0o770)
        LOCAL.make_directory(tmp_path / "old")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "old")]
    assert modes == [0o700, 0o770]


@pytest.mark.parametrize("mode", [Mode.CREATE, Mode.APPEND])
def test_a_new_file_is_private(tmp_path: Path, mode: Mode):
    before = os.umask(0)
    try:
        LOCAL.open(tmp_path / "file", mode).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk.replace(LOCAL, tmp_path / "file", "old")

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.replace(LOCAL, tmp_path / "file", "new")
    assert LOCAL.names(tmp_path) == ["file"]
    assert disk.read(LOCAL, tmp_path / "file") == b"old"
