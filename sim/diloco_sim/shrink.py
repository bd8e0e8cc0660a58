"""
Makes a failing world smaller while it still fails: fewer faults, learners and steps, shorter faults.

Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002) for
the faults, halving for numbers. Each candidate is run, so the result depends on nothing but the world.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from diloco_sim.faults import Fault, Plan


class Shrinkable(Protocol):
    """What can be made smaller: a frozen dataclass with at least these fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def plan(self) -> Plan:
        """Its faults."""

    @property
    def learners(self) -> int:
        """How many there are; faults of learners that are not there do nothing."""

    @property
    def steps(self) -> int:
        """Global steps to train."""


W = TypeVar("W", bound=Shrinkable)
T = TypeVar("T")


class ExhaustedError(Exception):
    """The allowed number of runs was used."""


def shrink(
    world: W, fails: Callable[[W], bool], *, most_runs: int = 1000, least_learners: int = 1
) -> W:
    """
    Find a smaller world that fails; none of its faults can be left out.

    Args:
        world: fails.
        fails: runs a world; whether it fails in the same way (for example, by the same checker).
        most_runs: calls of `fails`; the smallest world until then is returned.
        least_learners: not fewer, for example the quorum.

    Returns:
        The smallest world found, or `world` itself.
    """
    search = _Search(world, fails, most_runs)
    try:
        changed = True
        while changed:
            before = search.smallest
            search.plan()
            search.number("learners", least_learners)
            search.number("steps", 1)
            search.durations()
            changed = search.smallest != before
    except ExhaustedError:
        pass
    return search.smallest


def ddmin(items: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """
    A subset that fails and of which no single item can be left out; the order is kept.

    Args:
        items: fail together.
        fails: whether a subset does.
    """
    rest = tuple(items)
    if rest and fails(()):
        return ()
    parts = 2
    while len(rest) >= 2:
        parts = min(parts, len(rest))
        for i in range(parts):
            # Larger cuts first; the complement of a part is what remains without it.
            low, high = len(rest) * i // parts, len(rest) * (i + 1) // parts
            candidate = rest[:low] + rest[high:]
            if fails(candidate):
                rest, parts = candidate, max(2, parts - 1)
                break
        else:
            if parts == len(rest):
                break
            parts *= 2
    return rest


class _Search(Generic[W]):
    """The smallest failing world so far."""

    def __init__(self, world: W, fails: Callable[[W], bool], most_runs: int) -> None:
        self.smallest = world
        self._fails, self._left = fails, most_runs

    def plan(self) -> None:
        """Leave out faults."""
        ddmin(self.smallest.plan.faults, lambda faults: self._try(plan=Plan(faults)))

    def number(self, field: str, least: int) -> None:
        """Lower a number: to the least if that fails, then by halves of what is left."""
        while (value := getattr(self.smallest, field)) > least:
            cut = value - least
            while cut and not self._try(**{field: value - cut}):
                cut //= 2
            if not cut:
                return

    def durations(self) -> None:
        """Shorten faults by halves."""
        for i in range(len(self.smallest.plan)):
            while True:
                fault: Fault = self.smallest.plan.faults[i]
                seconds = round((fault.end - fault.begin) / 2, 3)
                if seconds < 0.01:
                    break
                shorter = dataclasses.replace(fault, end=round(fault.begin + seconds, 3))
                faults = list(self.smallest.plan.faults)
                faults[i] = shorter
                if not self._try(plan=Plan(tuple(faults))):
                    break

    def _try(self, **changes: Any) -> bool:
        candidate = dataclasses.replace(self.smallest, **changes)
        if candidate == self.smallest:
            return True
        if not self._left:
            raise ExhaustedError
        self._left -= 1
        failed = self._fails(candidate)
        if failed:
            self.smallest = candidate
        return failed
