"""
A local checkpoint in pieces: one per rank of the learner that wrote it, read by any number of ranks.

    <state>/checkpoint-<local step>.rank-<r>.safetensors    what rank r wrote: its part of each tensor
    <state>/checkpoint-<local step>.rank-<r>.layout         JSON: which parts these are, and everything else
    <state>/checkpoint-<local step>.json                    the manifest, with the SHA-256 of each layout

torch.distributed.checkpoint plans which parts of which pieces this rank needs: its planner compares the boxes that were
saved with those that this rank holds. Its own storage would need pickle, and collectives while training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import ConfigError, StorageError
from diloco.runtime import files
from diloco_worker.core.shard_slices import Box, uncovered, whole
from diloco_worker.trainer import optimizer_state
from diloco_worker.trainer.layout import is_dtensor
from diloco_worker.trainer.trees import TensorReader, unpack
from diloco_worker.trainer.wrappers import tensors_of

MAX_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """Which box of a tensor a piece has."""

    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""

    def to_json(self) -> list[Any]:
        """The form that layouts hold."""
        return [self.box.lo, self.box.shape, self.shape]

    @classmethod
    def from_json(cls, data: Sequence[Sequence[int]]) -> Part:
        """The inverse of `to_json`."""
        lo, size, shape = (tuple(map(int, numbers)) for numbers in data)
        return cls(Box(lo, size), shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank wrote."""

    path: Path
    """The file with its tensors."""
    tree: Any
    parts: Mapping[str, Part] = field(default_factory=dict)
    """By the name of a tensor; others are whole, and the rank's own."""
    held: str = ""
    """Digest of what the rank held of the model."""


def piece_path(manifest: Path, rank: int) -> Path:
    """The file of a rank's tensors; its layout has the suffix .layout."""
    return manifest.with_name(f"{manifest.stem}.rank-{rank}.safetensors")


def read(manifest: Path, digests: Sequence[str], *, place: int = 0, places: int = 1) -> list[Piece]:
    """
    The pieces of a checkpoint.

    Args:
        manifest: its file.
        digests: SHA-256 of each rank's layout.
        place, places: of `places` processes, this one verifies the tensors of the pieces place, place + places, …

    Raises:
        OSError, StorageError, ValueError, KeyError, TypeError: a piece is missing or damaged.
    """
    if len(digests) > MAX_RANKS:
        raise StorageError(f"it has {len(digests)} pieces, expected at most {MAX_RANKS}")
    return [
        _read(piece_path(manifest, rank), digest, verify=rank % places == place)
        for rank, digest in enumerate(digests)
    ]


