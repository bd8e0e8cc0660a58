"""
Proves from events.jsonl alone that a run merged only what it may.

Pure: lines in, violations out. Checked for every line, from the oldest part on:

    a report, which is (learner, incarnation, t_m), is merged at most once, into whatever fragment, in
    all epochs together: a syncer that resumes replays what its predecessor merged
    per learner, incarnation and fragment the merged t_m strictly increases
    once a learner's next incarnation joined, none of its earlier ones is merged or joins again
    each weight is tokens² / steps, and 0 where either is 0; with a guard and 3 members or more,
        tokens per step count at most RATE_MULTIPLE times their median
    the norm that arrived of each member is the one that its header stated
    with a guard, a delta beyond its multiple of the median is clipped, and no merged delta is longer
        than the weighted mean of its members'
    a learner that joins is one of the spec; none claims several times the steps of the others
        with a delta that is empty, which that of buffers may be
    no merge has fewer members than the quorum it states
    within an epoch the global step of merges strictly increases, and the fragment is the one due
    epochs never decrease
    torn lines only where a syncer was killed: directly before the first line of an epoch, one for each
        epoch that ended there, and one at the end, besides those that the file states
    no part is missing between two others
    a process takes the optimizers' state of a learner that had joined

Torn lines that a kill or the disk explains are notes, everything else is a violation. What the file states
not to contain, older parts that were deleted and lines that a disk did not take, is `unseen`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.journal import reader, records
from diloco.journal.block_audit import BlockBook, of_line
from diloco.journal.records import (
    Complete,
    Data,
    Dropped,
    Join,
    Lease,
    Limits,
    Merge,
    MergeMember,
    Recovery,
    Release,
    Restart,
    Rotate,
    Start,
    Trained,
)
from diloco.journal.recoveries import RecoveryBook
from diloco.model.fragments import due

WEIGHT_TOLERANCE = 1e-9

RATE_MULTIPLE = 2.1
GUARDED_MEMBERS = 3
NORM_FLOOR = 1e-12
NORM_TOLERANCE = 1e-3
"""As in syncer/diloco_syncer/core: written again, so that an error there is found here."""

CLAIMED_MULTIPLE = 4.0
"""Steps that a member with an empty delta may claim, as a multiple of the members' median."""

