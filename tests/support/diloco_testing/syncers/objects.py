"""Objects in memory, with faults at named calls; a fault that was requested and never came is an error."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from diloco_syncer.storage.object_store import MissingError, ObjectsError

Fault = Callable[[], None]


class MemoryObjects:
    """
    `Objects` in memory; several of them may share `content`.

    Args:
        content: the objects by name.
    """

    def __init__(self, content: dict[str, bytes] | None = None) -> None:
        self.url = "s3://bucket/runs/job"
        self.content = {} if content is None else content
        self.calls: Counter[str] = Counter()
        self._faults: dict[str, list[Fault]] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------ faults

    def fail(self, call: str, times: int = 1, error: Exception | None = None) -> None:
        """The next calls ("put", "put snapshots/", "names claims") raise."""

        def refuse() -> None:
            raise error or ObjectsError(f"{self.url}: 503 SlowDown")

        self._faults.setdefault(call, []).extend([refuse] * times)

    def before(self, call: str, action: Fault) -> None:
        """Run this before the next such call."""
        self._faults.setdefault(call, []).append(action)

    @property
    def unused(self) -> list[str]:
        """Calls whose faults never came."""
        return [call for call, faults in self._faults.items() if faults]

    def damage(self, name: str, at: int = -1) -> None:
        """Flip one bit of an object."""
        data = bytearray(self.content[name])
        data[at] ^= 1
        self.content[name] = bytes(data)

    def _reach(self, call: str, name: str) -> None:
        with self._lock:
            self.calls[call] += 1
            due = [faults.pop(0) for point, faults in self._faults.items()
                   if faults and f"{call} {name}".startswith(point)]  # fmt: skip
        for fault in due:
            fault()

    # ------------------------------------------------------------ Objects

    def names(self, folder: str) -> Mapping[str, int]:
        """See `Objects`."""
        self._reach("names", folder)
        return {n: len(data) for n, data in self.content.items() if n.startswith(f"{folder}/")}

    def read(self, name: str, lo: int, hi: int) -> bytes:
        """See `Objects`."""
        self._reach("read", name)
        if name not in self.content:
            raise MissingError(f"{self.url}/{name}: not found")
        return self.content[name][lo:hi]

    def put(self, name: str, parts: Iterable[bytes], *, size_bytes: int) -> None:
        """See `Objects`; the fault comes after the parts were read, as a connection that is lost."""
        data = b"".join(parts)
        self._reach("put", name)
        assert len(data) == size_bytes
        self.content[name] = data

    def put_new(self, name: str, data: bytes) -> bool:
        """See `Objects`."""
        self._reach("put_new", name)
        with self._lock:
            return self.content.setdefault(name, data) is data

    def remove(self, name: str) -> None:
        """See `Objects`."""
        self._reach("remove", name)
        self.content.pop(name, None)
