"""
Verifies the data of a snapshot piece by piece, while it is copied. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diloco.errors import DamagedError, StorageError
from diloco.model.tensorfile import parse


class StreamCheck:
    """
    Compares bytes that come in order with the SHA-256 of header and tensors in a manifest.

    Args:
        name: of the data, for messages.
        body: the manifest.

    Raises:
        StorageError: the manifest lacks what is needed.
    """

    def __init__(self, name: str, body: Mapping[str, Any]) -> None:
        self._name = name
        try:
            self.size_bytes = int(body["bytes"])
            self._stated = dict(body["sha256"])
            header, self._header_sha = int(body["headerBytes"]), str(body["headerSha256"])
        except (LookupError, TypeError, ValueError) as error:
            raise StorageError(f"{name}: its manifest cannot be read: {error!r}") from None
        self._header = bytearray()
        self._sections: list[tuple[str, int]] = [("", header)]
        """What is still to come, in order: name and end; the header has no name."""
        self._at = 0
        self._sha = hashlib.sha256()

    def passed(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """
        The same pieces; the last is passed on only when everything was verified.

        Raises:
            StorageError: names the tensor that differs, or the number of bytes that are missing.
        """
        held: bytes | None = None
        for piece in pieces:
            self._feed(memoryview(piece))
            if held is not None:
                yield held
            held = piece
        if self._at != self.size_bytes:
            raise StorageError(f"{self._name}: has {self._at} bytes, expected {self.size_bytes}")
        if held is not None:
            yield held

    def _feed(self, piece: memoryview) -> None:
        while piece:
            if not self._sections:
                raise StorageError(
                    f"{self._name}: has more bytes than the {self.size_bytes} of its manifest"
                )
            name, end = self._sections[0]
            part = piece[: end - self._at]
            self._sha.update(part)
            if not name:
                self._header += part
            self._at += len(part)
            piece = piece[len(part) :]
            if self._at == end:
                self._end(name)

    def _end(self, name: str) -> None:
        actual, self._sha = self._sha.hexdigest(), hashlib.sha256()
        self._sections.pop(0)
        if not name:
            if actual != self._header_sha:
                raise StorageError(f"{self._name}: its header has changed since it was written")
            try:
                entries = parse(self._header, self.size_bytes)
            except DamagedError as error:
                raise StorageError(f"{self._name}: {error}") from None
            order = sorted(entries.values(), key=lambda entry: entry.lo)
            self._sections = [(entry.name, entry.hi) for entry in order if entry.hi > entry.lo]
        elif actual != self._stated.get(name):
            raise StorageError(f"{self._name}: tensor {name} has changed since it was written")
