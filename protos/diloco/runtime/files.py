"""
Replaces a file as a whole: a reader sees the old content or the new. Opens files without following
links. Standard library only.

    temporary name → write → fsync (durable) → rename → fsync of the directory (durable)

Without `durable` a crash of the machine may lose the new content or leave the file empty; a crash
of the process cannot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".tmp"
"""Suffix of a file that is not complete yet."""

PRIVATE = 0o600
"""Mode of state files: they are of use only to the user who runs the process."""

PRIVATE_DIRECTORY = 0o700
"""Mode of the directories that hold only such files."""


def temporary(path: Path) -> Path:
    """The name a file has until it is complete."""
    return path.with_name(path.name + TEMPORARY)


def replace(path: Path, content: str | bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """
    Give `path` this content, text in UTF-8.

    Raises:
        OSError: the disk reported an error; the old file is intact and no temporary one is left.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, durable=durable, mode=mode) as fd:
        write_all(fd, data)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, mode: int = 0o666) -> Iterator[int]:
    """
    A file descriptor to write the new content to; `path` has it when the block ends without error.

    The mode, less the umask, holds from the first byte on: a secret is never readable for others.

    Raises:
        OSError: the disk reported an error; the old file is intact and no temporary one is left.
    """
    unfinished = temporary(path)
    unfinished.unlink(missing_ok=True)
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            yield fd
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        publish(path, durable=durable)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def open_unlinked(path: Path, flags: int, mode: int = PRIVATE) -> int:
    """
    A file descriptor of `path` itself: a symbolic link that has the name is not followed.

    Raises:
        OSError: as os.open does; of a link, ELOOP with what to do.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        text = f"{os.strerror(errno.ELOOP)}: found a link, expected a regular file; remove the link"
        raise OSError(errno.ELOOP, text, str(path)) from None


def open_regular(path: Path) -> int:
    """
    A file descriptor to read a regular file; links, pipes and devices are refused, without waiting.

    Raises:
        OSError: the file cannot be opened, or is something else; then with what to do.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    fd = open_unlinked(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "expected a regular file; remove what has its name", str(path))


def read(path: Path) -> bytes:
    """
    The content of a regular file.

    Raises:
        OSError: as `open_regular` does, or the disk reported an error.
    """
    with open(open_regular(path), "rb") as file:
        return file.read()


def publish(path: Path, *, durable: bool) -> None:
    """Rename the temporary file of `path`, complete and, if `durable`, synced, to `path`."""
    os.replace(temporary(path), path)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes, however many calls it takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
