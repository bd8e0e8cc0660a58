"""
Counters whose numbers are never used twice, each in a file of its own.

Shell, used by `store` only. The number is there three times, each with a checksum: a damaged byte spoils
at most two of the lines, so the number is still known, and never taken for another one.

    12 4f4c1c4b
    12 4f4c1c4b
    12 4f4c1c4b
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

from diloco.errors import StorageError
from diloco.journal.background import CAPACITY
from diloco.runtime.disk import Disk, read, replace

log = logging.getLogger(__name__)

COPIES = 3


def count(disk: Disk, path: Path, *, at_least: int, known: int | None = None) -> int:
    """
    One more than the number in the file, and than `at_least` and `known`; durable before it returns.

    Args:
        at_least: a number that was used; there may be larger ones.
        known: the largest number that was used, if this process has read or counted it: what happens to
            the file afterwards changes nothing.

    Raises:
        OSError: the disk reported an error; the number may be skipped, but is not used.
        StorageError: the file is damaged, its copies do not show the number, and `known` is None.
    """
    value = max(_counted(disk, path, known), at_least) + 1
    replace(disk, path, encode(value))
    return value


def _counted(disk: Disk, path: Path, known: int | None) -> int:
    try:
        return max(counted(disk, path), known or 0)
    except (StorageError, OSError) as error:
        if known is None:
            raise
        log.warning("%s is written again, its last number was %d: %s", path, known, error)
        return known


def counted(disk: Disk, path: Path) -> int:
    """
    The number in the file; 0: there is no file.

    Raises:
        OSError: the disk reported an error.
        StorageError: as `count`.
    """
    if disk.size(path) is None:
        return 0
    text = read(disk, path)
    value = decode(text)
    if value is None:
        name = path.name
        raise StorageError(
            f"{path}: holds {text.decode(errors='replace').strip()[:40]!r}, expected a whole number; write into it, "
            f'as digits alone, a number that is {CAPACITY} larger than every "{name}" in events*.jsonl of '
            f"{path.parent.parent} and in the names and *.json of {path.parent}: numbers that were used "
            "may be missing there"
        )
    if text != encode(value) and not text.strip().isdigit():
        log.warning("%s is damaged; according to its intact copies, the number is %d", path, value)
    return value


def encode(value: int) -> bytes:
    """The content of the file."""
    return b"%d %08x\n" % (value, _checksum(b"%d" % value)) * COPIES


def decode(text: bytes) -> int | None:
    """The number in a file's content; None: it is damaged beyond recognition."""
    if text.strip().isdigit():  # written by a person, or by an earlier release
        return int(text)
    found = [line.split(b" ") for line in text.split(b"\n")]
    valid = [
        int(line[0])
        for line in found
        if len(line) == 2 and line[0].isdigit() and line[1] == b"%08x" % _checksum(line[0])
    ]
    return max(valid, default=None)


def _checksum(digits: bytes) -> int:
    return zlib.crc32(digits)
