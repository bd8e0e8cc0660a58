"""
Digests of frozen parameters that are distributed over the ranks: in memory that they share, without a collective.

A rank that lacks the memory for a collective would hold the others in it until its timeout.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from diloco.errors import ConfigError, DilocoError, UnavailableError
from diloco_worker.ipc.shared_memory import anonymous_file
from diloco_worker.trainer.frozen import announce, digest, unreadable
from diloco_worker.trainer.layout import Named, Share, as_bytes, is_dtensor, local
from diloco_worker.trainer.rank_group import RankGroup

BATCH_BYTES = 256 << 20
"""Tensors are gathered in batches of so many bytes; a larger tensor is a batch of its own."""

_ALIGNMENT = 64


def digests(
    frozen: Sequence[Named], shares: Mapping[str, Share], group: RankGroup
) -> dict[str, str]:
    """
    By name, the digest of each DTensor; "" in the ranks above 0.

    Args:
        frozen: the same tensors in all ranks.
        shares: of this rank.
        group: the ranks.

    Raises:
        DilocoError: of one rank, in all of them: it lacks memory, or cannot read the values.
    """
    sharded = [named for named in frozen if is_dtensor(named.tensor)]
    if not sharded:
        return {}
    if len(group.machines) > 1:
        raise ConfigError(
            f"model: {sharded[0].info.name} is frozen and distributed over ranks on several machines; expected frozen "
            "parameters that each rank holds as a whole, ranks on one machine, or spec.sync.frozen: Ship"
        )
    if group.rank == 0:
        announce(sharded)
    batches = _batches(sharded)
    with _memory(group, max(_places(batch)[-1] for batch in batches)) as memory:
        found: dict[str, str] = {}
        for batch in batches:
            error = _written(batch, shares, memory)
            group.agree("", error)
            error = None
            if group.rank == 0:
                error = _read(batch, memory, found)
            group.agree("", error)  # only then is the next batch written
    return {named.info.name: found.get(named.info.name, "") for named in sharded}


def _batches(sharded: Sequence[Named]) -> list[list[Named]]:
    batches: list[list[Named]] = []
    for named in sharded:
        if not batches or _places([*batches[-1], named])[-1] > BATCH_BYTES:
            batches.append([])
        batches[-1].append(named)
    return batches


def _places(batch: Sequence[Named]) -> list[int]:
    """Where each tensor begins, and where the last one ends."""
    places = [0]
    for named in batch:
        size = named.tensor.numel() * named.tensor.element_size()
        places.append(-(-(places[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return places


@contextlib.contextmanager
def _memory(group: RankGroup, size: int) -> Iterator[torch.Tensor]:
    """Bytes that all ranks have mapped."""
    error: DilocoError | None = None
    fd, place, mapped = -1, "", None
    try:
        if group.rank == 0:
            try:
                fd = anonymous_file()
                os.ftruncate(fd, max(size, 1))
                place = json.dumps([os.getpid(), fd])
            except OSError as problem:
                text = f"the memory for {size} bytes of frozen parameters: {problem}"
                error = UnavailableError(text)
        pid, theirs = json.loads(group.agree(place, error)[0])
        try:
            if group.rank:
                fd = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
            mapped = mmap.mmap(fd, 0)
        except (OSError, ValueError) as problem:
            error = ConfigError(
                f"rank {group.rank} cannot map the memory of rank 0 (process {pid}): {problem}; expected all ranks in "
                "one container, running as the same user"
            )
        group.agree("", error)
        if mapped is None:
            raise AssertionError("the error was raised")
        yield torch.from_numpy(np.frombuffer(mapped, np.uint8))
    finally:
        if fd >= 0:
            os.close(fd)


def _written(
    batch: Sequence[Named], shares: Mapping[str, Share], memory: torch.Tensor
) -> DilocoError | None:
    """Write what this rank copies of each tensor; returns why it cannot."""
    for named, begin in zip(batch, _places(batch), strict=False):
        share = shares[named.info.name]
        if share.copied is None or share.held is None:
            continue
        try:
            values = local(named.tensor)[share.copied.slices(share.held.lo)]
            whole = _part(memory, named, begin).view((*named.info.shape, values.element_size()))
            part = as_bytes(values).view((*values.shape, values.element_size()))
            whole[share.copied.slices()].copy_(part)
        except (RuntimeError, TypeError, MemoryError) as problem:
            return unreadable(named, problem)
    return None


def _read(
    batch: Sequence[Named], memory: torch.Tensor, found: dict[str, str]
) -> DilocoError | None:
    """Add the digest of each tensor; returns why one cannot be read."""
    for named, begin in zip(batch, _places(batch), strict=False):
        try:
            values = _part(memory, named, begin).view(named.tensor.dtype).view(named.info.shape)
            found[named.info.name] = digest(values)
        except (RuntimeError, TypeError, MemoryError) as problem:
            return unreadable(named, problem)
    return None


def _part(memory: torch.Tensor, named: Named, begin: int) -> torch.Tensor:
    return memory[begin : begin + named.tensor.numel() * named.tensor.element_size()]
