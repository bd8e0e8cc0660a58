"""Digests of frozen parameters that no rank holds as a whole: each thread here is one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from diloco.errors import ConfigError, UnavailableError
from diloco.model.fragments import Tensor
from diloco.spec import RunSpec
from diloco_testing.learners.alone import alone
from diloco_testing.learners.rank_threads import in_ranks
from diloco_worker.core.shard_slices import Box, piece
from diloco_worker.trainer import sharded_digests
from diloco_worker.trainer.frozen import digest
from diloco_worker.trainer.layout import Named, Share, dtype_name
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_replica import RankReplica
from diloco_worker.trainer.replica import Replica
from diloco_worker.trainer.sharded_digests import digests

RANKS = 3


class Part:
    """What `digests` uses of a DTensor whose rows are divided, or which all ranks hold."""

    placements = ()

    def __init__(self, whole: torch.Tensor, box: Box) -> None:
        self.whole, self.box, self.dtype = whole, box, whole.dtype

    def numel(self) -> int:
        return self.whole.numel()

    def element_size(self) -> int:
        return self.whole.element_size()

    def to_local(self) -> torch.Tensor:
        return self.whole[self.box.slices()].clone()


class Lacking(Part):
    """Of a rank whose device has no memory left."""

    def to_local(self) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def divided(whole: torch.Tensor, *, rows: bool) -> dict[int, Box]:
    """What each rank holds."""
    if not rows:
        return {rank: Box((0,) * whole.dim(), tuple(whole.shape)) for rank in range(RANKS)}
    boxes, begin = {}, 0
    for rank, rows_ in enumerate(whole.tensor_split(RANKS)):
        if rows_.numel():
            lo = (begin, *[0] * (whole.dim() - 1))
            boxes[rank] = Box(lo, tuple(rows_.shape))
        begin += len(rows_)
    return boxes


WHOLES = {
    "bias": (torch.arange(7).bfloat16(), True),
    "complex": (torch.arange(6).to(torch.complex64).reshape(3, 2), True),
    "empty": (torch.zeros(0, 4), True),
    "flags": (torch.tensor([True, False]), True),  # rank 2 holds nothing
    "replicated": (torch.randn(200, 100, generator=torch.Generator().manual_seed(1)), False),
    "scalar": (torch.tensor(2.5, dtype=torch.float64), False),
    "weight": (torch.randn(40, 3, generator=torch.Generator().manual_seed(2)), True),
}


def body(kinds=(Part,) * RANKS):
    """In each rank, what it knows of the digests."""

    def run(group: RankGroup):
        frozen, shares = [], {}
        for turn, (name, (whole, rows)) in enumerate(WHOLES.items()):
            boxes = divided(whole, rows=rows)
            held = boxes.get(group.rank)
            info = Tensor(name=name, shape=tuple(whole.shape), dtype=dtype_name(whole))
            kind = kinds[group.rank] if name == "replicated" else Part
            part = kind(whole, held or Box((0,) * whole.dim(), (0,) * whole.dim()))
            frozen.append(Named(tensor=part, info=info))
            shares[name] = Share(held=held, copied=piece(boxes, group.rank, turn=turn))
        frozen.append(
            Named(tensor=torch.ones(2), info=Tensor(name="z", shape=(2,), dtype="float32"))
        )
        return digests(frozen, shares, group)

    return run


@pytest.mark.parametrize("batch_bytes", [1, 500, 1 << 20])
def test_rank_0_gets_the_digests_of_whole_tensors_in_batches(monkeypatch, batch_bytes):
    monkeypatch.setattr(sharded_digests, "BATCH_BYTES", batch_bytes)
    first, *others = in_ranks(RANKS, body())
    assert first == {name: digest(whole) for name, (whole, _) in WHOLES.items()}
    assert others == [dict.fromkeys(WHOLES, "")] * (RANKS - 1)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_without_memory_ends_all_at_once_and_they_may_try_again(monkeypatch, rank):
    kinds = [Part] * RANKS
    kinds[rank] = Lacking
    found = in_ranks(RANKS, body(kinds))
    assert [type(error) for error in found] == [UnavailableError] * RANKS
    other = str(found[(rank + 1) % RANKS])
    assert other.startswith(f"rank {rank}: model: the values of the parameter replicated ")
    assert other.endswith("CUDA out of memory")


def test_too_little_memory_for_a_batch_ends_all_ranks(monkeypatch):
    def refuse():
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(sharded_digests, "anonymous_file", refuse)
    found = in_ranks(RANKS, body())
    assert [type(error) for error in found] == [UnavailableError] * RANKS
    assert "of frozen parameters: [Errno 12] Cannot allocate memory" in str(found[2])


def test_memory_of_rank_0_that_cannot_be_mapped_is_a_refusal_in_all_ranks(monkeypatch):
    original = sharded_digests.os.open

    def refuse(path, *more):
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied")
        return original(path, *more)

    monkeypatch.setattr(sharded_digests.os, "open", refuse)
    found = in_ranks(RANKS, body())
    assert [type(error) for error in found] == [ConfigError] * RANKS
    assert "cannot map the memory of rank 0" in str(found[0])


def test_a_model_of_real_dtensors_has_the_digests_of_the_plain_one():
    spec = RunSpec(job="j", steps=9, fragments=2, interval=2, overlap=1)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        found = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        found[0].requires_grad_(False)
        return found

    plain = Replica(model(), spec)
    with alone():
        (sharded,) = in_ranks(1, lambda group: RankReplica(fully_shard(model()), spec, group))
    assert sharded.layout.frozen == plain.layout.frozen
    assert sharded.layout.digest == plain.layout.digest
    assert all(tensor.digest for tensor in sharded.layout.frozen)
    plain.close()
    sharded.close()
