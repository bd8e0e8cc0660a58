"""
What one machine of a learner holds of the memory that trainer and link share, in parts that fit in a message. Pure.

Both ends of a relay make the same lists from what the ranks agreed on, so a message names a part by its place in
the list. A *unit* is a fragment; the last unit is the constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diloco.model import tensorfile
from diloco.model.fragments import Layout
from diloco_worker.core.shard_slices import Box, whole

PART_BYTES = 1 << 20
"""The largest part, in bytes; small messages between two parts wait for one."""

U8 = npt.NDArray[np.uint8]

Boxes = Mapping[str, Iterable[Box]]
"""By name of a tensor; without those of which there is no part."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor in a unit's memory."""

    name: str
    """Of the tensor; "": of no tensor."""
    dtype: str
    """Of the tensor, which in a fragment is held as fp32."""
    offset: int
    """Byte at which the tensor begins in the unit."""
    shape: tuple[int, ...]
    """Of the tensor, and last the bytes of an element."""
    box: Box

    @property
    def size_bytes(self) -> int:
        """Bytes of the box."""
        return self.box.elements

    def view(self, memory: U8) -> U8:
        """The box in the memory of its unit; to write to it changes the memory."""
        size = int(np.prod(self.shape, dtype=np.int64))
        tensor = memory[self.offset : self.offset + size].reshape(self.shape)
        found: U8 = tensor[self.box.slices()]
        return found


def held(layout: Layout, boxes: Boxes, *, constants_bytes: int) -> list[list[Part]]:
    """
    What a machine needs of results: its boxes of each fragment, and all constants.

    Args:
        layout: of the model.
        boxes: that its ranks hold.
        constants_bytes: size of the constants.
    """
    file = Part("", "uint8", 0, (constants_bytes, 1), whole((constants_bytes, 1)))
    constants = [*_split(file)] if constants_bytes else []
    return [*_of_fragments(layout, boxes), constants]


def copied(layout: Layout, boxes: Boxes) -> list[list[Part]]:
    """
    What the ranks of a machine copy out of the model, per unit.

    Args:
        layout: of the model.
        boxes: that they copy.
    """
    named = sorted(layout.constants, key=lambda tensor: tensor.name)
    files = [tensorfile.Entry(name=t.name, dtype=t.dtype, shape=t.shape) for t in named]
    found: list[Part] = []
    for entry in tensorfile.plan(files)[1]:
        size = tensorfile.DTYPES[entry.dtype].size
        for box in sorted(boxes.get(entry.name, ()), key=lambda box: box.lo):
            part = _part(entry.name, entry.dtype, entry.lo, entry.shape, size, box)
            found += _split(part) if part.size_bytes else ()
    return [*_of_fragments(layout, boxes), found]


def _of_fragments(layout: Layout, boxes: Boxes) -> Iterator[list[Part]]:
    for fragment in layout.fragments:
        parts: list[Part] = []
        for slot in fragment.slots:
            info = slot.tensor
            for box in sorted(boxes.get(info.name, ()), key=lambda box: box.lo):
                # The digits of integers have no shape, and are held as a whole.
                shape = (info.length,) if info.newest else info.shape
                placed = whole(shape) if info.newest else box
                parts += _split(_part(info.name, info.dtype, 4 * slot.offset, shape, 4, placed))
        yield parts


def _part(
    name: str, dtype: str, offset: int, shape: Sequence[int], size: int, box: Box
) -> Part:  # fmt: skip
    within = Box((*box.lo, 0), (*box.shape, size))
    return Part(name, dtype, offset, (*shape, size), within)


def _split(part: Part) -> Iterator[Part]:
    """Parts of at most PART_BYTES, in order: whole rows as far as they fit."""
    pending = [part.box]
    while pending:
        box = pending.pop()
        if box.elements <= PART_BYTES:
            yield Part(part.name, part.dtype, part.offset, part.shape, box)
            continue
        axis = next(d for d, size in enumerate(box.shape) if size > 1)
        row = box.elements // box.shape[axis]
        size = max(1, PART_BYTES // row)
        pieces = []
        for begin in range(0, box.shape[axis], size):
            lo, shape = [*box.lo], [*box.shape]
            lo[axis], shape[axis] = lo[axis] + begin, min(size, box.shape[axis] - begin)
            pieces.append(Box(tuple(lo), tuple(shape)))
        pending += reversed(pieces)
