"""
Digests of the frozen parameters, which stay with each learner: the syncer compares them when a learner joins.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch
import xxhash

from diloco.errors import ConfigError
from diloco.model.fragments import Tensor
from diloco_worker.trainer.layout import Named, dtype_name, is_dtensor, pieces

ANNOUNCED_BYTES = 4 << 30
"""From here on, a line states why `Learner.connect` takes seconds."""


def with_digests(frozen: Sequence[Named], *, needed: bool = True) -> list[Tensor]:
    """
    The descriptions of the tensors, each with its digest. Every value is read once.

    A DTensor is gathered as a whole, one at a time: all ranks of a learner call this together.

    Args:
        frozen: the tensors, in the same order in all ranks.
        needed: False: take part in gathering, without digests.

    Raises:
        ConfigError: the values of a tensor cannot be read as bytes.
    """
    size = sum(n.tensor.numel() * n.tensor.element_size() for n in frozen)
    if needed and size >= ANNOUNCED_BYTES:
        text = f"reading {size / 2**30:.0f} GiB of frozen parameters, to compare them with those of the job"
        print(f"diloco: {text}", file=sys.stderr, flush=True)
    return [dataclasses.replace(n.info, digest=_digest(n, needed=needed)) for n in frozen]


def _digest(named: Named, *, needed: bool) -> str:
    try:
        tensor = named.tensor
        if is_dtensor(tensor):
            with torch.no_grad():
                tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        return digest(tensor) if needed else ""
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"model: the values of the frozen parameter {named.info.name} "
            f"({type(named.tensor).__name__}, {named.info.dtype}) cannot be read as bytes: {error}"
        ) from None


def digest(tensor: torch.Tensor) -> str:
    """
    XXH3-64 over dtype, shape and values: 16 hex digits, the same for equal tensors on any device.

    It detects mistakes, not forgeries.
    """
    state = xxhash.xxh3_64(f"{dtype_name(tensor)} {list(tensor.shape)};".encode())
    for piece in pieces(tensor):
        state.update(piece)
    return state.hexdigest()
