"""
The memory that trainer and link share: for every fragment a host copy and an inbox, both flat fp32,
and the constants.

    host[p]   written by the trainer (its parameters at a step boundary), read by the link (uploads)
    inbox[p]  written by the link (Θ_p as received), read by the trainer; base of the deltas

Beside each host copy stand the facts of the moment it was taken; copy and facts change together,
under the fragment's lock, so that what is uploaded always belongs to the t_m and the counters in
its header. A lock is a POSIX record lock on the memory's file: the trainer only ever tries it, and
one that its holder took to the grave is free again.
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
from diloco.fragments import Layout, Tensor, cut

F32 = npt.NDArray[np.float32]

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"diloco01"
_PAGE = 4096

# Columns of the table, one row of int64 per fragment: the first four are the trainer's, the others
# the link's.
_LOCAL_STEP, _STEPS, _TOKENS, _BASE, _GENERATION, _VALID, _EPOCH, _STEP = range(8)
_COLUMNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """
    The facts of a host copy: t_m when it was taken, and the fragment's counters at that moment.
    """

    local_step: int
    steps: int
    tokens: int
    base: int
    """Generation of the inbox that the parameters had last applied; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxState:
    """What lies in an inbox."""

    generation: int
    """Grows with everything published; 0: nothing ever was."""
    version: tuple[int, int] | None
    """(epoch, global step); None: nothing whole."""


class Shared:
    """Views into the memory; both processes have one, on the same file."""

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
        """Room for the constants as a safetensors file."""
        self._threads = [threading.Lock() for _ in range(rows)]

    @classmethod
    def create(cls, layout: Layout, *, constants_bytes: int) -> Shared:
        """
        New memory, all zeros.

        Raises:
            OSError: the machine does not have as much.
        """
        facts = json.dumps(
            {
                "tensors": [asdict(t) for t in layout.tensors],
                "constants": [asdict(t) for t in layout.constants],
                "fragments": len(layout.fragments),
                "average": [s.tensor.name for f in layout.fragments for s in f.slots if s.average],
            }
        ).encode()
        fd = _anonymous_file()
        os.ftruncate(fd, _places(layout, len(facts), constants_bytes).size)
        os.pwrite(fd, _HEAD.pack(_MAGIC, len(facts), constants_bytes) + facts, 0)
        return cls(fd, owner=True)

    @classmethod
    def attach(cls, fd: int) -> Shared:
        """
        Memory that the trainer made.

        Raises:
            DamagedError: it is something else.
        """
        return cls(fd, owner=False)

    def host(self, fragment: int) -> F32:
        """The host copy of a fragment, as a view."""
        return self._host[self._ends[fragment] : self._ends[fragment + 1]]

    def inbox(self, fragment: int) -> F32:
        """What was received of a fragment, as a view."""
        return self._inbox[self._ends[fragment] : self._ends[fragment + 1]]

    # ------------------------------------------------------------ locks

    @contextlib.contextmanager
    def hold(self, fragment: int) -> Iterator[None]:
        """Nobody else changes or encodes this fragment meanwhile; waits for those who do."""
        with self._threads[fragment]:
            fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, fragment)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, fragment)

    @contextlib.contextmanager
    def try_hold(self, fragment: int) -> Iterator[bool]:
        """As `hold`, but yields False at once when the other process is at it."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, fragment)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, fragment)

    # ------------------------------------------------------------ facts; call under the lock

    def note_copy(self, fragment: int, copy: HostCopy) -> None:
        """Trainer: the host copy was just taken."""
        self._table[fragment, :4] = (copy.local_step, copy.steps, copy.tokens, copy.base)

    def copy(self, fragment: int) -> HostCopy:
        """The facts of the host copy; local_step 0: none was ever taken."""
        local_step, steps, tokens, base = (int(n) for n in self._table[fragment, :4])
        return HostCopy(local_step=local_step, steps=steps, tokens=tokens, base=base)

    def inbox_state(self, fragment: int) -> InboxState:
        """What lies in the inbox."""
        generation, valid, epoch, step = (int(n) for n in self._table[fragment, 4:])
        return InboxState(generation=generation, version=(epoch, step) if valid else None)

    def begin_inbox(self, fragment: int) -> None:
        """
        Link: from now on the inbox holds nothing whole (should this process die while it writes).
        """
        self._table[fragment, _VALID] = 0

    def publish(self, fragment: int, generation: int, version: tuple[int, int]) -> None:
        """Link: the inbox holds this version, whole."""
        self._table[fragment, _EPOCH:] = version
        self._table[fragment, _GENERATION] = generation
        self._table[fragment, _VALID] = 1

    def close(self) -> None:
        """Let go of the memory; views that are still in use keep it."""
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
        average=[name.translate(escape) for name in facts["average"]],
    )


def _anonymous_file() -> int:
    """A file without a name that lives in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("diloco-learner")
    fd, path = tempfile.mkstemp(prefix="diloco-learner-")
    os.unlink(path)
    return fd
