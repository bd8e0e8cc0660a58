"""
Every block of the data has one fate: what the lines state, against what the loops of the learners did.

    a block is open at one learner at most, in whatever pass; one that was trained on is not leased again, unless
    a restart has undone it; none is lost
    what counts was leased to its learner, which began it at that local step and made all steps with it
    once all faults are over, a loop that waits for a block gets one within a bound
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import BlockTaken, Captured, Moment, Resumed

Spans = Iterable[Mapping[str, int]]
"""Serials as lines have them."""


class BlockFates:
    """
    Its own book of the serials, from the lines alone.

    Args:
        blocks: of the dataset.
        steps: that a loop makes with each.
        wait: virtual seconds within which a loop has its next block.
        false: learners that state blocks which they do not have.
    """

    observes = (dict, BlockTaken, Captured, Resumed, Moment)

    def __init__(self, blocks: int, steps: int, wait: float, false: frozenset[str]) -> None:
        self._blocks, self._steps, self._wait, self._false = blocks, steps, wait, false
        self._free: set[int] = set()
        """Below `_next`."""
        self._next = 0
        self._open: dict[int, str] = {}
        """Serial → learner; "": of an earlier epoch, not known."""
        self._trained: set[int] = set()
        self._leased: set[tuple[str, int]] = set()
        """(learner, serial) that was ever open there."""
        self._taken: dict[tuple[str, int], set[int]] = {}
        """(learner, serial) → t_m at which its loop began it."""
        self._found: Mapping[str, Any] | None = None
        """What the newest start found in its snapshot."""
        self._begun = False
        """The start has stated it, or a learner has stated the dataset since."""
        self._step = 0
        self._quiet_at: float | None = None
        self._exported = False

    def observe(
        self, event: dict[str, Any] | BlockTaken | Captured | Resumed | Moment, now: float
    ) -> None:
        """See `Checker`."""
        match event:
            case BlockTaken():
                self._take(event, now)
            case Captured():
                self._compare(event.engine["blocks"], "the snapshot", now)
            case Resumed():
                self._found, self._begun, self._step = event.engine["blocks"], False, event.step
            case Moment():
                self._step = event.step
                self._judge(event, now)
            case {"event": "start"}:
                self._exported = False
            case {"event": "complete"}:
                self._exported = True
            case {"event": "data"}:
                self._data(event, now)
            case {"event": "lease", "learner": learner, "blocks": spans}:
                for serial in _serials(spans):
                    self._lease(learner, serial, now)
            case {"event": "release", "learner": learner, "blocks": spans}:
                for serial in _serials(spans):
                    self._close(learner, serial, "is released by", now)
                    self._free.add(serial)
                while self._next - 1 in self._free:  # as if it had never been leased
                    self._next -= 1
                    self._free.remove(self._next)
            case {"event": "trained", "learner": learner, "blocks": blocks}:
                for block in blocks:
                    self._count(learner, now, **block)

    def finish(self, now: float) -> None:
        """See `Checker`."""

    # ------------------------------------------------------------ the book

    def _data(self, line: Mapping[str, Any], now: float) -> None:
        free, opened = set(_serials(line["free"])), set(_serials(line["open"]))
        if not self._begun:
            self._begun = True
            if self._found is not None:
                self._compare_with(self._found, free, opened, line["next"], "the line", now)
            self._open = dict.fromkeys(opened, "")
            self._free, self._next = free, line["next"]
            self._trained = {n for n in self._trained if n < self._next and n not in free | opened}
            lost = set(range(self._next)) - free - opened - self._trained
            if lost:
                self._fail(f"block {min(lost)} is lost by the restart", now)
        elif (free, opened, line["next"]) != (self._free, set(self._open), self._next):
            self._fail("the line `data` is not what the lines before it explain", now)

    def _compare(self, state: Mapping[str, Any] | None, what: str, now: float) -> None:
        """What the engine keeps is what its lines explain."""
        if state is not None and self._begun:
            self._compare_with(state, self._free, set(self._open), self._next, what, now)

    def _compare_with(
        self, state: Mapping[str, Any], free: set[int], opened: set[int], end: int, what: str, now: float
    ) -> None:  # fmt: skip
        kept = {serial for first, last in state["free"] for serial in range(first, last)}
        held = [serial for holder in state["held"].values() for serial in holder["open"]]
        if len(held) != len(set(held)):
            self._fail(f"{what} has a block at two learners: {sorted(held)}", now)
        if (kept, set(held), state["next"]) != (free, opened, end):
            self._fail(
                f"{what} has {len(kept)} free and {sorted(held)} open below {state['next']}, expected "
                f"{len(free)} and {sorted(opened)} below {end}",
                now,
            )

    def _lease(self, learner: str, serial: int, now: float) -> None:
        others = {other % self._blocks: name for other, name in self._open.items()}
        if (holder := others.get(serial % self._blocks)) is not None:
            self._fail(f"block {serial} is leased to {learner} while it is open at {holder}", now)
        if serial in self._trained:
            self._fail(f"block {serial} is leased to {learner}, but was trained on", now)
        oldest = min([self._next, *self._free, *self._open])
        if serial >= oldest + self._blocks:
            self._fail(f"block {serial} is leased a pass before block {oldest} is trained on", now)
        self._free.update(range(self._next, serial))
        self._next = max(self._next, serial + 1)
        self._free.discard(serial)
        self._open[serial] = learner
        self._leased.add((learner, serial))

    def _close(self, learner: str, serial: int, what: str, now: float) -> None:
        holder = self._open.pop(serial, None)
        if holder not in (learner, ""):
            self._fail(f"block {serial} {what} {learner}, it is open at {holder}", now)

    def _count(self, learner: str, now: float, *, block: int, begin: int, end: int) -> None:
        self._close(learner, block, "counts for", now)
        self._trained.add(block)
        if learner in self._false:
            return
        taken = self._taken.get((learner, block), set())
        if begin not in taken or end != begin + self._steps:
            self._fail(
                f"block {block} counts for {learner} with its steps {begin + 1}..{end}, its loop began it "
                f"after {sorted(taken)}, with {self._steps} steps",
                now,
            )

    # ------------------------------------------------------------ learners

    def _take(self, event: BlockTaken, now: float) -> None:
        key = event.learner, event.serial
        if key not in self._leased:
            self._fail(
                f"{event.learner} begins block {event.serial}, which it was never leased", now
            )
        self._taken.setdefault(key, set()).add(event.local_step)

    def _judge(self, moment: Moment, now: float) -> None:
        if not moment.quiet or self._exported:
            return
        if self._quiet_at is None:
            self._quiet_at = now
        for name, learner in moment.learners.items():
            if learner.waits_since is None or learner.done:
                continue
            seconds = now - max(self._quiet_at, learner.waits_since)
            if seconds > self._wait:
                self._fail(
                    f"{name} has waited for a block for {seconds:.0f} s without a fault, expected one "
                    f"within {self._wait:.0f}",
                    now,
                )

    def _fail(self, sentence: str, now: float) -> None:
        raise Violation("blocks", sentence, step=self._step, now=now)


def _serials(spans: Spans) -> Iterator[int]:
    for span in spans:
        yield from range(span["first"], span["first"] + span["count"])
