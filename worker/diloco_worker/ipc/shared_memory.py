"""
The memory that trainer and link share: per fragment a host copy and an inbox, both flat fp32, and
the constants.

    host[p]   written by the trainer (its parameters at a step boundary), read by the link (uploads)
    inbox[p]  written by the link (Θ_p as received), read by the trainer; base of the deltas

Each host copy comes with the counters of the step at which it was taken. Both change together,
under the fragment's lock, so an upload always matches the t_m and the counters in its header. A
lock is a POSIX record lock on the memory's file: the kernel releases it when its holder dies. During
training the trainer only tries it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.errors import DamagedError
from diloco.model.fragments import Layout, Tensor, cut
from diloco_worker.core.ledger import HostCopy

F32 = npt.NDArray[np.float32]

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"diloco01"
_PAGE = 4096

# Columns of the table, one row of int64 per fragment. The trainer writes the first four, the link the
# others.
_LOCAL_STEP, _STEPS, _TOKENS, _BASE, _GENERATION, _VALID, _EPOCH, _STEP = range(8)
_COLUMNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxState:
    """What an inbox holds."""

    generation: int
    """Counts what was published; 0: nothing yet."""
    version: tuple[int, int] | None
    """(epoch, global step); None: nothing complete."""


class SharedMemory:
    """Views into the memory; each process maps the same file."""

    def __init__(self, fd: int, *, owner: bool) -> None:
        self.fd = fd
        self._owner = owner
        self._map = mmap.mmap(fd, 0)
        magic, facts_bytes, constants_bytes = _HEAD.unpack_from(self._map)
        if magic != _MAGIC:
            raise DamagedError(f"shared memory begins with {magic!r}, expected {_MAGIC!r}")
        facts = json.loads(self._map[_HEAD.size : _HEAD.size + facts_bytes])
        self.layout = _layout(facts)
        places = _places(self.layout, facts_bytes, constants_bytes)
        rows = len(self.layout.fragments)
        self._table = np.frombuffer(self._map, np.int64, rows * _COLUMNS, places.table)
        self._table = self._table.reshape(rows, _COLUMNS)
        self._ends = np.cumsum([0, *(f.elements for f in self.layout.fragments)])
        total = int(self._ends[-1])
        self._host = np.frombuffer(self._map, np.float32, total, places.host)
        self._inbox = np.frombuffer(self._map, np.float32, total, places.inbox)
        self.constants = np.frombuffer(self._map, np.uint8, constants_bytes, places.constants)
        """The constants as a safetensors file."""
        self._thread_locks = [threading.Lock() for _ in range(rows)]

    @classmethod
    def create(cls, layout: Layout, *, constants_bytes: int) -> SharedMemory:
        """
        New memory, all zeros.

        Raises:
            OSError: the machine does not have enough.
        """
        facts = json.dumps(
            {
                "tensors": [asdict(t) for t in layout.tensors],
                "constants": [asdict(t) for t in layout.constants],
                "frozen": [asdict(t) for t in layout.frozen],
                "fragments": len(layout.fragments),
                "average": [s.tensor.name for f in layout.fragments for s in f.slots if s.average],
            }
        ).encode()
        fd = _anonymous_file()
        os.ftruncate(fd, _places(layout, len(facts), constants_bytes).size)
        os.pwrite(fd, _HEAD.pack(_MAGIC, len(facts), constants_bytes) + facts, 0)
        return cls(fd, owner=True)

    @classmethod
    def attach(cls, fd: int) -> SharedMemory:
        """
        Map the memory that the trainer created.

        Raises:
            DamagedError: the file holds something else.
        """
        return cls(fd, owner=False)

    def host(self, fragment: int) -> F32:
        """The host copy of a fragment: a view of shape (elements,), fp32."""
        return self._host[self._ends[fragment] : self._ends[fragment + 1]]

    def inbox(self, fragment: int) -> F32:
        """The inbox of a fragment: a view of shape (elements,), fp32."""
        return self._inbox[self._ends[fragment] : self._ends[fragment + 1]]

    # ------------------------------------------------------------ locks

    @contextlib.contextmanager
    def lock(self, fragment: int) -> Iterator[None]:
        """Hold the lock of a fragment, against other threads and the other process; may block."""
        with self._thread_locks[fragment]:
            fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, fragment)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, fragment)

    @contextlib.contextmanager
    def try_lock(self, fragment: int) -> Iterator[bool]:
        """As `lock`, but yields False at once if the other process holds the lock."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, fragment)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, fragment)

    # ------------------------------------------------------------ counters and versions; call under the lock

    def set_host_copy(self, fragment: int, copy: HostCopy) -> None:
        """Trainer: set the counters of a host copy."""
        self._table[fragment, :4] = (copy.local_step, copy.steps, copy.tokens, copy.base)

    def host_copy(self, fragment: int) -> HostCopy:
        """The counters of the host copy; local_step 0: there is no copy yet."""
        local_step, steps, tokens, base = (int(n) for n in self._table[fragment, :4])
        return HostCopy(local_step=local_step, steps=steps, tokens=tokens, base=base)

    def inbox_state(self, fragment: int) -> InboxState:
        """What the inbox holds."""
        generation, valid, epoch, step = (int(n) for n in self._table[fragment, 4:])
        return InboxState(generation=generation, version=(epoch, step) if valid else None)

    def invalidate_inbox(self, fragment: int) -> None:
        """Link: mark the inbox as incomplete before writing, in case this process dies meanwhile."""
        self._table[fragment, _VALID] = 0

    def publish(self, fragment: int, generation: int, version: tuple[int, int]) -> None:
        """Link: the inbox holds this version completely."""
        self._table[fragment, _EPOCH:] = version
        self._table[fragment, _GENERATION] = generation
        self._table[fragment, _VALID] = 1

    def close(self) -> None:
        """Close the file; views that are still in use keep the memory."""
        if self._owner:
            os.close(self.fd)
        self._owner = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    table: int
    host: int
    inbox: int
    constants: int
    size: int


def _places(layout: Layout, facts_bytes: int, constants_bytes: int) -> _Places:
    def up(n: int) -> int:
        return -(-n // _PAGE) * _PAGE

    values = 4 * sum(f.elements for f in layout.fragments)
    table = up(_HEAD.size + facts_bytes)
    host = up(table + 8 * _COLUMNS * len(layout.fragments))
    inbox = up(host + values)
    constants = up(inbox + values)
    return _Places(
        table=table,
        host=host,
        inbox=inbox,
        constants=constants,
        size=up(constants + constants_bytes),
    )


def _layout(facts: dict[str, Any]) -> Layout:
    def tensor(data: dict[str, Any]) -> Tensor:
        return Tensor(**{**data, "shape": tuple(data["shape"]), "aliases": tuple(data["aliases"])})

    escape = str.maketrans({"[": "[[]", "?": "[?]", "*": "[*]"})
    return cut(
        [tensor(t) for t in facts["tensors"]],
        num_fragments=facts["fragments"],
        constants=[tensor(t) for t in facts["constants"]],
        frozen=[tensor(t) for t in facts["frozen"]],
        average=[name.translate(escape) for name in facts["average"]],
    )


def _anonymous_file() -> int:
    """A file without a name; in memory where the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("diloco-learner")
    fd, path = tempfile.mkstemp(prefix="diloco-learner-")
    os.unlink(path)
    return fd
