"""
Blocks of a dataset, as a training loop takes them: `for block in learner.blocks(dataset)` (ADR 0032).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from diloco_worker.core.open_blocks import Data

MAX_ITEMS = 1 << 48
MAX_AHEAD = 31
"""As the syncer bounds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Items of a dataset that no other learner has at the same time."""

    number: int
    """In the dataset, from 0."""
    of_pass: int
    """How often all learners together have taken the whole dataset before."""
    range: range
    """Indices of its items."""


def data_of(dataset: Any, *, size: int, ahead: int) -> Data:
    """
    What a program takes blocks of, checked.

    Raises:
        TypeError: no length, or a number that is not whole.
        ValueError: a number is out of its range.
    """
    items = dataset
    if not isinstance(dataset, int):
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset is a {type(dataset).__name__} without a length, expected one that has it, or the number of "
                "its items; an iterable dataset cannot be cut into blocks"
            )
        items = len(dataset)
    for name, value in (("dataset", items), ("size", size), ("ahead", ahead)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, expected a whole number")
    if not 1 <= items <= MAX_ITEMS:
        raise ValueError(f"the dataset has {items} items, expected 1 to {MAX_ITEMS}")
    if not 1 <= size <= items:
        raise ValueError(f"size is {size}, expected 1 to the {items} items of the dataset")
    if not 0 <= ahead <= MAX_AHEAD:
        raise ValueError(f"ahead is {ahead}, expected 0 to {MAX_AHEAD}")
    return Data(items=items, size=size, ahead=ahead)


def blocks_of(data: Data, take: Callable[[Data], int | None]) -> Iterator[Block]:
    """
    One block after the other, until there is none.

    Args:
        data: what they are of.
        take: the serial of the next one; None: the loop ends.
    """
    count = -(-data.items // data.size)
    while (serial := take(data)) is not None:
        of_pass, number = divmod(serial, count)
        first = number * data.size
        items = range(first, min(first + data.size, data.items))
        yield Block(number=number, of_pass=of_pass, range=items)
