"""Which results are on the devices of all ranks of a learner, so that all of them apply them at the same step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_worker.core.rooms import smallest


@dataclass(frozen=True, slots=True)
class Fetch:
    """A result that every rank copies from its inbox to a buffer on its device."""

    fragment: int
    generation: int
    buffer: int


class Fetches:
    """
    What rank 0 plans for the results.

    A buffer belongs to a result until the ranks apply it. What is copied to it afterwards waits for that on each
    device, so that no rank waits for another.

    Args:
        fragments: elements of each.
        buffers: elements of each, on every device.
    """

    def __init__(self, fragments: Sequence[int], buffers: Sequence[int]) -> None:
        self._fragments, self._buffers = fragments, buffers
        self._begun: dict[int, tuple[Fetch, int]] = {}
        """By fragment, what is fetched and not applied, and the boundary at which the ranks began."""

    def plan(
        self, boundary: int, ready: Sequence[Sequence[int]], *, applied: Sequence[int], finished: int
    ) -> tuple[list[tuple[int, int]], list[Fetch]]:  # fmt: skip
        """
        What the ranks apply at a boundary, and what they begin to fetch there after that.

        Args:
            boundary: of the plan.
            ready: (fragment, generation) in the inboxes.
            applied: per fragment, the generation that the parameters hold.
            finished: the newest boundary of which all devices have finished the work.
        """
        wanted = {p: g for p, g in ready if g > applied[p]}
        self._begun = {
            p: begun for p, begun in self._begun.items() if wanted.get(p) == begun[0].generation
        }
        there = [
            (p, g) for p, g in wanted.items() if p in self._begun and self._begun[p][1] <= finished
        ]
        for p, _ in there:
            del self._begun[p], wanted[p]
        fetched = []
        for p, generation in wanted.items():
            used = {fetch.buffer for fetch, _ in self._begun.values()}
            buffer = None if p in self._begun else smallest(self._buffers, self._fragments[p], used)
            if buffer is not None:
                fetched.append(Fetch(p, generation, buffer))
                self._begun[p] = fetched[-1], boundary
        return there, fetched
