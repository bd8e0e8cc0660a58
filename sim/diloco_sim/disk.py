"""
A disk in memory, with a page cache that a power failure loses, as `diloco.runtime.disk.Disk`.

The real code runs on it unchanged, in a single call, while its operations take virtual time:

    completion = disk.call(store.write, snapshot)       # returns now, as if hours had passed
    process.clock.at(completion.done_at, ..., process=process)

Each operation is logged with the virtual time at which it begins and ends. When the process crashes
before `done_at`, operations that had not begun are undone and the one that was under way is cut: what
had been done by then remains. A crash keeps the page cache; a power failure keeps what was synced, and
of the rest, by the seed, a prefix.

    faults by virtual time: slow, hanging, full, EIO, syncs that do nothing; and a bit flipped at rest
"""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Generic, Self, TypeVar

from diloco.runtime.disk import Data, Mode
from diloco_sim.clock import Clock, Process, Timer

T = TypeVar("T")
V = TypeVar("V")

OPERATION_SECONDS = 20e-6
"""Of each operation that only touches memory."""
SYNC_SECONDS = 2e-3
"""Of each sync, besides its bytes."""
CACHE_BANDWIDTH = 2e9
"""Bytes per second, to and from the page cache."""
WRITEBACK_SECONDS = 30.0
"""The kernel writes what is older than this, without a sync."""

_REASONS = {
    errno.ENOSPC: "No space left on device",
    errno.EIO: "Input/output error",
    errno.EBADF: "Bad file descriptor",
}


Files = dict[str, dict[str, bytes]]
"""Directory → name → content."""


class Weakness(Enum):
    """What can be wrong with a disk for a while."""

    SLOW = "slow"
    """Operations take `amount` times as long."""
    HANG = "hang"
    """Operations wait until the end of the fault."""
    FULL = "full"
    """Nothing can be written (ENOSPC)."""
    FAIL = "fail"
    """Each operation fails with probability `amount` (EIO); what a sync should have written is lost."""
    FORGET = "forget"
    """A sync returns and has written nothing."""


@dataclass(frozen=True, slots=True)
class Completion(Generic[T]):
    """How a call on the disk ends."""

    done_at: float
    """Virtual time."""
    value: T | None
    error: Exception | None
    """What it raised."""


