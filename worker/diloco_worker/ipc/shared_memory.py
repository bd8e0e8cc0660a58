"""
The memory that trainer and link share: per fragment a host copy and an inbox, both flat fp32, and
the constants.

    host[p]   written by the trainer (its parameters at a step boundary), read by the link (uploads)
    inbox[p]  written by the link (Θ_p as received), read by the trainer; base of the deltas

Each host copy comes with the counters of the step at which it was taken. Both change together,
under the fragment's lock, so an upload always matches the t_m and the counters in its header. A
lock is a POSIX record lock on the memory's file: the kernel releases it when its holder dies. During
training the trainer only tries it.

The ranks of a learner map the same file. For them it also has spare places, in which they write the next host
copy while the link reads the previous one, and a control area (core/agreement.py).
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.errors import DamagedError
from diloco.model.fragments import Layout, Tensor, cut
from diloco_worker.core.ledger import HostCopy

F32 = npt.NDArray[np.float32]

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"diloco03"
"""With another number after each change of what follows: a link can be of a newer release than its trainer."""
_PAGE = 4096

# Columns of the table, one row of int64 per fragment. The trainer writes the first six, the link the
# others.
_LOCAL_STEP, _STEPS, _TOKENS, _BASE, _PLACE, _FORMAT, _GENERATION, _VALID, _EPOCH, _STEP = range(10)
_COLUMNS = 10


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
            raise DamagedError(
                f"shared memory begins with {magic!r}, expected {_MAGIC!r}; if the package was replaced while the "
                "program runs, restart it"
            )
        facts = json.loads(self._map[_HEAD.size : _HEAD.size + facts_bytes])
        self.layout = _layout(facts)
        spares, control_bytes = facts["spares"], facts["control_bytes"]
        places = _places(self.layout, facts_bytes, constants_bytes, spares, control_bytes)
        self._control = places.control, control_bytes
        rows = len(self.layout.fragments)
        self._table = np.frombuffer(self._map, np.int64, rows * _COLUMNS, places.table)
        self._table = self._table.reshape(rows, _COLUMNS)
        self._ends = np.cumsum([0, *(f.elements for f in self.layout.fragments)])
        total = int(self._ends[-1])
        self._host = np.frombuffer(self._map, np.float32, total, places.host)
        self._inbox = np.frombuffer(self._map, np.float32, total, places.inbox)
        self.constants = np.frombuffer(self._map, np.uint8, constants_bytes, places.constants)
        """The constants as a safetensors file."""
        room = _largest(self.layout)
        self._spare = np.frombuffer(self._map, np.float32, spares * room, places.spare)
        self._spare = self._spare.reshape(spares, room)
        self._areas = places
        self._thread_locks = [threading.Lock() for _ in range(rows)]

    @classmethod
    def create(
        cls, layout: Layout, *, constants_bytes: int, spares: int = 0, control_bytes: int = 0
    ) -> SharedMemory:
        """
        New memory, all zeros.

        Args:
            layout: the fragments.
            constants_bytes: size of the constants.
            spares: spare places for host copies; a page that is never written takes no memory.
            control_bytes: size of the control area.

        Raises:
            OSError: the machine does not have enough.
        """
        facts = json.dumps(
            {
                "tensors": [t.to_json() for t in layout.tensors],
                "constants": [t.to_json() for t in layout.constants],
                "frozen": [t.to_json() for t in layout.frozen],
                "fragments": len(layout.fragments),
                "average": [s.tensor.name for f in layout.fragments for s in f.slots if s.average],
                "spares": spares,
                "control_bytes": control_bytes,
            }
        ).encode()
        fd = anonymous_file()
        os.ftruncate(fd, _places(layout, len(facts), constants_bytes, spares, control_bytes).size)
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

    @classmethod
    def of_process(cls, pid: int, fd: int) -> SharedMemory:
        """
        Map the memory that another process created.

        Raises:
            OSError: the process is not on this machine, or belongs to another user.
            DamagedError: the file holds something else.
        """
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(own, owner=True)
        except BaseException:
            os.close(own)
            raise

    def host(self, fragment: int) -> F32:
        """The host copy of a fragment: a view of shape (elements,), fp32."""
        return self.place(fragment, int(self._table[fragment, _PLACE]))

    def place(self, fragment: int, place: int) -> F32:
        """A place for host copies of a fragment: 0 is its own, the others are spare ones."""
        begin, end = self._ends[fragment], self._ends[fragment + 1]
        return self._host[begin:end] if place == 0 else self._spare[place - 1, : end - begin]

    def inbox(self, fragment: int) -> F32:
        """The inbox of a fragment: a view of shape (elements,), fp32."""
        return self._inbox[self._ends[fragment] : self._ends[fragment + 1]]

    def forget_host_copies(self) -> None:
        """Give back the memory of the places of the fragments' own, if the system can: they are zeros again."""
        values = self._host.nbytes // _PAGE * _PAGE
        if values and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, self._areas.host, values)

    def device_areas(self, spares: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """
        The whole pages that a device copies from and to: all inboxes, and the beginnings of spare places.

        Args:
            spares: elements that are used of each spare place.
        """
        spans = [(self._areas.inbox, self._areas.constants)]
        room = 4 * self._spare.shape[1]
        for place, elements in enumerate(spares):
            begin = self._areas.spare + place * room
            lo, hi = begin // _PAGE * _PAGE, -(-(begin + 4 * elements) // _PAGE) * _PAGE
            if lo < spans[-1][1]:  # a page of both: none can be registered twice
                lo = spans.pop()[0]
            spans.append((lo, hi))
        return [np.frombuffer(self._map, np.uint8, hi - lo, lo) for lo, hi in spans if hi > lo]

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

    def set_host_copy(self, fragment: int, copy: HostCopy, *, place: int = 0) -> None:
        """Trainer: set the counters of a host copy, and its place."""
        numbers = (copy.local_step, copy.steps, copy.tokens, copy.base, place, copy.format)
        self._table[fragment, :_GENERATION] = numbers

    def host_copy(self, fragment: int) -> HostCopy:
        """The counters of the host copy; local_step 0: there is no copy yet."""
        local_step, steps, tokens, base = (int(n) for n in self._table[fragment, :4])
        fmt = int(self._table[fragment, _FORMAT])
        return HostCopy(local_step=local_step, steps=steps, tokens=tokens, base=base, format=fmt)

    def inbox_state(self, fragment: int) -> InboxState:
        """What the inbox holds."""
        generation, valid, epoch, step = (int(n) for n in self._table[fragment, _GENERATION:])
        return InboxState(generation=generation, version=(epoch, step) if valid else None)

    def invalidate_inbox(self, fragment: int) -> None:
        """Link: mark the inbox as incomplete before writing, in case this process dies meanwhile."""
        self._table[fragment, _VALID] = 0

    def publish(self, fragment: int, generation: int, version: tuple[int, int]) -> None:
        """Link: the inbox holds this version completely."""
        self._table[fragment, _EPOCH:] = version
        self._table[fragment, _GENERATION] = generation
        self._table[fragment, _VALID] = 1

    # ------------------------------------------------------------ the control area of the ranks

    def read_control(self, offset: int, size: int) -> bytes:
        """Bytes of the control area."""
        return os.pread(self.fd, size, self._control_at(offset, size))

    def write_control(self, offset: int, data: bytes) -> None:
        """Overwrite bytes of the control area; who reads them meanwhile may get a part of them."""
        # A system call, not the mapping: what this process wrote there before is visible before this.
        os.pwrite(self.fd, data, self._control_at(offset, len(data)))

    def _control_at(self, offset: int, size: int) -> int:
        begin, room = self._control
        if not 0 <= offset <= offset + size <= room:
            raise ValueError(f"control area: {size} bytes at {offset}, it has {room}")
        return begin + offset

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
    control: int
    spare: int
    size: int


def _places(
    layout: Layout, facts_bytes: int, constants_bytes: int, spares: int, control_bytes: int
) -> _Places:
    def up(n: int) -> int:
        return -(-n // _PAGE) * _PAGE

    values = 4 * sum(f.elements for f in layout.fragments)
    table = up(_HEAD.size + facts_bytes)
    host = up(table + 8 * _COLUMNS * len(layout.fragments))
    inbox = up(host + values)
    constants = up(inbox + values)
    control = up(constants + constants_bytes)
    spare = up(control + control_bytes)
    return _Places(
        table=table,
        host=host,
        inbox=inbox,
        constants=constants,
        control=control,
        spare=spare,
        size=up(spare + 4 * spares * _largest(layout)),
    )


def _largest(layout: Layout) -> int:
    return max(f.elements for f in layout.fragments)


def _layout(facts: dict[str, Any]) -> Layout:
    escape = str.maketrans({"[": "[[]", "?": "[?]", "*": "[*]"})
    return cut(
        [Tensor.from_json(t) for t in facts["tensors"]],
        num_fragments=facts["fragments"],
        constants=[Tensor.from_json(t) for t in facts["constants"]],
        frozen=[Tensor.from_json(t) for t in facts["frozen"]],
        average=[name.translate(escape) for name in facts["average"]],
    )


def anonymous_file() -> int:
    """A file without a name; in memory where the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("diloco-learner")
    fd, path = tempfile.mkstemp(prefix="diloco-learner-")
    os.unlink(path)
    return fd