_CHECKED = {Start.kind, Limits.kind, Join.kind, Merge.kind, Rotate.kind, Dropped.kind}
_CHECKED |= {Data.kind, Lease.kind, Release.kind, Trained.kind, Recovery.kind, Complete.kind}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Violations, and how much was checked."""

    violations: tuple[str, ...]
    """One sentence each, with the line number; empty when every promise was kept."""
    notes: tuple[str, ...]
    unseen: tuple[str, ...]
    """What could not be checked, one phrase each."""
    events: int
    merges: int
    reports: int
    """Reports that were merged: members summed over all merges."""
    epochs: int
    learners: int
    incarnations: int
    torn_lines: int
    data: str = ""
    """One sentence about the blocks of the data; empty: the job leases none."""
    blocks: tuple[dict[str, object], ...] = ()
    """Of each block that was trained on: learner, local steps, merges."""
    recovery: str = ""
    """One sentence about processes that began after step 0; empty: there were none."""
    recoveries: tuple[Recovery, ...] = ()
    """The newest of them, in their order."""

    @property
    def ok(self) -> bool:
        """No violation."""
        return not self.violations

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        seen = (
            f"{_count(self.merges, 'merge')} of {_count(self.reports, 'report')} from "
            f"{_count(self.learners, 'learner')} in {_count(self.incarnations, 'incarnation')}, "
            f"{_count(self.epochs, 'syncer epoch')}"
        )
        missing = f" Not checked: {'; '.join(self.unseen)}." if self.unseen else ""
        if self.ok:
            return (
                f"Passed: {seen}; no report was merged twice, no merge was below the quorum, every "
                f"weight is tokens²/steps, and every fragment kept its schedule.{missing}"
            )
        return f"Failed: {_count(len(self.violations), 'violation')} in {seen}.{missing}"


def audit(lines: Iterable[str]) -> Audit:
    """Check all lines of an events.jsonl that has one part, as `audit_parts` does."""
    return audit_parts((f"line {number}", line) for number, line in enumerate(lines, 1))


def audit_parts(lines: Iterable[tuple[str, str]]) -> Audit:
    """
    Check all lines of an events.jsonl; unknown events and fields are ignored, a required field that is
    missing is a violation.

    Args:
        lines: of all parts, the oldest first, each with its place for messages (`reader.lines`).
    """
    book = _Book()
    torn: list[str] = []
    last = ""
    for place, line in lines:
        if not line.strip():
            continue
        last = place
        event = reader.parse(line)
        if event is None:
            torn.append(place)
            book.pending += 1
        else:
            book.check(place, event)
    allowed = book.explained + book.cut + (1 if torn and torn[-1] == last else 0)
    violations = list(book.violations)
    notes = [*book.result, *(f"{place} is torn" for place in torn)]
    if len(torn) > allowed:
        violations.append(
            f"{_count(len(torn), 'line')} cannot be read ({', '.join(torn[:8])}), but "
            f"kills of the syncer explain only {allowed}: events are missing"
        )
    return Audit(
        violations=tuple(violations),
        notes=tuple(notes),
        unseen=book.unseen(),
        events=book.events,
        merges=book.merges,
        reports=book.reports,
        epochs=len(book.epochs),
        learners=len({learner for learner, _ in book.incarnations}),
        incarnations=len(book.incarnations),
        torn_lines=len(torn),
        data=book.data.sentence(),
        blocks=tuple(book.data.rows()),
        recovery=book.recoveries.sentence(),
        recoveries=tuple(book.recoveries.newest.values()),
    )


@dataclass(slots=True, kw_only=True)
class _Book:
    """State after the lines so far; `check` takes the next line."""

    violations: list[str] = field(default_factory=list)
    epochs: set[int] = field(default_factory=set)
    incarnations: set[tuple[str, int]] = field(default_factory=set)
    events: int = 0
    merges: int = 0
    reports: int = 0
    epoch: int = 0
    learners: Mapping[str, int] | None = None
    """Region → learners of the spec, of the last start or change."""
    schedule: tuple[int, int] | None = None
    """(P, H) of the last start."""
    merged_step: dict[int, int] = field(default_factory=dict)
    """epoch → global step of its last merge."""
    newest: dict[str, int] = field(default_factory=dict)
    """learner → largest incarnation that joined."""
    used: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """(learner, incarnation, fragment) → t_m of the report that was merged last."""
    reports_merged: dict[tuple[str, int], dict[int, tuple[int, int]]] = field(default_factory=dict)
    """(learner, incarnation) → t_m → (global step, fragment) of the merge that the report is part of."""

    part: int = 1
    deleted: int = 0
    """Parts before the first line."""
    dropped: Counter[str] = field(default_factory=Counter)
    """event → lines of it that were not written."""
    cut: int = 0
    """Lines that may be torn because the disk took a part of them, or could not make them durable."""
    pending: int = 0
    """Torn lines since the last line of an epoch."""
    explained: int = 0
    """Torn lines at which a syncer was killed."""
    restarts: int = 0
    result: tuple[str, ...] = ()
    """A sentence if the last completion was without a change of the parameters."""
    data: BlockBook = field(default_factory=BlockBook)
    recoveries: RecoveryBook = field(default_factory=RecoveryBook)

    def unseen(self) -> tuple[str, ...]:
        found = []
        if self.deleted:
            found.append(f"{_count(self.deleted, 'older part')} that rotation deleted")
        if self.dropped:
            kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.dropped.items()))
            found.append(f"lines that the disk did not take ({kinds})")
        if self.cut:
            found.append(f"{_count(self.cut, 'line')} that the disk may have kept only in part")
        return tuple(found)

    def check(self, place: str, event: Mapping[str, Any]) -> None:
        self.events += 1
        try:
            found = list(self._findings(event))
        except records.RecordError as error:
            found = [f"{event.get('event') or 'event'} {error}"]
        self.violations += [f"{place}: {sentence}" for sentence in found]

    def _findings(self, event: Mapping[str, Any]) -> Iterator[str]:
        kind = records.value(event, "event", str) if "event" in event else ""
        # A restart is written by the supervisor, which may not know the newest epoch yet.
        if kind == Restart.kind:
            self.restarts += 1
        elif "epoch" in event:
            yield from self._epoch(records.value(event, "epoch", int))
        record = records.decode(event) if kind in _CHECKED else None
        yield from of_line(self.data, record, event)
        match record:
            case Start() as start:
                yield from self._start(start)
            case Limits() as limits:
                self.learners = limits.learners
            case Join() as join:
                yield from self._join(join.learner, join.incarnation)
            case Recovery() as recovery:
                complete = not self.deleted and not self.dropped[Join.kind]
                yield from self.recoveries.add(recovery, self.incarnations, complete=complete)
            case Rotate() as rotate:
                yield from self._rotate(rotate)
            case Dropped() as dropped:
                self.dropped.update(dropped.events)
                self.cut += max(0, dropped.torn or 0)
                if Limits.kind in dropped.events or Start.kind in dropped.events:
                    self.learners = None  # who may join is not known until the next line
            case Complete() as ended:
                sentence = f"no merge changed a parameter: the model of step {ended.step} is that of step 0"
                self.result = (sentence,) if ended.unchanged else ()
            case Merge() as merge:
                yield from self._merge(merge, records.value(event, "epoch", int))

    def _epoch(self, epoch: int) -> Iterator[str]:
        if epoch < self.epoch:
            yield f"epoch {epoch} comes after epoch {self.epoch}"
        # Each epoch ends with at most one torn line, also one of which a crash left no other line. Of a
        # syncer whose machine crashed at its start, the line `start` itself may be torn.
        self.explained += min(self.pending, max(0, epoch - max(1, self.epoch)))
        self.pending = 0
        self.epoch = max(self.epoch, epoch)
        self.epochs.add(epoch)

    def _rotate(self, rotate: Rotate) -> Iterator[str]:
        if self.events == 1 + self.restarts:  # the supervisor may be first when a part begins
            self.deleted = max(0, rotate.part - 1)
            self.data.unsure = self.deleted > 0
        elif rotate.part != self.part + 1:
            yield f"part {rotate.part} begins after part {self.part}: lines are missing or counted twice"
        self.part = max(self.part, rotate.part)
        if self.schedule is None and rotate.fragments > 0 < rotate.interval:
            self.schedule = rotate.fragments, rotate.interval

    def _start(self, start: Start) -> Iterator[str]:
        if min(start.fragments, start.interval) < 1:
            raise records.RecordError("has a schedule without fragments or steps")
        self.learners = start.learners
        schedule = start.fragments, start.interval
        if self.schedule is not None and schedule != self.schedule:
            yield (
                f"the schedule became {schedule[0]} fragments every {schedule[1]} steps; it was "
                f"{self.schedule[0]} every {self.schedule[1]}"
            )
        self.schedule = schedule

    def _join(self, learner: str, incarnation: int) -> Iterator[str]:
        if not _in_spec(learner, self.learners):
            yield f"{learner} joined, but is not one of the learners of the spec"
        newest = self.newest.get(learner, incarnation)
        if incarnation < newest:
            yield f"incarnation {incarnation} of {learner} joined after its successor {newest}"
        self.newest[learner] = max(newest, incarnation)
        self.incarnations.add((learner, incarnation))

    def _merge(self, merge: Merge, epoch: int) -> Iterator[str]:
        self.merges += 1
        yield from self._place(epoch, merge.step, merge.fragment)
        distinct = {member.learner for member in merge.members}
        if merge.quorum < 1 or len(distinct) < merge.quorum:
            yield (
                f"merge of step {merge.step} has {_count(len(distinct), 'learner')}, its quorum is "
                f"{merge.quorum}"
            )
        limit = _weight_limit(merge)
        for member in merge.members:
            self.reports += 1
            yield from self._member(member, merge.step, merge.fragment)
            yield from _work(member, merge, limit)
        yield from _length(merge)
        yield from _empty(merge)

    def _place(self, epoch: int, step: int, fragment: int) -> Iterator[str]:
        before = self.merged_step.get(epoch)
        if before is not None and step <= before:
            yield f"merge of step {step} comes after that of step {before} in epoch {epoch}"
        self.merged_step[epoch] = step
        if self.schedule is None:
            if self.deleted or self.dropped[Start.kind]:
                return
            yield f"merge of step {step} comes before any start: its schedule cannot be checked"
            return
        fragments, interval = self.schedule
        expected = due(step, num_fragments=fragments, interval=interval)
        if fragment != expected:
            what = "no fragment" if expected is None else f"fragment {expected}"
            yield f"merge of step {step} is of fragment {fragment}, but {what} is due"

    def _member(self, member: MergeMember, step: int, fragment: int) -> Iterator[str]:
        learner, incarnation = member.learner, member.incarnation
        who = f"merge of step {step}: {learner} (incarnation {incarnation})"
        self.incarnations.add((learner, incarnation))
        newest = self.newest.get(learner)
        if newest is not None and incarnation < newest:
            yield f"{who} was merged after its successor {newest} joined"
        local_step = member.step
        key = (learner, incarnation, fragment)
        before = self.used.get(key, local_step)
        merged = self.reports_merged.setdefault((learner, incarnation), {})
        if (first := merged.get(local_step)) is not None:
            yield (
                f"{who}: its report of local step {local_step}, fragment {fragment}, counts twice: "
                f"it is in the merge of step {first[0]}, fragment {first[1]}"
            )
        elif local_step < before:
            yield (
                f"{who}: its report of local step {local_step}, fragment {fragment}, is older "
                f"than that of {before}, merged before"
            )
        self.used[key] = max(local_step, before)
        merged.setdefault(local_step, (step, fragment))


def _in_spec(learner: str, learners: Mapping[str, int] | None) -> bool:
    region, _, index = learner.partition("/")
    return learners is None or (index.isdecimal() and int(index) < learners.get(region, 0))


def _weight_limit(merge: Merge) -> float:
    """The most weight per step of a member."""
    rates = sorted(m.tokens / m.steps for m in merge.members if m.steps > 0 < m.tokens)
    if not merge.guard or len(rates) < GUARDED_MEMBERS:
        return math.inf
    return (RATE_MULTIPLE * rates[(len(rates) - 1) // 2]) ** 2


def _work(member: MergeMember, merge: Merge, limit: float) -> Iterator[str]:
    """Weight and norm of one member."""
    who = f"merge of step {merge.step}: {member.learner} (incarnation {member.incarnation})"
    steps, tokens, weight = member.steps, member.tokens, member.weight
    positive = steps > 0 < tokens
    expected = min(tokens * tokens / steps, limit * steps) if positive else 0.0
    if not math.isclose(weight, expected, rel_tol=WEIGHT_TOLERANCE):
        yield (
            f"{who} has weight {weight:.12g}, expected {expected:.12g} for {tokens:g} tokens "
            f"in {steps:g} steps beside the other members"
        )
    if (member.deviation or 0.0) > NORM_TOLERANCE:
        yield (
            f"{who} stated a norm that differs by {member.deviation:.3g} of it from what arrived, "
            f"more than the allowed {NORM_TOLERANCE:g}"
        )
    beyond = bool(merge.guard) and (member.of_median or 0.0) > (merge.guard or 0.0)
    if beyond != bool(member.clipped):
        yield (
            f"{who} has a delta of {member.of_median or 0.0:.3g} times the median and "
            f"{_count(member.clipped or 0, 'clipped tensor')}, the guard is {merge.guard or 0.0:g}"
        )


def _length(merge: Merge) -> Iterator[str]:
    """Whichever way deltas are merged, the result is no longer than their weighted mean length."""
    total = math.fsum(m.weight for m in merge.members)
    norms = [m.norm for m in merge.members if m.norm is not None]
    if total <= 0 or len(norms) < len(merge.members) or not math.isfinite(merge.delta_norm):
        return
    most = math.fsum(m.weight / total * (m.norm or 0.0) for m in merge.members)
    if merge.delta_norm > most * (1 + 2 * NORM_TOLERANCE) + 1e-12:
        yield (
            f"merge of step {merge.step} has a delta of norm {merge.delta_norm:.6g}, its members' "
            f"weighted mean is {most:.6g}"
        )


def _empty(merge: Merge) -> Iterator[str]:
    """Steps that a learner made leave a delta; one that only claims them sets the pace of the job."""
    steps = sorted(m.steps for m in merge.members)
    if len(steps) < GUARDED_MEMBERS or merge.buffers:
        return
    usual = steps[(len(steps) - 1) // 2]
    for member in merge.members:
        empty = member.norm is not None and member.norm <= NORM_FLOOR
        if member.weight > 0 and empty and member.steps > CLAIMED_MULTIPLE * usual:
            yield (
                f"merge of step {merge.step}: {member.learner} claims {member.steps:g} steps, the "
                f"others {usual:g}, and its delta is empty"
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else noun + 's'}"