class SimulatedDisk:
    """
    The disk of a process, which outlives it.

    Args:
        clock: gives the time.
        random: for failures and losses; its own.
        bandwidth: of syncs, bytes per second.
        capacity_bytes: of all files.
    """

    def __init__(
        self, clock: Clock, random: random.Random, *, bandwidth: float = 200e6, capacity_bytes: int = 1 << 40
    ) -> None:  # fmt: skip
        self._clock, self._random = clock, random
        self._bandwidth, self._capacity_bytes = bandwidth, capacity_bytes
        self._directories: dict[str, _Directory] = {}
        self._used_bytes = 0
        self._cursor: float | None = None
        """Virtual time within a call; None: outside of calls operations take no time."""
        self._undo: deque[tuple[float, float, Callable[[float], None]]] = deque()
        """Begin, end, and how to undo all but a part of it; newest last."""
        self._weaknesses: list[tuple[Weakness, float, float, float]] = []

    # ------------------------------------------------------------ virtual time

    def attach(self, process: Process) -> None:
        """Lose what a crash of this process loses."""
        process.observers.append(self)

    def call(self, function: Callable[..., T], *args: object, begin: float = 0.0) -> Completion[T]:
        """
        Run code that uses this disk; its operations follow each other from `begin`, or now if later.

        Returns:
            Its value or error, and the virtual time at which it has them.
        """
        outer = self._cursor
        self._cursor = max(self._clock.now, begin)
        try:
            value = function(*args)
        except Exception as error:
            return Completion(self._cursor, None, error)
        else:
            return Completion(self._cursor, value, None)
        finally:
            self._cursor = outer

    @property
    def time(self) -> float:
        """Virtual time of the code that runs now: within a call it is ahead of the clock."""
        return self._clock.now if self._cursor is None else self._cursor

    def thread(self, process: Process) -> DiskThread:
        """A thread of `process` that waits for this disk."""
        return DiskThread(self, process)

    def weaken(self, weakness: Weakness, begin: float, end: float, amount: float = 1.0) -> None:
        """
        Plan a fault; before its beginning, since a call may already be ahead of the clock.

        Args:
            weakness: what is wrong.
            begin: virtual time.
            end: virtual time.
            amount: see `Weakness`.
        """
        self._weaknesses.append((weakness, begin, end, amount))
        self._weaknesses.sort(key=lambda w: w[1])

    def flip(self, name: str = "") -> str | None:
        """Flip a bit at rest in a file whose path contains `name`; returns its path, None: no such file."""
        found = [
            (f"{path}/{file}", inode)
            for path, directory in self._directories.items()
            for file, inode in directory.names.items()
            if inode.data and name in f"{path}/{file}"
        ]
        if not found:
            return None
        path, inode = self._random.choice(found)
        inode.data[self._random.randrange(len(inode.data))] ^= 1 << self._random.randrange(8)
        return path

    def durable(self, path: Path) -> bytes | None:
        """The content of a file if it survives a power failure that comes now; None otherwise."""
        directory = self._directories.get(str(path.parent))
        entry = directory.durable.get(path.name) if directory is not None else None
        if entry is None:
            return None
        inode, since = entry
        complete = inode.synced == len(inode.data) and not inode.holes
        now = self._clock.now
        return bytes(inode.data) if complete and max(since, inode.synced_at) <= now else None

    def file_bytes(self, directory: Path, prefix: str) -> int:
        """Of the files of a directory whose names begin so, as programs see them."""
        found = self._directories.get(str(directory))
        names = found.names.items() if found is not None else ()
        return sum(len(inode.data) for name, inode in names if name.startswith(prefix))

    # ------------------------------------------------------------ copies

    @property
    def busy_until(self) -> float:
        """When all operations that have begun, or that a call will still make, are done."""
        return max((end for _, end, _ in self._undo), default=0.0)

    def copy(self) -> Files:
        """All files as programs see them."""
        return {
            path: {name: bytes(inode.data) for name, inode in directory.names.items()}
            for path, directory in self._directories.items()
        }

    def restore(self, files: Files) -> None:
        """Replace all files with those of a copy, durable at once; no process may have one open."""
        now = self._clock.now
        self._undo.clear()
        self._directories = {path: _Directory() for path in files}
        for path, contents in files.items():
            directory = self._directories[path]
            for name, content in contents.items():
                inode = directory.names[name] = _Inode()
                inode.data[:] = content
                inode.synced, inode.synced_at = len(content), now
                directory.durable[name] = inode, now
        self._used_bytes = sum(len(c) for contents in files.values() for c in contents.values())

    # ------------------------------------------------------------ crashes

    def crashed(self, process: Process, *, power: bool) -> None:
        """The process ended: nothing that it had not done by now was done."""
        now = self._clock.now
        while self._undo:
            begin, end, undo = self._undo.pop()
            if end > now:
                undo(0.0 if begin >= now else (now - begin) / (end - begin))
        if power:
            self._lose(now)

    def paused(self, process: Process) -> None:
        """A pause changes nothing."""

    def resumed(self, process: Process) -> None:
        """A pause changes nothing."""

    def _lose(self, now: float) -> None:
        """Forget the page cache, but for what the kernel had written by itself."""
        written = now - WRITEBACK_SECONDS
        kept: dict[_Inode, None] = {}
        for directory in self._directories.values():
            names = {name: inode for name, (inode, _) in directory.durable.items()}
            old = sum(when <= written for when, _ in directory.pending)
            survive = self._random.randint(old, len(directory.pending))
            for _, changes in directory.pending[:survive]:
                for name, inode in changes:
                    if inode is None:
                        names.pop(name, None)
                    else:
                        names[name] = inode
            directory.names, directory.pending = names, []
            directory.durable = {name: (inode, now) for name, inode in names.items()}
            kept.update(dict.fromkeys(names.values()))
        for inode in kept:
            inode.settle(written)
            most = len(inode.data)
            survive = self._random.choice(
                (inode.synced, most, self._random.randint(inode.synced, most))
            )
            del inode.data[survive:]
            for begin, end in inode.holes:
                length = max(0, min(end, len(inode.data)) - begin)
                inode.data[begin : begin + length] = bytes(length)
            inode.synced, inode.synced_at = len(inode.data), now
            inode.unsynced.clear()
            inode.holes.clear()
        self._used_bytes = sum(len(inode.data) for inode in kept)

    # ------------------------------------------------------------ operations

    def make_directory(self, path: Path) -> None:
        """See `Disk`; a directory is durable at once."""
        self._take(OPERATION_SECONDS)
        self._directories.setdefault(str(path), _Directory())

    def names(self, directory: Path) -> list[str]:
        """See `Disk`."""
        self._take(OPERATION_SECONDS)
        return list(self._directory(directory).names)

    def size(self, path: Path) -> int | None:
        """See `Disk`."""
        self._take(OPERATION_SECONDS)
        directory = self._directories.get(str(path.parent))
        inode = directory.names.get(path.name) if directory is not None else None
        return None if inode is None else len(inode.data)

    def open(self, path: Path, mode: Mode, *, expected_bytes: int = 0) -> SimulatedFile:
        """See `Disk`."""
        directory = self._directory(path.parent)
        inode = directory.names.get(path.name)
        writes = mode is Mode.CREATE or (mode is Mode.APPEND and inode is None)
        begin, end = self._take(OPERATION_SECONDS, writes=writes)
        if writes:
            if self._used_bytes + expected_bytes > self._capacity_bytes:
                raise _error(errno.ENOSPC)
            inode = _Inode()
            self._change(directory, ((path.name, inode),), begin, end)
        elif inode is None:
            raise _missing(path)
        return SimulatedFile(self, inode)

    def rename(self, source: Path, target: Path, *, durable: bool = True) -> None:
        """See `Disk`."""
        old, new = self._directory(source.parent), self._directory(target.parent)
        inode = old.names.get(source.name)
        if inode is None:
            raise _missing(source)
        begin, end = self._take(OPERATION_SECONDS)
        if old is new:
            self._change(new, ((source.name, None), (target.name, inode)), begin, end)
        else:
            self._change(new, ((target.name, inode),), begin, end)
            self._change(old, ((source.name, None),), begin, end)
        if durable:
            for directory in (new,) if old is new else (new, old):
                self._sync_directory(directory)

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        directory = self._directories.get(str(path.parent))
        begin, end = self._take(OPERATION_SECONDS)
        if directory is not None and path.name in directory.names:
            self._change(directory, ((path.name, None),), begin, end)

    def _write(self, inode: _Inode, data: Data) -> int:
        count = len(data)
        begin, end = self._take(OPERATION_SECONDS + count / CACHE_BANDWIDTH, writes=True)
        if self._used_bytes + count > self._capacity_bytes:
            count = self._capacity_bytes - self._used_bytes
            if count <= 0:
                raise _error(errno.ENOSPC)
        before = len(inode.data)
        inode.data += data[:count]
        inode.settle(end - WRITEBACK_SECONDS)
        inode.unsynced.append((end, len(inode.data)))
        self._used_bytes += count

        def undo(done: float) -> None:
            size = before + int(count * done)
            self._used_bytes -= len(inode.data) - size
            inode.resize(size)

        self._log(begin, end, undo)
        return count

    def _read(self, inode: _Inode, data: memoryview, offset: int) -> int:
        count = max(0, min(len(data), len(inode.data) - offset))
        self._take(OPERATION_SECONDS + count / CACHE_BANDWIDTH)
        data[:count] = inode.data[offset : offset + count]
        return count

    def _truncate(self, inode: _Inode, size: int) -> None:
        begin, end = self._take(OPERATION_SECONDS)
        removed, synced = bytes(inode.data[size:]), inode.synced
        unsynced = deque(inode.unsynced)
        inode.resize(size)
        self._used_bytes -= len(removed)

        def undo(_: float) -> None:
            inode.data += removed
            inode.synced, inode.unsynced = synced, unsynced
            self._used_bytes += len(removed)

        self._log(begin, end, undo)

    def _sync(self, inode: _Inode) -> None:
        fresh = len(inode.data) - inode.synced
        try:
            begin, end = self._take(SYNC_SECONDS + fresh / self._bandwidth)
        except OSError:
            # As Linux does: the pages count as clean from now on and are never written.
            inode.holes.append((inode.synced, len(inode.data)))
            raise
        if self._weakness(Weakness.FORGET, begin):
            return
        before = inode.synced, inode.synced_at, inode.unsynced
        inode.synced, inode.synced_at, inode.unsynced = len(inode.data), end, deque()

        def undo(_: float) -> None:
            inode.synced, inode.synced_at, inode.unsynced = before

        self._log(begin, end, undo)

    def _sync_directory(self, directory: _Directory) -> None:
        begin, end = self._take(SYNC_SECONDS)
        if self._weakness(Weakness.FORGET, begin):
            return
        # Not what another thread, whose call is ahead of the clock, does later.
        written = [change for change in directory.pending if change[0] <= begin]
        directory.pending = [change for change in directory.pending if change[0] > begin]
        durable = directory.durable
        before = {name: durable.get(name) for _, changes in written for name, _ in changes}
        for _, changes in written:
            for name, inode in changes:
                _put(durable, name, None if inode is None else (inode, end))

        def undo(_: float) -> None:
            for name, entry in before.items():
                _put(durable, name, entry)
            directory.pending = [*written, *directory.pending]

        self._log(begin, end, undo)

    # ------------------------------------------------------------ helpers

    def _take(self, seconds: float, *, writes: bool = False) -> tuple[float, float]:
        """
        Let an operation take its time.

        Returns:
            Its begin and end.

        Raises:
            OSError: the disk reports an error.
        """
        begin, slow = self._clock.now if self._cursor is None else self._cursor, 1.0
        if self._weaknesses:
            for kind, since, until, amount in self._weaknesses:
                if kind is Weakness.HANG and since <= begin < until and self._cursor is not None:
                    begin = until
                elif kind is Weakness.SLOW and since <= begin < until:
                    slow = max(slow, amount)
        end = begin
        if self._cursor is not None:
            self._cursor = end = begin + seconds * slow
        if self._weaknesses:
            if writes and self._weakness(Weakness.FULL, begin):
                raise _error(errno.ENOSPC)
            probability = self._weakness(Weakness.FAIL, begin)
            if probability and self._random.random() < probability:
                raise _error(errno.EIO)
        return begin, end

    def _weakness(self, weakness: Weakness, when: float) -> float:
        """Its largest amount at a time; 0: the disk does not have it."""
        found = [
            a for k, since, until, a in self._weaknesses if k is weakness and since <= when < until
        ]
        return max(found, default=0.0)

    def _directory(self, path: Path) -> _Directory:
        directory = self._directories.get(str(path))
        if directory is None:
            raise _missing(path)
        return directory

    def _change(
        self, directory: _Directory, changes: tuple[tuple[str, _Inode | None], ...], begin: float, end: float
    ) -> None:  # fmt: skip
        names = directory.names
        before = [(name, names.get(name)) for name, _ in changes]
        added = sum(len(i.data) for _, i in changes if i) - sum(len(i.data) for _, i in before if i)
        for name, inode in changes:
            _put(names, name, inode)
        self._used_bytes += added
        change = end, changes
        directory.pending.append(change)

        def undo(done: float) -> None:
            if done > 0:
                return  # it happens at once
            for name, inode in before:
                _put(names, name, inode)
            self._used_bytes -= added
            directory.pending = [c for c in directory.pending if c is not change]

        self._log(begin, end, undo)

    def _log(self, begin: float, end: float, undo: Callable[[float], None]) -> None:
        now, log = self._clock.now, self._undo
        while log and log[0][1] <= now:
            log.popleft()
        if end > now:
            log.append((begin, end, undo))


