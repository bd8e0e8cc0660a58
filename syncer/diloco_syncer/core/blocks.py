"""
Which learner trains on which block of the data. Pure.

The items of a dataset are cut into blocks of equal size. A pass over all of them follows the other, so a
block has a serial number in the run: pass × blocks + its number in the dataset. Each serial is free, open
at exactly one learner, or trained; nothing else is kept, so the state grows with the open ones only.

The lowest free serial is leased first. A serial is leased only while every one that is a whole pass older
is trained, so no block is open at two learners, not even in two passes.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_syncer.core.events import BlocksStated, Decision, LeaseBlocks, Log, TrainedBlock

HOLD_SECONDS = 30.0
"""A learner whose connection broke keeps its open blocks for this long, and then for the other learners."""

IDLE_SECONDS = 120.0
"""A connected learner that makes no steps keeps its open blocks for this long once the others wait for them."""

BLOCK_SECONDS = 300.0
"""The same of one that steps, and ends no block; doubled each time that this happens, up to MOST_BLOCK_SECONDS."""

MOST_BLOCK_SECONDS = 64 * BLOCK_SECONDS
"""
So that a learner that never ends one does not hold up the others for days at the end of a later pass. A block that
takes longer is leased again while it is trained on, once others wait.
"""

MAX_ADOPTED = 1 << 20
"""A learner that returns may have what is less than so many serials after the oldest one that is not trained."""

INTERRUPTED = frozenset({"StreamEnded", "HeartbeatLate", "Unavailable"})
"""Reasons for which a session ends while its learner may continue to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """As the first learner stated it."""

    items: int
    size: int
    """Items of a block; the last one may have fewer."""
    stated_by: str

    @property
    def blocks(self) -> int:
        """Number of blocks, at least 1."""
        return -(-self.items // self.size)


class FreeSerials:
    """
    A set of whole numbers without an upper end, as sorted gaps and a number from which on all belong to it.

    Args:
        gaps: (first, end) of each, sorted, not adjacent.
        rest: larger than each.
    """

    def __init__(self, gaps: Iterable[tuple[int, int]] = (), rest: int = 0) -> None:
        self._spans = [(first, end) for first, end in gaps]
        self.rest = rest

    @property
    def lowest(self) -> int:
        """The smallest of them."""
        return self._spans[0][0] if self._spans else self.rest

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of what is below `rest`."""
        return tuple(self._spans)

    def __contains__(self, serial: int) -> bool:
        at = bisect_right(self._spans, (serial, math.inf)) - 1
        return serial >= self.rest or (at >= 0 and serial < self._spans[at][1])

    def remove(self, serial: int) -> None:
        """Take one that is in the set."""
        if serial >= self.rest:
            if serial > self.rest:
                self._spans.append((self.rest, serial))
            self.rest = serial + 1
            return
        at = bisect_right(self._spans, (serial, math.inf)) - 1
        first, end = self._spans[at]
        parts = [(first, serial), (serial + 1, end)]
        self._spans[at : at + 1] = [(a, b) for a, b in parts if a < b]

    def add(self, serial: int) -> None:
        """Put one back that is not in the set, and is below `rest`."""
        at = bisect_right(self._spans, (serial, serial))
        first, end = serial, serial + 1
        if at < len(self._spans) and self._spans[at][0] == end:
            end = self._spans.pop(at)[1]
        if at > 0 and self._spans[at - 1][1] == first:
            at -= 1
            first = self._spans.pop(at)[0]
        if end == self.rest:
            self.rest = first
            return
        self._spans.insert(at, (first, end))


@dataclass(slots=True, kw_only=True)
class Holder:
    """A learner that takes part."""

    incarnation: int
    open: list[int] = field(default_factory=list)
    """In the order in which they were leased."""
    session: int | None = None
    """That stated the dataset; None: it is not connected, or has not yet."""
    wanted: int = 0
    """How many it wants open; only while it is connected."""
    lost_at: float | None = None
    """Since when it is not connected; None: it is, or its blocks were found in a snapshot."""
    ended_at: float = 0.0
    """When it last ended a block, or was leased one; to state the same again, in whatever session, is neither."""
    stepped_at: float = 0.0
    """The same, or when it last made a step."""
    refused: bool = False
    """Of this session, a block was refused and recorded."""


@dataclass(slots=True)
class BlockLedger:
    """The leases of a job. Every call is of the current incarnation and session of a learner."""

    dataset: Dataset | None = None
    free: FreeSerials = field(default_factory=FreeSerials)
    holders: dict[str, Holder] = field(default_factory=dict)
    patience: float = BLOCK_SECONDS
    # What follows from the holders, so that an event costs the same however many there are.
    _holder_of: dict[int, str] = field(default_factory=dict)
    """Of each open serial."""
    _opened: list[int] = field(default_factory=list)
    """A heap of the open serials, and of some that no longer are."""
    _absent: set[str] = field(default_factory=set)
    """Holders that are not connected, or have not stated anything yet."""
    _wanting: set[str] = field(default_factory=set)
    """Holders that have fewer than they want."""
    _changed: dict[str, None] = field(default_factory=dict)
    """Learners that must be sent what is open."""

    # ------------------------------------------------------------ events

    def conflict(self, event: BlocksStated) -> str:
        """Why this learner cannot take part; empty: it can."""
        known = self.dataset
        if known is None or (known.items, known.size) == (event.items, event.size):
            return ""
        return (
            f"{event.learner} states a dataset of {event.items} items in blocks of {event.size}, "
            f"expected {known.items} items in blocks of {known.size} as {known.stated_by} stated first; "
            "give all learners the same dataset, or begin another run"
        )

    def stated(self, event: BlocksStated, *, incarnation: int, now: float) -> list[Decision]:
        """A learner states its dataset, what it has trained on, and what is open there."""
        out: list[Decision] = []
        if self.dataset is None:
            self.dataset = Dataset(items=event.items, size=event.size, stated_by=event.learner)
            out += data_line(self.to_json())
        holder = self.holders.setdefault(event.learner, Holder(incarnation=incarnation))
        if holder.incarnation != incarnation:
            out += self.release(event.learner, "Replaced")
            holder = self.holders[event.learner] = Holder(incarnation=incarnation)
        if not holder.open or (holder.session is None and holder.lost_at is None):
            # It had nothing, or a snapshot does not show since when.
            holder.ended_at = holder.stepped_at = now
        if holder.session != event.session:
            # What it has from an earlier session counts, unless another learner has it meanwhile.
            claimed = [*(block.serial for block in event.trained), *event.open]
            out += self._adopt(event.learner, holder, claimed)
            holder.session, holder.lost_at, holder.refused = event.session, None, False
            self._absent.discard(event.learner)
        had = len(holder.open)
        out += self._trained(event.learner, holder, event.trained)
        if len(holder.open) < had:
            holder.ended_at = holder.stepped_at = now
        holder.wanted = event.wanted
        self._changed[event.learner] = None
        self._want(event.learner, holder)
        return out

    def stepped(self, learner: str, now: float) -> None:
        """A learner made a step."""
        holder = self.holders.get(learner)
        if holder is not None:
            holder.stepped_at = now

    def left(self, learner: str, reason: str, now: float) -> list[Decision]:
        """Its session ended."""
        holder = self.holders.get(learner)
        if holder is None:
            return []
        holder.session, holder.wanted, holder.lost_at = None, 0, now
        self._absent.add(learner)
        self._wanting.discard(learner)
        return [] if reason in INTERRUPTED else self.release(learner, reason)

    def joined(self, learner: str, incarnation: int) -> list[Decision]:
        """A learner joined; a new process has nothing of what the one before had open."""
        holder = self.holders.get(learner)
        if holder is None or holder.incarnation == incarnation:
            return []
        return self.release(learner, "Replaced")

    def release(self, learner: str, reason: str) -> list[Decision]:
        """What the learner has open is leased again."""
        holder = self.holders.pop(learner)
        self._absent.discard(learner)
        self._wanting.discard(learner)
        for serial in holder.open:
            del self._holder_of[serial]
            self.free.add(serial)
        return (
            [_log("release", learner, holder, blocks=spans(holder.open), reason=reason)]
            if holder.open
            else []
        )

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused for this long."""
        for holder in self.holders.values():
            holder.ended_at += seconds
            holder.stepped_at += seconds
            if holder.lost_at is not None:
                holder.lost_at += seconds

    def advance(self, now: float) -> list[Decision]:
        """Release what is overdue, lease what is wanted, and send every change."""
        out: list[Decision] = []
        for learner in sorted(self._absent):
            holder = self.holders[learner]
            if holder.lost_at is None:
                holder.lost_at = holder.ended_at = holder.stepped_at = now  # found in a snapshot
            elif now - holder.lost_at >= HOLD_SECONDS:
                out += self.release(learner, "Overdue")
        leased: dict[str, list[int]] = {}
        while self._wanting:
            serial = self.free.lowest
            if not self._allowed(serial):
                if not (overdue := self._overdue(now)):
                    break
                out += overdue
                continue
            learner = min(self._wanting, key=lambda name: (len(self.holders[name].open), name))
            holder = self.holders[learner]
            self._open(learner, holder, serial)
            holder.ended_at = holder.stepped_at = now
            self._changed[learner] = None
            leased.setdefault(learner, []).append(serial)
        for learner, serials in leased.items():
            out.append(_log("lease", learner, self.holders[learner], blocks=spans(serials)))
        for learner in self._changed:
            known = self.holders.get(learner)
            out.append(LeaseBlocks(learner=learner, serials=tuple(known.open) if known else ()))
        self._changed.clear()
        return out

    # ------------------------------------------------------------ parts

    def _overdue(self, now: float) -> list[Decision]:
        """Others wait for the oldest block: release what its holder has, if that may not come to an end."""
        learner = self._holder_of[self.oldest]
        holder = self.holders[learner]
        if holder.session is None:
            return []  # see HOLD_SECONDS
        if now - holder.stepped_at >= IDLE_SECONDS:
            reason = "NoSteps"
        elif now - holder.ended_at >= self.patience:
            reason = "Overdue"
            self.patience = min(2 * self.patience, MOST_BLOCK_SECONDS)
        else:
            return []
        self._changed[learner] = None
        return self.release(learner, reason)

    def _open(self, learner: str, holder: Holder, serial: int) -> None:
        self.free.remove(serial)
        holder.open.append(serial)
        self._holder_of[serial] = learner
        heapq.heappush(self._opened, serial)
        if len(self._opened) > 2 * len(self._holder_of) + 64:
            self._opened = sorted(self._holder_of)  # else it grows while one block stays open
        self._want(learner, holder)

    def _want(self, learner: str, holder: Holder) -> None:
        if len(holder.open) < holder.wanted:
            self._wanting.add(learner)
        else:
            self._wanting.discard(learner)

    def _allowed(self, serial: int) -> bool:
        return self.dataset is not None and serial < self.oldest + self.dataset.blocks

    @property
    def oldest(self) -> int:
        """The smallest serial that is not trained."""
        while self._opened and self._opened[0] not in self._holder_of:
            heapq.heappop(self._opened)
        return min([self.free.lowest, *self._opened[:1]])

    def _adopt(self, learner: str, holder: Holder, claimed: Iterable[int]) -> list[Decision]:
        adopted = []
        for serial in claimed:
            if serial in self.free and self._allowed(serial) and serial < self.oldest + MAX_ADOPTED:
                self._open(learner, holder, serial)
                adopted.append(serial)
        return [_log("lease", learner, holder, blocks=spans(adopted))] if adopted else []

    def _trained(
        self, learner: str, holder: Holder, trained: Iterable[TrainedBlock]
    ) -> list[Decision]:
        counted, refused = [], []
        for block in trained:
            if self._holder_of.get(block.serial) == learner:
                holder.open.remove(block.serial)
                del self._holder_of[block.serial]
                counted.append({"block": block.serial, "begin": block.begin, "end": block.end})
            elif block.serial in self._holder_of or block.serial in self.free:
                refused.append(block.serial)
            # Else it counts already: the statement crossed the leases that show it.
        out: list[Decision] = [_log("trained", learner, holder, blocks=counted)] if counted else []
        if refused and not holder.refused:
            holder.refused = True
            detail = (
                f"trained on {self._named(refused[0])}, which is not leased to it; it does not count. "
                "No more are recorded in this session"
            )
            out.append(
                Log(
                    event="refuse",
                    fields={"learner": learner, "reason": "Protocol", "detail": detail},
                )
            )
        return out

    def _named(self, serial: int) -> str:
        if self.dataset is None:
            return f"block {serial}"
        of_pass, number = divmod(serial, self.dataset.blocks)
        return f"block {number} of pass {of_pass}"

    # ------------------------------------------------------------ state that outlives the process

    def to_json(self) -> dict[str, Any] | None:
        """For a snapshot; None: no learner has stated a dataset."""
        if self.dataset is None:
            return None
        held = {
            name: {"incarnation": holder.incarnation, "open": [*holder.open]}
            for name, holder in self.holders.items()
            if holder.open
        }
        return {
            "items": self.dataset.items,
            "size": self.dataset.size,
            "statedBy": self.dataset.stated_by,
            "next": self.free.rest,
            "free": [list(gap) for gap in self.free.gaps],
            "held": held,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> BlockLedger:
        """The ledger that `to_json` described; its learners have HOLD_SECONDS from the first event on."""
        if data is None:
            return cls()
        ledger = cls(
            dataset=Dataset(
                items=int(data["items"]), size=int(data["size"]), stated_by=str(data["statedBy"])
            ),
            free=FreeSerials([(int(a), int(b)) for a, b in data["free"]], int(data["next"])),
            holders={
                name: Holder(incarnation=int(h["incarnation"]), open=[int(n) for n in h["open"]])
                for name, h in data["held"].items()
            },
        )
        ledger._absent.update(ledger.holders)
        for name, holder in ledger.holders.items():
            ledger._holder_of.update(dict.fromkeys(holder.open, name))
        ledger._opened = sorted(ledger._holder_of)
        return ledger


def data_line(state: Mapping[str, Any] | None) -> list[Log]:
    """The line `data` of events.jsonl: the state that `to_json` described; none without a dataset."""
    if state is None:
        return []
    fields = {
        "items": state["items"],
        "size": state["size"],
        "learner": state["statedBy"],
        "next": state["next"],
        "free": [{"first": first, "count": end - first} for first, end in state["free"]],
        "open": spans(serial for held in state["held"].values() for serial in held["open"]),
    }
    return [Log(event="data", fields=fields)]


def spans(serials: Iterable[int]) -> list[dict[str, int]]:
    """These serials as runs, for events.jsonl."""
    return [{"first": first, "count": count} for first, count in _runs(sorted(serials))]


def _runs(serials: list[int]) -> Iterator[tuple[int, int]]:
    first = count = 0
    for serial in serials:
        if count and serial == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = serial, 1
    if count:
        yield first, count


def _log(event: str, learner: str, holder: Holder, **fields: object) -> Log:
    return Log(
        event=event, fields={"learner": learner, "incarnation": holder.incarnation, **fields}
    )
