"""
How much memory this process may use: the machine's, or less if a cgroup of it has a limit. Linux only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def memory_bytes(root: Path = ROOT) -> int | None:
    """
    The most memory that this process can ever have, in bytes; None: unknown.

    Args:
        root: where proc/ and sys/ are.
    """
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, size = line.partition(":")
        if name == "MemTotal" and size.endswith(" kB"):
            yield int(size[:-3]) << 10
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mounted, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Each group above may have a smaller limit. In a container the path may be that of the host, which
        # is not mounted there: then the group of the container is at the root of the mount.
        group = PurePosixPath("/", path)
        for each in (group, *group.parents):
            for limit in _lines(mounted / str(each).lstrip("/") / name):
                if limit.isdigit():  # "max": none
                    yield int(limit)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
