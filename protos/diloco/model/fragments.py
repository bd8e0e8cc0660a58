"""
Cuts a model into fragments: balanced, deterministic, the same on both ends (paper C).

Pure. A fragment is one flat fp32 vector: its tensors one after the other, each padded with zeros to
a multiple of `BLOCK` elements, so that a quantization block or a chunk never holds two tensors of
one block. Nothing about a fragment travels on the wire except its index: both ends compute the same
`Layout` from the same list of tensors, and `Layout.digest` proves it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.errors import ConfigError
from diloco.model import integers

RESERVED = "__metadata__"
"""Not the name of a tensor in a file of safetensors."""

BLOCK = 128
"""Elements that share one quantization scale; every tensor is padded to a multiple of it."""

CHUNK = 1 << 18
"""Elements of one chunk: 1 MiB of fp32, the size at which gRPC streams best (docs/adr/0003)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One trained or frozen parameter, or one buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch prints it without the prefix: "float32", "bfloat16"."""
    embedding: bool = False
    """An nn.Embedding weight or anything tied to one."""
    aliases: tuple[str, ...] = ()
    """Other state_dict names of the same storage."""
    digest: str = ""
    """Of dtype, shape and values of a frozen parameter that stays with the learners; "": another tensor."""
    buffer: bool = False
    """A buffer that changes while training (docs/adr/0024)."""

    @property
    def elements(self) -> int:
        """Number of values; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def newest(self) -> bool:
        """An integer buffer: not averaged, but taken from the newest member."""
        return self.buffer and self.dtype in integers.DTYPES

    @property
    def length(self) -> int:
        """fp32 values that it takes in a fragment: more than `elements` if they are integers."""
        return self.elements * (integers.DIGITS if self.newest else 1)

    @property
    def padded(self) -> int:
        """`length` rounded up to a multiple of BLOCK."""
        return -(-self.length // BLOCK) * BLOCK

    def to_json(self) -> dict[str, Any]:
        """The description as JSON values; `Layout.digest` depends on the order of the keys."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "embedding": self.embedding,
            "aliases": list(self.aliases),
            **({"digest": self.digest} if self.digest else {}),
            # Left out of a parameter, so that models without merged buffers keep their digest.
            **({"buffer": True} if self.buffer else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tensor:
        """The tensor that `to_json` described; raises KeyError if something is missing."""
        return cls(
            name=data["name"],
            shape=tuple(data["shape"]),
            dtype=data["dtype"],
            embedding=data["embedding"],
            aliases=tuple(data["aliases"]),
            digest=data.get("digest", ""),
            buffer=data.get("buffer", False),
        )


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one tensor lies inside its fragment."""

    tensor: Tensor
    offset: int
    """First element inside the fragment; a multiple of BLOCK."""
    average: bool
    """Merged by plain average instead of RDA."""

    @cached_property
    def end(self) -> int:
        """One past the last padded element."""
        return self.offset + self.tensor.padded

    def values(self, fragment_N: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """The tensor's values in its shape, of a fragment: a view, or integers of its own type."""
        found_N = fragment_N[self.offset : self.offset + self.tensor.length]
        if self.tensor.newest:
            found_N = integers.from_digits(found_N, self.tensor.dtype)
        return found_N.reshape(self.tensor.shape)


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """One flat fp32 vector of `elements` values."""

    index: int
    slots: tuple[Slot, ...]

    @cached_property
    def elements(self) -> int:
        """Padded length."""
        return self.slots[-1].end if self.slots else 0

    @property
    def chunk_elements(self) -> int:
        """Elements of each wire chunk; the last may have fewer."""
        return CHUNK

    @cached_property
    def buffers(self) -> bool:
        """Whether it holds buffers; then it holds nothing else."""
        return any(slot.tensor.buffer for slot in self.slots)

    @cached_property
    def chunks(self) -> int:
        """Number of wire chunks; the last may be short."""
        return -(-self.elements // CHUNK)

    def chunk(self, index: int) -> tuple[int, int]:
        """Element range [lo, hi) of one chunk."""
        return index * CHUNK, min(self.elements, (index + 1) * CHUNK)


@dataclass(frozen=True)
class Layout:
    """All fragments of a model, and its tensors that are not trained."""

    fragments: tuple[Fragment, ...]
    tensors: tuple[Tensor, ...]
    """Trained parameters and merged buffers, by name."""
    constants: tuple[Tensor, ...] = ()
    """What the job stores without merging it."""
    frozen: tuple[Tensor, ...] = ()
    """Frozen parameters that stay with the learners; no fragment depends on them, nor the digest."""

    @cached_property
    def digest(self) -> str:
        """
        SHA-256 over names, shapes, dtypes, kinds and the cut; equal digests mean equal fragments.
        """
        text = json.dumps(
            [
                [list(t.to_json().values()) for t in self.tensors],
                [list(t.to_json().values()) for t in self.constants],
                [[(s.tensor.name, s.offset, s.average) for s in f.slots] for f in self.fragments],
            ],
            separators=(",", ":"),
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def elements(self) -> int:
        """Trained values without padding."""
        return sum(t.elements for t in self.tensors if not t.buffer)


def cut(
    tensors: Iterable[Tensor],
    *,
    num_fragments: int,
    constants: Iterable[Tensor] = (),
    frozen: Iterable[Tensor] = (),
    average: Sequence[str] = (),
) -> Layout:
    """
    Deal tensors into fragments: largest first, each into the fragment that is smallest so far.

    The largest fragment is at most 4/3 of the best possible (Graham 1969). Ties break by tensor
    name, then by fragment index. Paper leaves this open: the order of ties. Merged buffers are the last
    fragment, one of the P (docs/adr/0024).

    Args:
        tensors: the trained parameters and merged buffers, any order.
        num_fragments: P, at most the number of parameters, plus one if there are buffers.
        constants: tensors that the job stores without merging them; only described, never cut.
        frozen: tensors that stay with the learners; likewise.
        average: shell patterns of further names, besides embeddings, that are merged by average.

    Raises:
        ConfigError: P is larger than that, or leaves no fragment for the parameters, or a name is not
            unique, or one that a file of the model cannot have.

    Reference: paper section C, "balanced tensor fragmentation".
    """
    ordered = tuple(sorted(tensors, key=lambda t: t.name))
    names = [t.name for t in ordered]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ConfigError(
            f"duplicate tensor names: {', '.join(twice)}; give each parameter a name of its own"
        )
    constants, frozen = tuple(constants), tuple(frozen)
    if any(RESERVED in (t.name, *t.aliases) for t in (*ordered, *constants, *frozen)):
        raise ConfigError(
            f"a tensor of the model has the name {RESERVED}, which safetensors reserves; give it another one"
        )
    trained, buffers = [t for t in ordered if not t.buffer], [t for t in ordered if t.buffer]
    num_dealt = num_fragments - bool(buffers)
    if num_dealt > len(trained):
        most = len(trained) + bool(buffers)
        beside = " and one fragment of buffers" if buffers else ""
        raise ConfigError(
            f"spec.sync.fragments: {num_fragments} is more than the {len(trained)} trained "
            f"tensors of the model{beside}; set it to {most} or less"
        )
    if num_dealt == 0:
        raise ConfigError(
            f"spec.sync.fragments: {num_fragments} leaves none for the parameters beside that of the buffers "
            f"that change ({buffers[0].name}, {len(buffers)} in all); set it to 2 or more, or "
            "spec.sync.buffers to Initial"
        )
    heap = [(0, index) for index in range(num_dealt)]
    dealt: list[list[Tensor]] = [[] for _ in range(num_dealt)]
    for tensor in sorted(trained, key=lambda t: (-t.padded, t.name)):
        total, index = heapq.heappop(heap)
        dealt[index].append(tensor)
        heapq.heappush(heap, (total + tensor.padded, index))
    if buffers:
        dealt.append(buffers)
    fragments = []
    for index, mine in enumerate(dealt):
        slots, offset = [], 0
        for tensor in sorted(mine, key=lambda t: t.name):
            plain = (
                tensor.embedding
                or tensor.buffer
                or any(fnmatchcase(tensor.name, p) for p in average)
            )
            slots.append(Slot(tensor=tensor, offset=offset, average=plain))
            offset += tensor.padded
        fragments.append(Fragment(index=index, slots=tuple(slots)))
    return Layout(
        fragments=tuple(fragments),
        tensors=ordered,
        constants=tuple(sorted(constants, key=lambda t: t.name)),
        frozen=tuple(sorted(frozen, key=lambda t: t.name)),
    )


def due(step: int, *, num_fragments: int, interval: int) -> int | None:
    """
    The fragment p with step mod H = t_p, or None where no fragment is due (P < H).

    t_p = ⌊p·H/P⌋: distinct, and spread evenly over 0..H-1. Paper leaves this open: it spaces fragments within the
    interval (2, 3), and names no rounding.

    >>> [due(step, num_fragments=3, interval=6) for step in range(6)]
    [0, None, 1, None, 2, None]
    """
    place = step % interval
    index = -(-place * num_fragments // interval)
    if index < num_fragments and index * interval // num_fragments == place:
        return index
    return None


def next_due(step: int, *, num_fragments: int, interval: int) -> int:
    """
    The first step after `step` at which a fragment is due, without testing those in between.

    >>> [next_due(step, num_fragments=3, interval=6) for step in range(6)]
    [2, 2, 4, 4, 6, 6]
    """
    place = step % interval
    index = -(-(place + 1) * num_fragments // interval)
    return step - place + (index * interval // num_fragments if index < num_fragments else interval)


def differences(ours: Layout, theirs: Layout, *, most: int = 8) -> list[str]:
    """
    Messages on what differs between two models; empty if they agree.

    `ours` is the syncer's model, `theirs` that of a learner.
    """
    sentences = _differences(ours, theirs)  # of large models, never all at once
    found = list(islice(sentences, most))
    more = sum(1 for _ in sentences)
    return [*found, f"and {more} more"] if more else found


def _differences(ours: Layout, theirs: Layout) -> Iterator[str]:
    for kind, mine, other in (
        ("parameter", ours.tensors, theirs.tensors),
        ("constant", ours.constants, theirs.constants),
        ("frozen parameter", ours.frozen, theirs.frozen),
    ):
        a, b = {t.name: t for t in mine}, {t.name: t for t in other}
        for name in sorted(a.keys() - b.keys()):
            yield f"{_kind(kind, a[name])} {name} is missing"
        for name in sorted(b.keys() - a.keys()):
            yield f"{_kind(kind, b[name])} {name} is not part of the job's model"
        for name in sorted(a.keys() & b.keys()):
            yield from _changes(f"{_kind(kind, a[name])} {name}", a[name], b[name])


def _kind(kind: str, tensor: Tensor) -> str:
    return "buffer" if tensor.buffer else kind


def _changes(what: str, x: Tensor, y: Tensor) -> Iterator[str]:
    if x.shape != y.shape:
        yield f"{what} has shape {list(y.shape)} instead of {list(x.shape)}"
    if x.dtype != y.dtype:
        yield f"{what} has dtype {y.dtype} instead of {x.dtype}"
    if x.embedding != y.embedding or x.aliases != y.aliases:
        yield f"{what} is tied or used as an embedding differently"
    if x.digest != y.digest and (x.shape, x.dtype) == (y.shape, y.dtype):
        yield f"{what} has other values"
    if x.buffer != y.buffer:
        yield f"{what} is a buffer in only one of the two models"
