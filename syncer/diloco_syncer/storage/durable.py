"""
Writes large files durably, past the page cache and hashed meanwhile; reads them back.

Shell, used by `store` only.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.errors import StorageError
from diloco.model.tensorfile import DTYPES, Entry, plan
from diloco.runtime import files
from diloco.runtime.disk import DIRECT_BYTES, PAGE_BYTES, Disk, File, Mode, write_all

PIECE_BYTES = 8 << 20
"""One os.write; larger pieces gain nothing."""

Array = npt.NDArray[Any]
Piece = memoryview | bytes
Fault = Callable[[str], None]
"""Called with the name of each step; a test raises or kills its process there."""


def no_fault(point: str) -> None:
    """Let every step happen."""


class DiskError(StorageError):
    """The disk reported an error; what was to be written or read may be intact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor as its bytes: also of types that numpy does not have, such as bfloat16."""

    dtype: str
    """A key of `diloco.model.tensorfile.DTYPES`."""
    shape: tuple[int, ...]
    data: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """A safetensors file as buffers: its header, then the bytes of each tensor, nothing copied."""

    names: tuple[str, ...]
    parts: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Length of the whole file."""
        return sum(len(part) for part in self.parts)

    @classmethod
    def of(
        cls, tensors: Mapping[str, Array | RawTensor], *, metadata: Mapping[str, str] | None = None
    ) -> TensorFile:
        """
        Describe `tensors` in their order.

        Raises:
            ValueError: a tensor has a type that safetensors lacks.
        """
        for name, tensor in tensors.items():
            if str(tensor.dtype) not in DTYPES:
                raise ValueError(
                    f"tensor {name} is {tensor.dtype}, expected one of {', '.join(DTYPES)}"
                )
        entries = [
            Entry(name=name, dtype=str(tensor.dtype), shape=tensor.shape)
            for name, tensor in tensors.items()
        ]
        header, _, _ = plan(entries, metadata=metadata)
        data = [
            t.data if isinstance(t, RawTensor) else bytes_of(np.asarray(t, order="C"))
            for t in tensors.values()
        ]
        return cls(names=tuple(tensors), parts=(header, *data))


def bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array, shared."""
    return array.reshape(-1).view(np.uint8).data


def digest(pieces: Iterable[Piece]) -> str:
    """SHA-256 of the pieces one after the other, hex."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()


def write_temporary(
    disk: Disk,
    path: Path,
    parts: Sequence[Piece],
    *,
    hash_groups: Sequence[Sequence[Piece]] = (),
    fault: Fault = no_fault,
) -> list[str]:
    """
    Write `parts` durably under the temporary name of `path`; `publish` then renames it.

    Returns:
        The SHA-256 of each group; of a large file hashed on a second thread meanwhile.
    """
    total = sum(len(part) for part in parts)

    def hashes() -> list[str]:
        return [digest(group) for group in hash_groups]

    # A disk that is too small fails now instead of after a gigabyte.
    with disk.open(files.temporary(path), Mode.CREATE, expected_bytes=max(1, total)) as file:
        if total < DIRECT_BYTES:
            _stream(file, parts, fault)
            _end(file, total)
            return hashes()
        with ThreadPoolExecutor(1, thread_name_prefix="snapshot-hash") as hasher:
            digests = hasher.submit(hashes)
            _stream(file, parts, fault)
            _end(file, total)
            return digests.result()


def publish(disk: Disk, path: Path) -> None:
    """Give the temporary file of `path` its name, durably."""
    disk.rename(files.temporary(path), path)


def read_into(file: File, offset: int, data: memoryview) -> None:
    """
    Fill `data` from `offset` on.

    Raises:
        StorageError: the file ends before.
    """
    done = 0
    while done < len(data):
        count = file.read_into(data[done : done + PIECE_BYTES], offset + done)
        if count == 0:
            missing = len(data) - done
            raise StorageError(
                f"the file ends at byte {offset + done}; {missing} bytes are missing"
            )
        done += count


def pieces(file: File, lo: int, hi: int) -> Iterator[memoryview]:
    """
    The bytes [lo, hi) of a file in one buffer that is used again for each piece.

    Raises:
        StorageError: the file ends before.
    """
    buffer = memoryview(bytearray(min(PIECE_BYTES, hi - lo)))
    for at in range(lo, hi, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, hi - at)]
        read_into(file, at, piece)
        yield piece


@contextlib.contextmanager
def os_errors(disk: Disk, path: Path, doing: str, *, remove: Sequence[Path] = ()) -> Iterator[None]:
    """Turn OSError into DiskError with the system's reason, after deleting `remove`."""
    try:
        yield
    except OSError as error:
        for leftover in remove:
            with contextlib.suppress(OSError):
                disk.remove(leftover)
        reason = error.strerror or str(error)
        raise DiskError(f"{doing} {path}: {reason}; earlier files are intact") from error


def _end(file: File, total: int) -> None:
    file.truncate(total)
    file.sync()


def _stream(file: File, parts: Sequence[Piece], fault: Fault) -> None:
    """Write the parts one after the other in aligned pieces; pads the last to a whole page."""
    pages = -(-sum(len(part) for part in parts) // PAGE_BYTES)
    stage = np.frombuffer(mmap.mmap(-1, min(PIECE_BYTES, max(1, pages) * PAGE_BYTES)), np.uint8)
    filled = 0
    for part in parts:
        done = 0
        while done < len(part):
            take = min(len(part) - done, len(stage) - filled)
            # numpy copies without the GIL, a slice of a memoryview does not.
            stage[filled : filled + take] = np.frombuffer(part, np.uint8, take, done)
            done, filled = done + take, filled + take
            if filled == len(stage):
                write_all(file, stage.data)
                filled = 0
        fault("in-data")
    write_all(file, stage[: -(-filled // PAGE_BYTES) * PAGE_BYTES].data)
