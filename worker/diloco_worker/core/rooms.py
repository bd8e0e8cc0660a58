"""Memory of several sizes for what is under way between devices and the host. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Elements that each place or buffer has room for."""

    spares: Sequence[int]
    """Places in memory for host copies, numbered from 1, besides the one of each fragment, which no copy here uses."""
    outgoing: Sequence[int]
    """Buffers on the device for the host copies of one boundary."""
    incoming: Sequence[int]
    """Buffers on the device for results."""

    @classmethod
    def of(
        cls, fragments: Sequence[int], *, announced: int, under_way: int = 1, results: int = 2
    ) -> Rooms:
        """
        What is needed for so many different fragments at a time, whichever they are.

        Args:
            fragments: elements of each.
            announced: how many have host copies; of each, one is read while the next ones are made.
            under_way: boundaries whose copies are made at a time.
            results: that are on their way to the parameters at a time.
        """
        largest = sorted(fragments, reverse=True)
        out = largest[:announced]
        return cls(
            spares=[n for n in out for _ in range(under_way + 1)],
            outgoing=out,
            incoming=largest[:results],
        )


UNDER_WAY = 3
"""Boundaries of several ranks whose copies are made at a time: rank 0 knows two steps later that one is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """How the ranks of a learner copy by devices: the same in all of them."""

    fragments: Sequence[int]
    """Elements of each."""
    rooms: Rooms
    """For whole fragments. The buffers of a rank have room for its parts of them."""
    announced: int
    """Fragments that are copied at one boundary, at most."""

    @classmethod
    def of(cls, fragments: Sequence[int], *, overlap: int) -> Devices:
        """
        For a learner of several ranks.

        Args:
            fragments: elements of each.
            overlap: τ of the job.
        """
        # Paper leaves this open. Reports are two or three steps late, and a result waits two steps for all devices.
        announced = overlap + 4
        rooms = Rooms.of(fragments, announced=announced, under_way=UNDER_WAY, results=UNDER_WAY)
        return cls(fragments=fragments, rooms=rooms, announced=announced)


def smallest(rooms: Sequence[int], elements: int, used: Collection[int]) -> int | None:
    """The smallest room that has so many elements and is not used."""
    fitting = [(n, index) for index, n in enumerate(rooms) if n >= elements and index not in used]
    return min(fitting)[1] if fitting else None
