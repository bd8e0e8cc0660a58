"""
Files that survive a crash: safetensors from arrays, fsync, rename, fsync of the directory.

Shell, used by `store` only. Everything here either happens wholly or raises OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.errors import StorageError

PIECE_BYTES = 8 << 20
"""One os.write; larger pieces gain nothing."""

_PAGE_BYTES = 4096
"""O_DIRECT wants offsets and lengths in multiples of it."""

TEMPORARY = ".tmp"

DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}
_DTYPE_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}

Array = npt.NDArray[Any]
Piece = memoryview | bytes
Fault = Callable[[str], None]
"""Called with the name of each step; a test makes it raise, or kills its process there."""


def no_fault(point: str) -> None:
    """Let every step happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor as safetensors keeps it: also of types that numpy does not have, such as BF16."""

    dtype: str
    """As safetensors spells it: "BF16", "I64"."""
    shape: tuple[int, ...]
    data: bytes


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
            ValueError: a type that neither numpy nor `RawTensor` can say.
        """
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        parts: list[Piece] = []
        offset = 0
        for name, tensor in tensors.items():
            dtype, data = _described(name, tensor)
            ends = [offset, offset + len(data)]
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": ends}
            parts.append(data)
            offset = ends[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # readers map the tensors behind it: keep them aligned
        head = len(text).to_bytes(8, "little") + text
        return cls(names=tuple(tensors), parts=(head, *parts))


def _described(name: str, tensor: Array | RawTensor) -> tuple[str, Piece]:
    if isinstance(tensor, RawTensor):
        return tensor.dtype, tensor.data
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"tensor {name} is {tensor.dtype}, expected one of {', '.join(DTYPES)}")
    return _DTYPE_NAMES[tensor.dtype], bytes_of(np.asarray(tensor, order="C"))


def bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array, shared."""
    return array.reshape(-1).view(np.uint8).data


def digest(pieces: Iterable[Piece]) -> str:
    """SHA-256 of the pieces one after the other, hex."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()


def temporary(path: Path) -> Path:
    """The name a file has until it is complete."""
    return path.with_name(path.name + TEMPORARY)


def write_temporary(
    path: Path,
    parts: Sequence[Piece],
    *,
    hash_groups: Sequence[Sequence[Piece]] = (),
    fault: Fault = no_fault,
) -> list[str]:
    """
    Write `parts` durably under the temporary name of `path`; `publish` then gives it its own.

    Returns:
        The SHA-256 of each group, hashed on a second thread meanwhile.
    """
    total = sum(len(part) for part in parts)
    fd = _open(temporary(path), direct=total >= PIECE_BYTES)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="snapshot-hash") as hasher:
            digests = hasher.submit(lambda: [digest(group) for group in hash_groups])
            # A disk that is too small says so now instead of after a gigabyte.
            os.posix_fallocate(fd, 0, max(1, total))
            _stream(fd, parts, fault)
            os.ftruncate(fd, total)
            os.fsync(fd)
            return digests.result()
    finally:
        os.close(fd)


def publish(path: Path) -> None:
    """Give a durable temporary file its name, durably."""
    os.rename(temporary(path), path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_into(fd: int, offset: int, data: memoryview) -> None:
    """
    Fill `data` from `offset` on.

    Raises:
        StorageError: the file ends before.
    """
    done = 0
    while done < len(data):
        count = os.preadv(fd, [data[done : done + PIECE_BYTES]], offset + done)
        if count == 0:
            missing = len(data) - done
            raise StorageError(f"the file ends at byte {offset + done}, {missing} are missing")
        done += count


@contextlib.contextmanager
def os_errors(path: Path, doing: str, *, remove: Sequence[Path] = ()) -> Iterator[None]:
    """Turn OSError into StorageError with the system's reason, after removing what was made."""
    try:
        yield
    except OSError as error:
        for leftover in remove:
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise StorageError(f"{doing} {path}: {reason}; what was there before is intact") from error


def _open(path: Path, *, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if direct:
        # Past the page cache: faster than through it (1.1 GB with SHA-256 beside it: 0.8 s against
        # 1.4 s), and a gigabyte that nobody reads again does not push out what others use.
        with contextlib.suppress(OSError):  # this file system cannot
            return os.open(path, flags | os.O_DIRECT, 0o644)
    return os.open(path, flags, 0o644)


def _stream(fd: int, parts: Sequence[Piece], fault: Fault) -> None:
    """Write the parts one after the other in aligned pieces; pads the last to a whole page."""
    stage = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)
    filled = 0
    for part in parts:
        done = 0
        while done < len(part):
            take = min(len(part) - done, PIECE_BYTES - filled)
            # numpy copies without the GIL, a slice of a memoryview does not.
            stage[filled : filled + take] = np.frombuffer(part, np.uint8, take, done)
            done, filled = done + take, filled + take
            if filled == PIECE_BYTES:
                _write_all(fd, stage.data)
                filled = 0
        fault("in-data")
    _write_all(fd, stage[: -(-filled // _PAGE_BYTES) * _PAGE_BYTES].data)


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