class SimulatedFile:
    """An open file of a `SimulatedDisk`; see `diloco.runtime.disk.File`."""

    __slots__ = ("_disk", "_inode", "_written")

    def __init__(self, disk: SimulatedDisk, inode: _Inode) -> None:
        self._disk = disk
        self._inode: _Inode | None = inode
        self._written = False

    def write(self, data: Data) -> int:
        """See `File`."""
        self._written = True
        return self._disk._write(self._open(), data)

    def read_into(self, data: memoryview, offset: int) -> int:
        """See `File`."""
        return self._disk._read(self._open(), data, offset)

    def size(self) -> int:
        """See `File`."""
        return len(self._open().data)

    def truncate(self, size_bytes: int) -> None:
        """See `File`."""
        self._disk._truncate(self._open(), size_bytes)

    def sync(self) -> None:
        """See `File`."""
        self._disk._sync(self._open())

    def close(self) -> None:
        """See `File`; fails as a network file system may, for a file that was written."""
        inode, self._inode = self._inode, None
        if inode is not None and self._written:
            self._disk._take(0.0, writes=True)

    def __enter__(self) -> Self:
        """See `File`."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `File`."""
        self.close()

    def _open(self) -> _Inode:
        if self._inode is None:
            raise _error(errno.EBADF)
        return self._inode


