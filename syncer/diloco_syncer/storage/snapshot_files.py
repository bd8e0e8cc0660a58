"""
The two files of a snapshot: their names, the manifest, and a snapshot that is open for reading.

Shell, used by `store` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import StorageError
from diloco.runtime.disk import Disk, File, read
from diloco.spec import canonical
from diloco_syncer.storage.durable import digest, pieces

FORMAT = 1
NAME = re.compile(r"(\d{6,})-epoch-(\d+)-step-(\d+)\.(safetensors|json)")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Stem:
    """Name of a snapshot; numbers only grow, so a rewound step never outranks a later write."""

    number: int
    epoch: int
    step: int

    @property
    def data(self) -> str:
        """Name of its data."""
        return f"{self.number:06d}-epoch-{self.epoch}-step-{self.step}.safetensors"

    @property
    def manifest(self) -> str:
        """Name of its manifest."""
        return f"{self.number:06d}-epoch-{self.epoch}-step-{self.step}.json"


@dataclass(frozen=True, slots=True)
class LocalSnapshot:
    """A snapshot that is being read; a context manager that closes it."""

    _stem: Stem
    _path: Path
    body: Mapping[str, Any]
    """Its manifest."""
    _file: File

    @property
    def name(self) -> str:
        """For messages."""
        return str(self._path)

    @property
    def number(self) -> int:
        """In its directory."""
        return self._stem.number

    @property
    def epoch(self) -> int:
        """Of the syncer that wrote it."""
        return self._stem.epoch

    @property
    def step(self) -> int:
        """Global step."""
        return self._stem.step

    def pieces(self) -> Iterator[bytes]:
        """
        The data.

        Raises:
            StorageError: the disk reported an error.
        """
        try:
            for piece in pieces(self._file, 0, self._file.size()):
                yield bytes(piece)
        except OSError as error:
            raise StorageError(f"{self._path}: {error.strerror or error}") from None

    def __enter__(self) -> LocalSnapshot:
        """Close it at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._file.close()


def encode_manifest(body: Mapping[str, Any]) -> bytes:
    """The content of the file, with its SHA-256."""
    return canonical({"manifest": body, "sha256": digest([canonical(body).encode()])}).encode()


def read_manifest(disk: Disk, path: Path) -> dict[str, Any]:
    """
    The manifest in a file.

    Raises:
        OSError: the disk reported an error.
        StorageError: it is missing, damaged or of another format.
    """
    try:
        text = read(disk, path)
    except FileNotFoundError:
        raise StorageError(f"{path}: is missing, so its data was never completed") from None
    try:
        outer = json.loads(text)
        body, stated = outer["manifest"], outer["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{path}: not a manifest: {error}") from None
    if stated != (actual := digest([canonical(body).encode()])):
        raise StorageError(f"{path}: its SHA-256 is {actual}, expected {stated}")
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise StorageError(f"{path}: not in format {FORMAT}, the one this syncer reads")
    return body
