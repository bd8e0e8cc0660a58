"""
The objects below a URL, as an interface.

Names are relative to the URL and use "/". `obstore_objects` is behind it in a process, and memory in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from diloco.errors import StorageError

PART_BYTES = 8 << 20
"""Of one request."""
SMALL_BYTES = 256 << 20
"""What is read at once: the state of thousands of learners is in a manifest."""


class ObjectsError(StorageError):
    """The service cannot be reached, or refused a request; the message names the object."""

    def __init__(self, text: str, *, denied: bool = False) -> None:
        super().__init__(text)
        self.denied = denied
        """Credentials are missing or do not allow it."""


class MissingError(ObjectsError):
    """There is no such object."""


class StoppedError(StorageError):
    """The process ends."""


class Objects(Protocol):
    """Objects below one URL. Each call waits for the network, and raises ObjectsError."""

    @property
    def url(self) -> str:
        """For messages."""

    def names(self, folder: str) -> Mapping[str, int]:
        """The objects whose name begins with the folder and "/", with their sizes in bytes."""

    def read(self, name: str, lo: int, hi: int) -> bytes:
        """The bytes [lo, hi) of an object, which has so many; MissingError: there is none."""

    def put(self, name: str, parts: Iterable[bytes], *, size_bytes: int) -> None:
        """Write an object of this size, or none; one that is there is replaced."""

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a small object unless there is one of this name, atomically; False: there is."""

    def remove(self, name: str) -> None:
        """Delete an object; nothing if there is none."""


def read_whole(objects: Objects, name: str, size_bytes: int) -> bytes:
    """
    A small object.

    Raises:
        StorageError: it is not small.
    """
    if size_bytes > SMALL_BYTES:
        raise StorageError(
            f"{objects.url}/{name}: has {size_bytes} bytes, at most {SMALL_BYTES} are read"
        )
    return objects.read(name, 0, size_bytes)


def stream(objects: Objects, name: str, size_bytes: int) -> Iterator[bytes]:
    """A large object in parts, one request each."""
    for lo in range(0, size_bytes, PART_BYTES):
        yield objects.read(name, lo, min(lo + PART_BYTES, size_bytes))


def until(stopped: Callable[[], bool], pieces: Iterable[bytes]) -> Iterator[bytes]:
    """
    The same pieces.

    Raises:
        StoppedError: `stopped` returned True.
    """
    for piece in pieces:
        if stopped():
            raise StoppedError("the process ends")
        yield piece
