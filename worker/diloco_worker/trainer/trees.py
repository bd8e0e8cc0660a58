"""
Trees of plain values and tensors without pickle: the values as JSON, the tensors in a safetensors file.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

from diloco.errors import ConfigError, DamagedError
from diloco.model import tensorfile
from diloco.model.tensorfile import DTYPES, Entry
from diloco_worker.trainer.layout import dtype_name, is_dtensor


def pack(value: Any, tensors: dict[str, torch.Tensor], path: str = "") -> Any:
    """
    Convert a tree of plain values to JSON values; move its tensors to `tensors`.

    Raises:
        ConfigError: a value that is neither plain nor a tensor.
    """
    if isinstance(value, torch.Tensor):
        while path in tensors:  # "a/b" and b of a
            path += "'"
        tensors[path] = value
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.bool_ | np.integer | np.floating):
        number = value.item()
        if not isinstance(number, np.generic):  # of more bits than one of Python
            return number
    if isinstance(value, dict):
        return {
            "dict": [[pack(k, tensors), pack(v, tensors, f"{path}/{k}")] for k, v in value.items()]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    raise ConfigError(
        f"checkpoint: {path} is a {type(value).__name__}; only tensors and plain values can be saved"
    )


class Tensors(Protocol):
    """Tensors by name."""

    def __getitem__(self, name: str, /) -> torch.Tensor:
        """The tensor of this name."""


def unpack(value: Any, tensors: Tensors) -> Any:
    """The inverse of `pack`."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {unpack(k, tensors): unpack(v, tensors) for k, v in inner}
    items = [unpack(v, tensors) for v in inner]
    return items if kind == "list" else tuple(items)


class TensorReader:
    """Reads tensors of a file one at a time, each into memory of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        size = os.fstat(file.fileno()).st_size
        head = bytearray(8)
        self._fill(memoryview(head), at=0)
        head += bytes(min(int.from_bytes(head, "little"), max(0, size - 8)))
        self._fill(memoryview(head), at=0)
        self._entries = tensorfile.parse(head, size)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        # The program's default device may be another.
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
        if entry.hi > entry.lo:
            self._fill(tensor.reshape(-1).view(torch.uint8).numpy().data, at=entry.lo)
        return tensor

    def entry(self, name: str) -> Entry:
        """Shape and type of a tensor."""
        return self._entries[name]

    def _fill(self, memory: memoryview, *, at: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._file.fileno(), [memory[done:]], at + done)
            if count == 0:
                raise DamagedError(f"checkpoint: the file ends at byte {at + done}")
            done += count


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """
    The tensor's place in the header of the file.

    Raises:
        ConfigError: the file cannot hold such a tensor.
    """
    if is_dtensor(tensor):
        raise ConfigError(
            f"checkpoint: {name} is a DTensor; expected the plain tensor that its to_local() returns"
        )
    dtype = dtype_name(tensor)
    if dtype not in DTYPES or tensor.layout is not torch.strided:
        raise ConfigError(
            f"checkpoint: {name} has dtype {dtype} and layout {str(tensor.layout).removeprefix('torch.')}, "
            f"expected strided and one of {', '.join(DTYPES)}"
        )
    return Entry(name=name, dtype=dtype, shape=tuple(tensor.shape))
