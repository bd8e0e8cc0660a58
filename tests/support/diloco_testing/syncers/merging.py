"""Fragments, uploads and merges for tests: small, deterministic, through the real wire codec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diloco.codec import formats
from diloco.model.fragments import Fragment, Slot, Tensor
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.merging.streaming import FragmentMerge

F32 = npt.NDArray[np.float32]

PLAIN = OuterOptimizer(learning_rate=1.0, momentum=0.0, nesterov=False)
"""Θ ← Θ − Δ, and the momentum is Δ itself."""


def fragment_of(*sizes: int, average: Sequence[int] = ()) -> Fragment:
    """A fragment of tensors t0, t1, … with these numbers of elements."""
    slots, offset = [], 0
    for number, size in enumerate(sizes):
        tensor = Tensor(name=f"t{number}", shape=(size,), dtype="float32")
        slots.append(Slot(tensor=tensor, offset=offset, average=number in average))
        offset += tensor.padded
    return Fragment(index=0, slots=tuple(slots))


def values_of(fragment: Fragment, seed: int, size: float = 1.0) -> F32:
    """Normal values with zeros in the padding."""
    flat_N = np.zeros(fragment.elements, np.float32)
    rng = np.random.default_rng(seed)
    for slot in fragment.slots:
        end = slot.offset + slot.tensor.elements
        flat_N[slot.offset : end] = size * rng.standard_normal(slot.tensor.elements)
    return flat_N


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Upload:
    """The upload of a learner: its chunks, and the values they encode."""

    contribution: Contribution
    chunks: tuple[bytes, ...]
    values_N: F32
    """As decoded."""


def upload(
    fragment: Fragment, learner: str, delta_N: F32, *, weight: int = 1, fmt: int = formats.FP32
) -> Upload:
    """Encode a delta as a learner does; as many tokens as steps give that weight."""
    chunks, values_N = [], np.zeros_like(delta_N)
    for index in range(fragment.chunks):
        lo, hi = fragment.chunk(index)
        out = np.zeros(formats.encoded_bytes(fmt, hi - lo), np.uint8)
        formats.encode(fmt, delta_N[lo:hi], out)
        formats.decode(fmt, out, values_N[lo:hi])
        chunks.append(out.tobytes())
    norms = tuple(formats.slot_norms(fragment, values_N))
    contribution = Contribution(
        learner=learner, incarnation=1, round=1, attempt=1, local_step=1, steps=weight, tokens=weight,
        base=(1, 0), format=fmt, norms=norms,
    )  # fmt: skip
    return Upload(contribution=contribution, chunks=tuple(chunks), values_N=values_N)


def merge_of(
    fragment: Fragment,
    contributions: Iterable[Contribution],
    *,
    theta_N: F32 | None = None,
    momentum_N: F32 | None = None,
    merge: str = "Radial",
    outer: OuterOptimizer = PLAIN,
    down: int = formats.FP32,
    window: int = 4,
) -> FragmentMerge:
    """A merge that has received nothing yet; Θ and momentum are zeros unless given."""
    zeros_N = np.zeros(fragment.elements, np.float32)
    return FragmentMerge(
        fragment=fragment,
        theta_N=zeros_N if theta_N is None else theta_N,
        momentum_N=zeros_N if momentum_N is None else momentum_N,
        contributions=tuple(contributions),
        merge=merge,
        outer=outer,
        down=down,
        window=window,
    )


def feed(merge: FragmentMerge, uploads: Sequence[Upload]) -> None:
    """Add everything, chunk by chunk, in the order given."""
    for index in range(max(len(u.chunks) for u in uploads)):
        for each in uploads:
            merge.add(each.contribution.learner, index, each.chunks[index])
