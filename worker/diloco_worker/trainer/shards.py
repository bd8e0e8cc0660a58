"""
What this rank holds of the tensors of a model, and what all ranks must agree on before they train together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from diloco.errors import ConfigError
from diloco.model.fragments import Layout, Tensor, differences
from diloco_worker.core.shard_slices import Box, piece, uncovered, whole
from diloco_worker.trainer.frozen import with_digests
from diloco_worker.trainer.layout import ModelTensors, Named, Share, describe, local

MOST_PROBLEMS = 8
"""Named in one message."""

BETWEEN_RANKS = "parameters, to compare them between the ranks"


def described(model: nn.Module, *, moving: Sequence[str] | None) -> ModelTensors:
    """
    The tensors of a model of which this rank may hold a part.

    Raises:
        ConfigError: see `layout.describe`; or the model is wrapped by the first FSDP.
    """
    wrapped = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
    if wrapped:
        raise ConfigError(
            "model: it is wrapped in FullyShardedDataParallel, which replaces its parameters with flat ones; expected "
            "fully_shard(model), the second FSDP, DistributedDataParallel, or plain modules"
        )
    return describe(model, moving=moving, sharded=True)


def plain_digests(tensors: ModelTensors, *, show: bool = False) -> dict[str, str]:
    """
    By name, digests of the parameters that are not distributed, so that all ranks must have the same values.

    Args:
        tensors: of this rank.
        show: state that this takes seconds, if it does.

    Raises:
        DilocoError: as `frozen.with_digests`.
    """
    parameters = (*tensors.trained, *tensors.frozen)
    plain = [named for named in parameters if not isinstance(named.tensor, DTensor)]
    return {t.name: t.digest for t in with_digests(plain, purpose=BETWEEN_RANKS, show=show)}


def to_text(tensors: ModelTensors, digests: Mapping[str, str] = MappingProxyType({})) -> str:
    """
    This rank's tensors and what it holds of them, as JSON for the other ranks.

    Args:
        tensors: of this rank.
        digests: what `plain_digests` returned.

    Raises:
        ConfigError: a tensor is distributed in a way that is not supported.
    """
    kinds = {"merged": tensors.merged, "frozen": tensors.frozen, "buffers": tensors.buffers}
    return json.dumps({kind: [_facts(n, digests) for n in found] for kind, found in kinds.items()})


def _facts(named: Named, digests: Mapping[str, str]) -> dict[str, Any]:
    box = box_of(named)
    return {
        "digest": digests.get(named.info.name, ""),
        "info": named.info.to_json(),
        "box": None if box is None else [box.lo, box.shape],
        "placed": _placed(named.tensor),
        "same": not isinstance(named.tensor, DTensor) and named.tensor.requires_grad,
    }


def box_of(named: Named) -> Box | None:
    """
    What this rank holds of a tensor; None: nothing.

    Raises:
        ConfigError: it is distributed in a way that is not supported.
    """
    tensor, name = named.tensor, named.info.name
    if not isinstance(tensor, DTensor):
        return whole(named.info.shape)
    odd = [p for p in tensor.placements if not _supported(p)]
    if odd or (named.info.newest and not all(p.is_replicate() for p in tensor.placements)):
        kinds = "only replicated" if named.info.newest else "sharded or replicated"
        raise ConfigError(
            f"model: {name} has placements {tensor.placements}, expected {kinds} ones in each dimension of the mesh"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    shape, lo = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    held = tuple(local(tensor).shape)
    if held != tuple(shape):
        raise ConfigError(
            f"model: this rank holds {list(held)} of {name}, expected {list(shape)} by its placements "
            f"{tensor.placements}; call Learner.connect when no step is under way"
        )
    return Box(tuple(lo), held) if local(tensor).numel() else None


def _supported(placement: object) -> bool:
    return isinstance(placement, Replicate | Shard) or type(placement).__name__ == "_StridedShard"


def _placed(tensor: torch.Tensor) -> str:
    """How the ranks share a tensor: the same text in all of them."""
    if not isinstance(tensor, DTensor):
        return "a plain tensor"
    placements = ", ".join(str(p) for p in tensor.placements)
    return f"a DTensor with placements ({placements}) on a mesh of {list(tensor.device_mesh.shape)}"


def shares(
    texts: Sequence[str], ranks: Sequence[int], *, first: Sequence[int] | None = None
) -> dict[int, dict[str, Share]]:  # fmt: skip
    """
    By rank and name, what ranks hold of each tensor, and which part they copy out.

    Args:
        texts: what `to_text` returned, by rank.
        ranks: whose shares.
        first: ranks on the machine of rank 0, which copy what they hold; None: all.

    Raises:
        ConfigError: the ranks have different models, or their parts are not the whole model.
    """
    facts = [_read(text) for text in texts]
    problems = list(islice(_problems(facts), MOST_PROBLEMS))
    if problems:
        raise ConfigError("the ranks of this learner do not fit together: " + "; ".join(problems))
    found: dict[int, dict[str, Share]] = {rank: {} for rank in ranks}
    for turn, name in enumerate(sorted(facts[0])):
        boxes = _boxes(facts, name)
        # The values of plain buffers may differ between ranks, as running statistics do: rank 0 has those that count.
        divided = (
            all(of_rank[name]["same"] for of_rank in facts) or "DTensor" in facts[0][name]["placed"]
        )
        copying = _nearest(boxes, first)
        for rank in ranks:
            held = boxes.get(rank)
            # Only the holders of the same box divide it.
            same = copying[held] if held is not None else {}
            copied = piece(same, rank, turn=turn, divided=divided)
            found[rank][name] = Share(held=held, copied=copied)
    return found


def _nearest(boxes: Mapping[int, Box], first: Sequence[int] | None) -> dict[Box, dict[int, Box]]:
    """By box, the ranks that copy it: its holders, or those of them on the machine of rank 0 if there are any."""
    holders: dict[Box, dict[int, Box]] = {}
    for rank, box in boxes.items():
        holders.setdefault(box, {})[rank] = box
    if first is None:
        return holders
    near = {box: {rank: box for rank in first if rank in ranks} for box, ranks in holders.items()}
    return {box: near[box] or ranks for box, ranks in holders.items()}


def _read(text: str) -> dict[str, dict[str, Any]]:
    facts = json.loads(text)
    return {
        entry["info"]["name"]: {**entry, "kind": kind}
        for kind, entries in facts.items()
        for entry in entries
    }


def _boxes(ranks: Sequence[Mapping[str, Any]], name: str) -> dict[int, Box]:
    boxes = {}
    for rank, facts in enumerate(ranks):
        if (box := facts[name]["box"]) is not None:
            boxes[rank] = Box(tuple(box[0]), tuple(box[1]))
    return boxes


def _problems(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for rank, facts in enumerate(ranks[1:], start=1):
        found = differences(_layout(ranks[0].values()), _layout(facts.values()), most=3)
        if found:
            yield f"compared with the model of rank 0, in that of rank {rank} " + ", ".join(found)
    if any(facts.keys() != ranks[0].keys() for facts in ranks):
        return
    for name in sorted(ranks[0]):
        placed = [facts[name]["placed"] for facts in ranks]
        other = next((rank for rank, text in enumerate(placed) if text != placed[0]), None)
        if other is not None:
            yield f"{name} is {placed[0]} in rank 0, and {placed[other]} in rank {other}"
        elif why := uncovered(ranks[0][name]["info"]["shape"], _boxes(ranks, name)):
            yield f"{name} is {placed[0]}, and {why}"
    yield from _unequal(ranks)


def _unequal(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Plain parameters are merged as one tensor, so they are one in all ranks."""
    for rank, facts in enumerate(ranks[1:], start=1):
        names = [n for n in sorted(facts) if facts[n].get("digest") != ranks[0][n].get("digest")]
        if not names:
            continue
        more = f" and {len(names) - MOST_PROBLEMS} more" if len(names) > MOST_PROBLEMS else ""
        yield (
            f"the plain tensors {', '.join(names[:MOST_PROBLEMS])}{more} have other values in rank {rank} than in rank "
            "0, expected the same in all ranks: let replicas begin equal (the same seed, or a broadcast from rank 0), "
            "and distribute what each rank has its own of, such as its experts (distribute_tensor with Shard(0))"
        )
        return


def _layout(entries: Iterable[Mapping[str, Any]]) -> Layout:
    """What `differences` compares."""
    kinds: dict[str, list[Tensor]] = {"merged": [], "frozen": [], "buffers": []}
    for entry in entries:
        kinds[entry["kind"]].append(Tensor.from_json(entry["info"]))
    return Layout(
        fragments=(), tensors=tuple(kinds["merged"]), constants=tuple(kinds["buffers"]), frozen=tuple(kinds["frozen"]),
    )  # fmt: skip
