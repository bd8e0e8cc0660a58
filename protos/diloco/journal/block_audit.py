"""
Proves from events.jsonl what became of each block of the data. Pure.

    a block is open at one learner at most, in whatever pass
    a learner trains only on blocks that are open there, and one serial counts once
    no serial is lost: when a syncer begins with a snapshot, and at each snapshot, each one below `next` is free,
    open or trained

Where lines are missing, because rotation deleted them or the disk did not take them, nothing is stated before the
next line `data`.

A syncer that resumes from a snapshot has none of the merges after it, so what was trained since is leased again:
`undone`. A block counts in the merges whose report of the same incarnation has one of its local steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from diloco.journal.records import (
    Data,
    Dropped,
    Lease,
    Merge,
    Release,
    Span,
    Start,
    Trained,
)

MAX_SERIALS = 1 << 22
"""Free ones that a line may list; more cannot be leased by a job, and are refused as a whole."""

MAX_MERGES = 1024
"""That are listed for a block."""

LOOK_BACK = 1024
"""Local steps before which neither merges nor blocks are looked for."""

_KINDS = frozenset(record.kind for record in (Data, Lease, Merge, Release, Start, Trained))


@dataclass(slots=True)
class Fate:
    """A serial that was trained on."""

    learner: str
    incarnation: int
    begin: int
    """t_m before its first step."""
    end: int
    time: str = ""
    """Of the line that states it."""
    merges: list[int] = field(default_factory=list)
    """Global steps of the merges in which it counts."""


@dataclass(slots=True)
class BlockBook:
    """State after the lines so far."""

    blocks: int = 0
    """Of the dataset; 0: no learner has stated one."""
    next: int = 0
    free: set[int] = field(default_factory=set)
    """Below `next`."""
    open: dict[int, str] = field(default_factory=dict)
    """Serial → learner; "": of an earlier epoch, not known."""
    trained: dict[int, Fate] = field(default_factory=dict)
    before: int = 0
    """Serials below this one were trained on before the first line."""
    undone: int = 0
    unsure: bool = False
    """Lines before this one are missing, and no line `data` came since."""
    _numbers: set[int] = field(default_factory=set)
    """Of the open serials, in the dataset."""
    _of: dict[tuple[str, int], list[Fate]] = field(default_factory=dict)
    """(learner, incarnation) → what it trained on, in its order."""
    _merged: dict[tuple[str, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    """(learner, incarnation) → (first and last local step, global step) of its merged reports."""

    # ------------------------------------------------------------ lines

    def started(self, line: Start) -> None:
        """A syncer began: later merges are undone, and who has what is not known."""
        for fates in self._of.values():
            for fate in fates:
                fate.merges = [t for t in fate.merges if t <= line.step]
        for key, merged in self._merged.items():
            self._merged[key] = [each for each in merged if each[2] <= line.step]
        self.open = dict.fromkeys(self.open, "")

    def data(self, line: Data) -> Iterator[str]:
        """The dataset, and the state of all serials."""
        if min(line.items, line.size) < 1 or _size(line.free) + _size(line.open) > MAX_SERIALS:
            yield f"states {line.items} items in blocks of {line.size}, or too many blocks"
            return
        first, self.blocks = not self.blocks or self.unsure, -(-line.items // line.size)
        free, opened = set(_serials(line.free)), list(_serials(line.open))
        if first:
            self.before, self.unsure = line.next, False
        undone = {n for n in self.trained if n in free or n in opened or n >= line.next}
        for serial in undone:
            del self.trained[serial]
        self.undone += len(undone)
        known = free.union(opened)
        for serial in range(self.before, min(line.next, self.before + MAX_SERIALS)):
            if serial not in known and serial not in self.trained:
                yield f"{self.named(serial)} is lost: neither to be leased, nor open, nor trained on"
        self.next, self.free = line.next, free
        self.open = {serial: self.open.get(serial, "") for serial in opened}
        self._numbers = {serial % self.blocks for serial in opened}

    def lease(self, line: Lease) -> Iterator[str]:
        """Blocks are open at a learner."""
        for serial in _serials(line.blocks):
            number = serial % self.blocks
            if number in self._numbers:
                holders = [name for n, name in self.open.items() if n % self.blocks == number]
                holder = holders[0] or "another learner"
                yield f"{self.named(serial)} is leased to {line.learner} while it is open at {holder}"
            elif serial in self.trained:
                yield f"{self.named(serial)} is leased to {line.learner}, but was trained on"
            self.free.discard(serial)
            if serial >= self.next:
                self.free.update(range(self.next, min(serial, self.next + MAX_SERIALS)))
                self.next = serial + 1
            self.open[serial] = line.learner
            self._numbers.add(number)

    def _close(self, serial: int) -> str | None:
        self._numbers.discard(serial % self.blocks)
        return self.open.pop(serial, None)

    def release(self, line: Release) -> Iterator[str]:
        """They are no longer."""
        for serial in _serials(line.blocks):
            if self._close(serial) not in (line.learner, ""):
                yield f"{self.named(serial)} is released by {line.learner}, where it is not open"
            self.free.add(serial)

    def train(self, line: Trained, time: str) -> Iterator[str]:
        """A learner has trained on blocks."""
        key = line.learner, line.incarnation
        begin = min((block.begin for block in line.blocks), default=0)
        end = max((block.end for block in line.blocks), default=0)
        merged = []  # near any of the blocks: sought once for all of them
        for first, last, step in reversed(self._merged.get(key, [])):
            if last < begin - LOOK_BACK:
                break
            if first <= end and last > begin:
                merged.append((first, last, step))
        for block in line.blocks:
            if self._close(block.block) not in (line.learner, ""):
                yield f"{self.named(block.block)} counts for {line.learner}, where it is not open"
            if block.block in self.trained:
                yield f"{self.named(block.block)} counts twice"
            fate = Fate(line.learner, line.incarnation, block.begin, block.end, time)
            for first, last, step in merged:
                if first <= fate.end and last > fate.begin:
                    _add(fate, step)
            self.trained[block.block] = fate
            self._of.setdefault(key, []).append(fate)

    def merge(self, line: Merge) -> None:
        """Reports were merged: their local steps count."""
        for member in line.members:
            key, first = (member.learner, member.incarnation), member.step - int(member.steps) + 1
            if member.weight <= 0:
                continue
            self._merged.setdefault(key, []).append((first, member.step, line.step))
            for fate in reversed(self._of.get(key, [])):
                if fate.end < first - LOOK_BACK:
                    break
                if first <= fate.end and member.step > fate.begin:
                    _add(fate, line.step)

    # ------------------------------------------------------------ for people

    def named(self, serial: int) -> str:
        """What a serial is, for people."""
        of_pass, number = divmod(serial, max(1, self.blocks))
        return f"block {number} of pass {of_pass}"

    def sentence(self) -> str:
        """What became of the blocks; empty: the job leases none."""
        if not self.blocks:
            return "Blocks of data: not known, the lines are missing." if self.unsure else ""
        by: dict[str, int] = {}
        for fate in self.trained.values():
            by[fate.learner] = by.get(fate.learner, 0) + 1
        who = ", ".join(f"{learner} {count}" for learner, count in sorted(by.items()))
        merged = sum(bool(fate.merges) for fate in self.trained.values())
        parts = [
            f"Blocks of data: {len(self.trained)} trained on ({who or 'no learner'})",
            f"{merged} of them in at least one merge",
            f"{len(self.open)} open",
            f"{len(self.free)} to be leased again",
        ]
        if self.undone:
            parts.append(f"{self.undone} undone by restarts of the syncer")
        if before := self.before - sum(serial < self.before for serial in self.trained):
            parts.append(f"{before} before the first line, or where lines are missing")
        return "; ".join(parts) + "."

    def rows(self) -> list[dict[str, object]]:
        """One row for each block that was trained on."""
        rows: list[dict[str, object]] = []
        for serial, fate in sorted(self.trained.items()):
            of_pass, number = divmod(serial, self.blocks)
            rows.append(
                {
                    "pass": of_pass,
                    "block": number,
                    "learner": fate.learner,
                    "incarnation": fate.incarnation,
                    "time": fate.time,
                    "localSteps": [fate.begin + 1, fate.end],
                    "merges": sorted(set(fate.merges)),
                }
            )
        return rows


def _size(spans: Iterable[Span]) -> int:
    return sum(span.count for span in spans)


def _serials(spans: Iterable[Span]) -> Iterator[int]:
    for span in spans:
        yield from range(span.first, span.first + min(span.count, MAX_SERIALS))


def _add(fate: Fate, step: int) -> None:
    if len(fate.merges) < MAX_MERGES:
        fate.merges.append(step)


def of_line(book: BlockBook, record: object, event: Mapping[str, object]) -> Iterator[str]:
    """Violations of a line that may be about blocks."""
    found: Iterator[str] = iter(())
    match record:
        case Start():
            book.started(record)
        case Dropped() if record.torn or not _KINDS.isdisjoint(record.events):
            book.unsure = True
        case Data():
            found = book.data(record)
        case Merge() if book.blocks:
            book.merge(record)
        case Lease() | Release() | Trained() if not book.blocks:
            if not book.unsure:
                yield f"of {record.learner} is about blocks of a dataset that no line states"
        case Lease():
            found = book.lease(record)
        case Release():
            found = book.release(record)
        case Trained():
            found = book.train(record, str(event.get("time", "")))
    for sentence in found:
        if not book.unsure:
            yield sentence
