"""Reads files of JSON lines, in parts and torn ones included."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diloco.journal.parts import Position, parts
from diloco.runtime.disk import LOCAL, Disk, File, Mode

_READ_BYTES = 1 << 20


def parse(line: str | bytes) -> dict[str, Any] | None:
    """The object on one line; None: the line is torn, empty or no object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def objects(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The objects of all lines that hold one."""
    for line in lines:
        found = parse(line)
        if found is not None:
            yield found


def lines(
    path: Path, *, since: Position | None = None, disk: Disk = LOCAL
) -> Iterator[tuple[str, str]]:
    """
    All lines of a journal in all its parts, the oldest first, each with its file and number.

    Args:
        path: the newest part.
        since: lines before this position are left out; a position that no longer exists, such
            as one behind the end of a file that lost its last lines, leaves none of its part out.
        disk: holds the files.

    Yields:
        ("events.1.jsonl line 7", the line without its end); not UTF-8: with replacement characters.

    Raises:
        OSError: the disk reported an error.
    """
    found = parts(path, disk=disk)
    if since is not None and since.part > max((number for number, _ in found), default=0):
        since = None
    for number, part in found:
        if since is not None and number < since.part:
            continue
        with disk.open(part, Mode.READ) as file:
            at = since.offset if since is not None and number == since.part else 0
            begin = at if at <= file.size() else 0
            for count, line in enumerate(split(file, begin), 1):
                yield f"{part.name} line {count}", line.decode(errors="replace")


def read(
    path: Path, *, since: Position | None = None, disk: Disk = LOCAL
) -> Iterator[dict[str, Any]]:
    """The objects of a journal in all its parts, one at a time; nothing if there is no file."""
    yield from objects(line for _, line in lines(path, since=since, disk=disk))


def split(file: File, begin: int = 0) -> Iterator[bytes]:
    """The lines of a file without their ends, from this offset on."""
    buffer, at = bytearray(_READ_BYTES), begin
    pending: list[bytes] = []  # joined once: a line may be longer than the buffer by far
    while count := file.read_into(memoryview(buffer), at):
        at += count
        first, *others = bytes(buffer[:count]).split(b"\n")
        pending.append(first)
        for line in others:
            yield b"".join(pending)
            pending = [line]
    if rest := b"".join(pending):
        yield rest