class DiskThread:
    """Runs calls on a disk one after the other, as the thread that writes snapshots does."""

    __slots__ = ("_disk", "_free_at", "_life", "_process")

    def __init__(self, disk: SimulatedDisk, process: Process) -> None:
        self._disk, self._process = disk, process
        self._free_at, self._life = 0.0, process.life

    def call(
        self, function: Callable[..., T], *args: object, done: Callable[[Completion[T]], object]
    ) -> Timer:
        """Run it when all earlier calls are done; `done` gets its completion at its end, in the process."""
        if self._life != self._process.life:
            self._free_at, self._life = 0.0, self._process.life
        completion = self._disk.call(function, *args, begin=self._free_at)
        self._free_at = completion.done_at
        clock = self._process.clock
        return clock.at(completion.done_at, done, completion, process=self._process)


class _Inode:
    """A file: what the page cache holds, and how much of it is on the disk."""

    __slots__ = ("data", "holes", "synced", "synced_at", "unsynced")

    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = 0
        """Bytes that are on the disk."""
        self.synced_at = 0.0
        self.unsynced: deque[tuple[float, int]] = deque()
        """When the file grew to which size since its last sync."""
        self.holes: list[tuple[int, int]] = []
        """What a failed sync left unwritten."""

    def settle(self, written: float) -> None:
        """The kernel has written what is older than this."""
        while self.unsynced and self.unsynced[0][0] <= written:
            when, size = self.unsynced.popleft()
            self.synced, self.synced_at = max(self.synced, size), when + WRITEBACK_SECONDS

    def resize(self, size: int) -> None:
        """Cut it to this size, on the disk as well."""
        del self.data[size:]
        self.synced = min(self.synced, size)
        last: float | None = None
        while self.unsynced and self.unsynced[-1][1] > size:
            last = self.unsynced.pop()[0]
        if last is not None and size > self.synced:
            self.unsynced.append((last, size))


class _Directory:
    """Names, as programs see them and as the disk has them."""

    __slots__ = ("durable", "names", "pending")

    def __init__(self) -> None:
        self.names: dict[str, _Inode] = {}
        self.durable: dict[str, tuple[_Inode, float]] = {}
        """On the disk, and since when."""
        self.pending: list[tuple[float, tuple[tuple[str, _Inode | None], ...]]] = []
        """Changes since the last sync of the directory."""


def _put(names: dict[str, V], name: str, value: V | None) -> None:
    if value is None:
        names.pop(name, None)
    else:
        names[name] = value


def _error(number: int) -> OSError:
    return OSError(number, _REASONS[number])


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
