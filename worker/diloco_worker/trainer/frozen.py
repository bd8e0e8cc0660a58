"""
Digests of the frozen parameters, which stay with each learner: the syncer compares them when a learner joins.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import xxhash

from diloco.errors import ConfigError, DilocoError, UnavailableError
from diloco.model.fragments import Tensor
from diloco_worker.trainer.layout import Named, dtype_name, pieces
from diloco_worker.trainer.wrappers import wraps

ANNOUNCED_BYTES = 4 << 30
"""From here on, a line states why `Learner.connect` takes seconds."""

WITH_THE_JOB = "frozen parameters, to compare them with those of the job"

CPU_MEMORY = "can't allocate memory"
"""In the RuntimeError of torch's allocator on the CPU, which has no class of its own."""


def with_digests(
    frozen: Sequence[Named], *, known: Mapping[str, str] = MappingProxyType({}), needed: bool = True,
    purpose: str = WITH_THE_JOB, show: bool = True,
) -> list[Tensor]:  # fmt: skip
    """
    The descriptions of the tensors, each with its digest. Every value is read once.

    Args:
        frozen: the tensors, in the same order in all ranks.
        known: digests by name, of tensors that this process does not hold as a whole.
        needed: False: without the other digests.
        purpose: what is read, and why.
        show: state that it takes seconds, if it does.

    Raises:
        ConfigError: the values of a tensor cannot be read as bytes.
        UnavailableError: there is too little memory to read them.
    """
    if needed and show:
        announce([n for n in frozen if n.info.name not in known], purpose)
    return [
        dataclasses.replace(n.info, digest=known.get(n.info.name) or (_digest(n) if needed else ""))
        for n in frozen
    ]


def announce(frozen: Sequence[Named], purpose: str = WITH_THE_JOB) -> None:
    """Show that these tensors will be read, and why, if that takes seconds."""
    size = sum(n.tensor.numel() * n.tensor.element_size() for n in frozen)
    if size >= ANNOUNCED_BYTES:
        text = f"reading {size / 2**30:.0f} GiB of {purpose}"
        print(f"diloco: {text}", file=sys.stderr, flush=True)


def _digest(named: Named) -> str:
    try:
        return digest(named.tensor)
    except (RuntimeError, TypeError, MemoryError) as error:
        raise unreadable(named, error) from None


def unreadable(named: Named, error: Exception) -> DilocoError:
    """The error for a parameter whose values cannot be read: if memory ran out, a restart may help."""
    text = (
        f"model: the values of the parameter {named.info.name} "
        f"({type(named.tensor).__name__}, {named.info.dtype}) cannot be read as bytes: {error}"
    )
    lacks = isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_MEMORY in str(error)
    return UnavailableError(text) if lacks else ConfigError(text)


def digest(tensor: torch.Tensor) -> str:
    """
    XXH3-64 over dtype, shape and values: 16 hex digits, the same for equal tensors on any device.

    It detects mistakes, not forgeries.
    """
    state = xxhash.xxh3_64(f"{dtype_name(tensor)} {list(tensor.shape)};".encode())
    if wraps(tensor):  # as those of quantized weights
        parts = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        state.update("".join(f"{name} {digest(getattr(tensor, name))};" for name in parts).encode())
        return state.hexdigest()
    for piece in pieces(tensor):
        state.update(piece)
    return state.hexdigest()
