"""
A journal in parts: "events.1.jsonl", "events.2.jsonl", …, and the newest lines in "events.jsonl".

Numbers only grow. A part begins with the line `rotate`, which has its number, so the oldest part shows how
many parts before it were deleted. Only lines `restart` of a supervisor may be before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diloco.runtime.disk import LOCAL, Disk, Mode

PART_BYTES = 32 << 20
"""A file that has reached this size becomes a part of its own at the next rotation."""
TOTAL_BYTES = 256 << 20
"""The oldest parts are deleted while all parts together are larger than this."""

_FIRST_BYTES = 256


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a journal; lines before it were written earlier."""

    part: int = 1
    offset: int = 0
    """Bytes from the beginning of the part."""


def part_path(path: Path, number: int) -> Path:
    """The file of an earlier part: "events.3.jsonl" of "events.jsonl"."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def numbers(path: Path, names: Iterable[str]) -> list[int]:
    """The numbers of the earlier parts of a journal among the names in its directory, ascending."""
    pattern = re.compile(rf"{re.escape(path.stem)}\.([1-9]\d{{0,8}}){re.escape(path.suffix)}")
    return sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))


def parts(path: Path, *, disk: Disk = LOCAL) -> list[tuple[int, Path]]:
    """
    The parts that are there, the oldest first, with their numbers.

    In a copy that was made in pieces, the newest file may still be an earlier copy of a part that is
    there as well; it is left out.

    Raises:
        OSError: the disk reported an error.
    """
    try:
        names = disk.names(path.parent)
    except FileNotFoundError:
        return []
    found = [(number, part_path(path, number)) for number in numbers(path, names)]
    if path.name not in names:
        return found
    begins = _begin(disk, path)
    if begins and any(_begin(disk, part)[: len(begins)] == begins for _, part in found):
        return found
    return [*found, (found[-1][0] + 1 if found else 1, path)]


def _begin(disk: Disk, path: Path) -> bytes:
    """The first bytes of the first line: its time and number make it unlike any other."""
    buffer = bytearray(_FIRST_BYTES)
    with disk.open(path, Mode.READ) as file:
        count = file.read_into(memoryview(buffer), 0)
    line, newline, _ = bytes(buffer[:count]).partition(b"\n")
    return line + newline
