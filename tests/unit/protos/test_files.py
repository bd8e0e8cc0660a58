"""A file is replaced as a whole or not at all, whatever fails in between."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from diloco.runtime import files


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", ["größer\n", b"\x00\xff", ""])
def test_a_file_gets_the_new_content_and_no_temporary_file_stays(tmp_path, content, durable):
    path = tmp_path / "file"
    path.write_text("old")
    files.replace(path, content, durable=durable)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def half(fd: int) -> None:
    os.write(fd, b"half")
    raise OSError("disk")


def test_a_failure_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk"), files.replacing(path) as fd:
        half(fd)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_path_that_cannot_be_replaced_leaves_no_temporary_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        files.replace(tmp_path / "folder", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_secret_is_private_even_where_an_open_temporary_file_was_left(tmp_path):
    path = tmp_path / "key"
    files.temporary(path).write_text("left by a crash, readable for all")
    with files.replacing(path, mode=0o600) as fd:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        os.write(fd, b"secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_b02_a_link_planted_as_the_temporary_file_is_not_written_through(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "key"
    victim.write_text("precious")
    files.temporary(path).symlink_to(victim)
    with files.replacing(path, mode=0o600) as fd:
        os.write(fd, b"secret")
    assert (victim.read_text(), path.read_text()) == ("precious", "secret")
    assert not path.is_symlink()


def test_b02_a_link_is_neither_read_nor_written_through_and_the_error_states_what_to_do(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "state"
    victim.write_text("precious")
    link.symlink_to(victim)
    for opened in (
        lambda: files.read(link),
        lambda: files.open_unlinked(link, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        with pytest.raises(OSError, match=r"found a link, expected a regular file; remove") as seen:
            opened()
        assert (seen.value.errno, seen.value.filename) == (errno.ELOOP, str(link))
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path, make):
    make(tmp_path / "state")
    with pytest.raises(OSError, match="expected a regular file; remove"):
        files.read(tmp_path / "state")


def test_a_regular_file_is_read_whole(tmp_path):
    (tmp_path / "state").write_bytes(b"x" * 100_000)
    assert files.read(tmp_path / "state") == b"x" * 100_000


def test_a_durable_file_and_its_directory_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    files.replace(tmp_path / "file", "new", durable=True)
    assert synced == [str(tmp_path / "file.tmp"), str(tmp_path)]
    files.replace(tmp_path / "file", "newer")
    assert len(synced) == 2
