"""
Which part of each tensor a rank of a learner holds, and which it copies to the host. Pure.

A rank holds one box of a tensor: the whole, or a shard. A box that several ranks hold is divided among them, so
that the bytes that each of them copies out fall with the number of ranks; every holder applies results to all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DIVIDED_ELEMENTS = 1 << 14
"""Smaller boxes are copied by one of their holders, in turn."""

EVEN_ROWS = 16
"""
The first dimension with so many values for each holder is divided, else the longest: a piece of whole rows is
contiguous, so that a device copies it at once.
"""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins, and its shape, in each dimension."""

    lo: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of values; 1 of a scalar."""
        return math.prod(self.shape)

    @property
    def hi(self) -> tuple[int, ...]:
        """Where it ends."""
        return tuple(lo + size for lo, size in zip(self.lo, self.shape, strict=True))

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Its place in a tensor that begins at `origin`; None: in the whole one."""
        start = origin or (0,) * len(self.lo)
        pairs = zip(self.lo, self.hi, start, strict=True)
        return tuple(slice(lo - at, hi - at) for lo, hi, at in pairs)

    def overlaps(self, other: Box) -> bool:
        """Whether both have an element in common."""
        sides = zip(self.lo, self.hi, other.lo, other.hi, strict=True)
        return all(lo < other_hi and other_lo < hi for lo, hi, other_lo, other_hi in sides)


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def uncovered(shape: Sequence[int], boxes: Mapping[int, Box]) -> str:
    """
    Why the boxes of the ranks are not exactly the tensor; empty: they are.

    Args:
        shape: of the tensor.
        boxes: by rank; without the ranks that hold nothing of it.
    """
    distinct = sorted(set(boxes.values()), key=lambda box: box.lo)
    for index, box in enumerate(distinct):
        if any(hi > size for hi, size in zip(box.hi, shape, strict=True)):
            return f"{_text(box)} is not within its shape {list(shape)}"
        for other in distinct[index + 1 :]:
            if box.lo and other.lo[0] >= box.hi[0]:
                break  # so do all that follow
            if box.overlaps(other):
                return f"{_text(box)} and {_text(other)} overlap"
    held = sum(box.elements for box in distinct)
    if held != math.prod(shape):
        return f"its shards have {held} of its {math.prod(shape)} values"
    return ""


def piece(boxes: Mapping[int, Box], rank: int, *, turn: int, divided: bool = True) -> Box | None:
    """
    What a rank copies out of its box: the pieces of all ranks are disjoint, and are the tensor.

    Args:
        boxes: by rank, as `uncovered` accepts them.
        rank: whose piece.
        turn: a number of the tensor, by which small boxes go to one holder after the other.
        divided: False: the first holder copies all, because the values of the others may differ.

    Returns:
        None: nothing.
    """
    own = boxes.get(rank)
    if own is None:
        return None
    holders = sorted(other for other, box in boxes.items() if box == own)
    place, count = holders.index(rank), len(holders)
    if not divided or count == 1:
        return own if place == 0 else None
    axis = max(range(len(own.shape)), key=lambda d: own.shape[d], default=None)
    axis = next((d for d, size in enumerate(own.shape) if size >= EVEN_ROWS * count), axis)
    if axis is None or own.elements < DIVIDED_ELEMENTS or own.shape[axis] < count:
        return own if place == turn % count else None
    size = own.shape[axis]
    begin, end = place * size // count, (place + 1) * size // count
    lo, shape = [*own.lo], [*own.shape]
    lo[axis], shape[axis] = lo[axis] + begin, end - begin
    return Box(tuple(lo), tuple(shape))


def _text(box: Box) -> str:
    ranges = ", ".join(f"{lo}:{hi}" for lo, hi in zip(box.lo, box.hi, strict=True))
    return f"the shard [{ranges}]"