def _read(path: Path, digest: str, *, verify: bool) -> Piece:
    layout = path.with_suffix(".layout")
    text = files.read(layout)
    _compare(layout, hashlib.sha256(text).hexdigest(), digest)
    data = json.loads(text)
    with open(files.open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != data["bytes"]:
            raise StorageError(f"{path.name} has {size} bytes, expected {data['bytes']}")
        if verify:
            _compare(path, hashlib.file_digest(file, "sha256").hexdigest(), data["sha256"])
    return from_layout(path, data)


def from_layout(path: Path, data: Mapping[str, Any]) -> Piece:
    """The piece that a layout describes."""
    parts = {name: Part.from_json(part) for name, part in data["parts"].items()}
    return Piece(path=path, tree=data["tree"], parts=parts, held=data["held"])


def _compare(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise StorageError(f"{path.name} has SHA-256 {found[:16]}…, expected {expected[:16]}…")


def check_complete(pieces: Sequence[Piece]) -> None:
    """
    The pieces together have every value of every tensor.

    Raises:
        ConfigError: they lack some, so that the state cannot be given to other ranks.
    """
    first = set(_names(_optimizers(pieces[0])))
    for rank, piece in enumerate(pieces[1:], start=1):
        for name in sorted(first ^ set(_names(_optimizers(piece)))):
            which = "only rank 0 has" if name in first else f"rank {rank} has, and rank 0 does not,"
            raise ConfigError(
                f"{which} {name}; expected all ranks to have state of the same parameters"
            )
    for name in sorted({name for piece in pieces for name in piece.parts}):
        found = {r: piece.parts[name] for r, piece in enumerate(pieces) if name in piece.parts}
        shape = next(iter(found.values())).shape
        boxes = {rank: part.box for rank, part in found.items() if part.box.elements}
        if why := uncovered(shape, boxes):
            raise ConfigError(f"{name}: {why}")


def _optimizers(piece: Piece) -> Any:
    return dict(piece.tree["dict"])["optimizers"]


def _names(tree: Any) -> Iterator[str]:
    """The tensors of a packed tree."""
    if not isinstance(tree, dict):
        return
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        yield inner
    else:
        for item in inner:
            yield from _names(item[1] if kind == "dict" else item)


# ---------------------------------------------------------------- loading


def kept(pieces: Sequence[Piece], *, rank: int = 0, ranks: int = 1) -> tuple[Piece | None, Any]:
    """The piece that has what this rank kept, and its packed states; None: the number of ranks is another."""
    if len(pieces) != ranks:
        return None, {"dict": []}
    found = dict(pieces[rank].tree["dict"]).get("kept") or {"dict": []}
    return pieces[rank], found


def load(
    pieces: Sequence[Piece], description: Sequence[Mapping[str, Any]] | None, model: nn.Module,
    optimizers: Sequence[Optimizer], *, parameters: bool, rank: int = 0, ranks: int = 1, held: str = "",
) -> Any:  # fmt: skip
    """
    Give this rank's part of the state to the optimizers and, if `parameters`, to the model.

    Args:
        pieces: all pieces of a checkpoint.
        description: what `optimizer_state.describe` returned then.
        model: of this process.
        optimizers: of this process; after an error they have their own state.
        parameters: whether the model is overwritten, too.
        rank: of this process.
        ranks: of this learner.
        held: digest of what this rank holds of the model.

    Returns:
        The random state that this rank had; None: there is none, because the number of ranks is another.

    Raises:
        ConfigError: the optimizers differ from those that were saved, or their state is not finite.
        DamagedError: a file is not what was verified.
    """
    with contextlib.ExitStack() as opened, torch.no_grad():
        reader = _Reader(pieces, opened, rank=rank, ranks=ranks, held=held)
        tree = dict(reader.own.tree["dict"])
        state = _State(reader, optimizers)
        saved = unpack(tree["optimizers"], state)
        reader.fill(state.wanted)
        with optimizer_state.own_on_error(optimizers):
            optimizer_state.load(saved, description, model, optimizers)
            if parameters:
                named = dict(tensors_of(model))
                _load_model(reader, [(named[n], at["tensor"]) for n, at in tree["model"]["dict"]])
        return unpack(tree["random"], reader) if len(pieces) == ranks else None


class _Reader:
    """
    Reads tensors from the pieces.

    Its items are the tensors that are this rank's own; where the number of ranks is another, those of rank 0.
    """

    def __init__(
        self, pieces: Sequence[Piece], opened: contextlib.ExitStack, *, rank: int, ranks: int, held: str
    ) -> None:  # fmt: skip
        number = rank if len(pieces) == ranks else 0
        self.own = pieces[number]
        self.same = len(pieces) == ranks and self.own.held == held != ""
        """Whether this rank holds what it held then."""
        self.ranks = len(pieces)
        self._pieces = pieces
        self._readers = [
            TensorReader(opened.enter_context(os.fdopen(files.open_regular(p.path), "rb", 0)))
            for p in pieces
        ]
        self._own = self._readers[number]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._own[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        part = self.own.parts.get(name)
        return self._own.entry(name).shape if part is None else part.shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor."""
        found: torch.dtype = getattr(torch, self._own.entry(name).dtype)
        return found

    def divided(self, name: str) -> bool:
        """Whether the tensor may be assembled from parts; a whole one of a single piece is such a part."""
        return name in self.own.parts or self.ranks == 1

    def fill(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Overwrite what this rank holds of these tensors with what was saved under the names."""
        # Only a learner that reads pieces needs the second that this import takes.
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        sources: dict[tuple[str, tuple[int, ...]], int] = {}
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name in wanted:
            chunks = []
            for number, part in self._parts(name):
                if sources.setdefault((name, part.box.lo), number) == number:
                    lo, size = torch.Size(part.box.lo), torch.Size(part.box.shape)
                    chunks.append(ChunkStorageMetadata(offsets=lo, sizes=size))
            described[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=self.dtype(name)), size=torch.Size(self.shape(name)), chunks=chunks,
            )  # fmt: skip
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(wanted), Metadata(described), is_coordinator=True)
        for item in planner.create_local_plan().items:
            index = item.storage_index
            number = sources[index.fqn, tuple(index.offset or ())]
            found = self._readers[number][index.fqn]
            sides = zip(item.storage_offsets, item.lengths, strict=True)
            found = found[tuple(slice(lo, lo + length) for lo, length in sides)]
            planner.resolve_tensor(item).copy_(found)

    def _parts(self, name: str) -> Iterator[tuple[int, Part]]:
        if name not in self.own.parts:
            shape = self.shape(name)
            yield 0, Part(whole(shape), shape)
            return
        for number, piece in enumerate(self._pieces):
            if piece.parts[name].box.elements:
                yield number, piece.parts[name]


class _State:
    """The tensors of the optimizers, by their names in the checkpoint; those to be assembled are in `wanted`."""

    def __init__(self, reader: _Reader, optimizers: Sequence[Optimizer]) -> None:
        self.wanted: dict[str, torch.Tensor] = {}
        self._reader = reader
        self._parameters = [
            [p for group in optimizer.param_groups for p in group["params"]]
            for optimizer in optimizers
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        reader, parameter = self._reader, self._parameter(name)
        shape = reader.shape(name)
        if parameter is None:
            return reader[name]
        if reader.divided(name) and shape == tuple(parameter.shape):
            target = torch.empty_like(parameter.detach(), dtype=reader.dtype(name))
            self.wanted[name] = target
            return target
        if name in reader.own.parts:
            raise ConfigError(
                f"{name} has shape {list(shape)} in the checkpoint, its parameter has {list(parameter.shape)}"
            )
        if is_dtensor(parameter) and len(shape) > 0 and not reader.same:
            raise ConfigError(
                f"{name} is neither a number nor of the shape of its parameter, so it cannot be redivided among "
                "these ranks"
            )
        return reader[name]

    def _parameter(self, name: str) -> torch.Tensor | None:
        """Whose state it is; None: that of no parameter."""
        match name.split("/"):
            case ["", "optimizers", number, "state", index, *_] if index.isdigit():
                found = self._parameters[int(number)] if int(number) < len(self._parameters) else []
                return found[int(index)] if int(index) < len(found) else None
        return None


def _load_model(reader: _Reader, targets: Sequence[tuple[torch.Tensor, str]]) -> None:
    wanted = {}
    for tensor, name in targets:
        if reader.divided(name):
            wanted[name] = tensor.detach()
        else:
            tensor.copy_(reader[name])
    reader.fill(wanted)
