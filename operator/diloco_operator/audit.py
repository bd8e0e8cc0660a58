"""
Proof from events.jsonl alone that a run kept its promises.

Pure: lines in, findings out. What is checked, for every line of the file from the top:

    per learner, incarnation and fragment the merged t_m strictly increases: no report counts twice
    once a learner's next incarnation joined, none of its earlier ones is merged or joins again
    each weight is tokens² / steps, and 0 where either is 0
    no merge has fewer members than the quorum it states
    within an epoch the global step of merges strictly increases, and the fragment is the one due
    epochs never decrease
    at most one torn line per change of epoch (a syncer that was killed), and one at the end

Torn lines that a kill explains are notes, everything else that is found is a violation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.fragments import due

WEIGHT_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found and how much was looked at."""

    violations: tuple[str, ...]
    """One sentence each, with the line number; empty when every promise was kept."""
    notes: tuple[str, ...]
    events: int
    merges: int
    reports: int
    """Reports that were merged: members summed over all merges."""
    epochs: int
    learners: int
    incarnations: int
    torn_lines: int

    @property
    def ok(self) -> bool:
        """No violation."""
        return not self.violations

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        seen = (
            f"{_count(self.merges, 'merge')} of {_count(self.reports, 'report')} from "
            f"{_count(self.learners, 'learner')} in {_count(self.incarnations, 'life', 'lives')}, "
            f"{_count(self.epochs, 'syncer epoch')}"
        )
        if self.ok:
            return (
                f"Kept: {seen}; no report merged twice, no merge below quorum, every weight "
                "tokens²/steps, every schedule kept."
            )
        return f"Broken: {_count(len(self.violations), 'violation')} in {seen}."


def audit(lines: Iterable[str]) -> Audit:
    """
    Check all lines of an events.jsonl.

    Fields that are not known are ignored; a field that is needed and missing is a violation.
    """
    book = _Book()
    torn: list[int] = []
    last = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        last = number
        event = _parse(line)
        if event is None:
            torn.append(number)
        else:
            book.check(number, event)
    changes = max(0, len(book.epochs) - 1)
    allowed = changes + (1 if torn and torn[-1] == last else 0)
    violations = list(book.violations)
    notes = [f"line {number} is torn" for number in torn]
    if len(torn) > allowed:
        violations.append(
            f"{_count(len(torn), 'line')} ({', '.join(map(str, torn[:8]))}) cannot be read, kills "
            f"of the syncer explain {allowed}: events are missing"
        )
    return Audit(
        violations=tuple(violations),
        notes=tuple(notes),
        events=book.events,
        merges=book.merges,
        reports=book.reports,
        epochs=len(book.epochs),
        learners=len({learner for learner, _ in book.lives}),
        incarnations=len(book.lives),
        torn_lines=len(torn),
    )


class _MissingError(Exception):
    """A field that a check needs is not there or not of its kind."""


@dataclass(slots=True, kw_only=True)
class _Book:
    """What the lines so far say; `check` takes the next one."""

    violations: list[str] = field(default_factory=list)
    epochs: set[int] = field(default_factory=set)
    lives: set[tuple[str, int]] = field(default_factory=set)
    events: int = 0
    merges: int = 0
    reports: int = 0
    epoch: int = 0
    schedule: tuple[int, int] | None = None
    """(P, H) as the last start said."""
    merged_step: dict[int, int] = field(default_factory=dict)
    """epoch → global step of its last merge."""
    newest: dict[str, int] = field(default_factory=dict)
    """learner → largest incarnation that joined."""
    used: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """(learner, incarnation, fragment) → t_m of the report that was merged last."""

    def check(self, number: int, event: Mapping[str, Any]) -> None:
        self.events += 1
        kind = event.get("event")
        try:
            found = list(self._findings(kind, event))
        except _MissingError as error:
            found = [f"{kind or 'event'} {error}"]
        self.violations += [f"line {number}: {sentence}" for sentence in found]

    def _findings(self, kind: object, event: Mapping[str, Any]) -> Iterator[str]:
        # A restart is written by the supervisor, which may not have heard of the newest epoch.
        if kind != "restart" and "epoch" in event:
            yield from self._epoch(_whole(event, "epoch"))
        if kind == "start":
            yield from self._start(event)
        elif kind == "join":
            yield from self._join(_text(event, "learner"), _whole(event, "incarnation"))
        elif kind == "merge":
            yield from self._merge(event)

    def _epoch(self, epoch: int) -> Iterator[str]:
        if epoch < self.epoch:
            yield f"epoch {epoch} comes after epoch {self.epoch}"
        self.epoch = max(self.epoch, epoch)
        self.epochs.add(epoch)

    def _start(self, event: Mapping[str, Any]) -> Iterator[str]:
        told = _whole(event, "fragments"), _whole(event, "interval")
        if self.schedule is not None and told != self.schedule:
            yield (
                f"the schedule became {told[0]} fragments every {told[1]} steps, it was "
                f"{self.schedule[0]} every {self.schedule[1]}"
            )
        self.schedule = told

    def _join(self, learner: str, incarnation: int) -> Iterator[str]:
        newest = self.newest.get(learner, 0)
        if incarnation < newest:
            yield f"incarnation {incarnation} of {learner} joined after its successor {newest}"
        self.newest[learner] = max(newest, incarnation)
        self.lives.add((learner, incarnation))

    def _merge(self, event: Mapping[str, Any]) -> Iterator[str]:
        self.merges += 1
        step, fragment = _whole(event, "step"), _whole(event, "fragment")
        epoch = _whole(event, "epoch")
        yield from self._place(epoch, step, fragment)
        members = event.get("members")
        if not isinstance(members, list) or not all(isinstance(m, dict) for m in members):
            raise _MissingError("has no list of members")
        distinct = {_text(member, "learner") for member in members}
        quorum = _whole(event, "quorum")
        if quorum < 1 or len(distinct) < quorum:
            yield (
                f"merge of step {step} has {_count(len(distinct), 'learner')}, its quorum is "
                f"{quorum}"
            )
        for member in members:
            self.reports += 1
            yield from self._member(member, step, fragment)

    def _place(self, epoch: int, step: int, fragment: int) -> Iterator[str]:
        before = self.merged_step.get(epoch)
        if before is not None and step <= before:
            yield f"merge of step {step} comes after that of step {before} in epoch {epoch}"
        self.merged_step[epoch] = step
        if self.schedule is None:
            yield f"merge of step {step} comes before any start: its schedule cannot be checked"
            return
        fragments, interval = self.schedule
        expected = due(step, num_fragments=fragments, interval=interval)
        if fragment != expected:
            what = "none" if expected is None else f"fragment {expected}"
            yield f"merge of step {step} is of fragment {fragment}, due is {what}"

    def _member(self, member: Mapping[str, Any], step: int, fragment: int) -> Iterator[str]:
        learner, incarnation = _text(member, "learner"), _whole(member, "incarnation")
        who = f"merge of step {step}: {learner} (incarnation {incarnation})"
        self.lives.add((learner, incarnation))
        newest = self.newest.get(learner)
        if newest is not None and incarnation < newest:
            yield f"{who} was merged after its successor {newest} joined"
        local_step = _whole(member, "step")
        key = (learner, incarnation, fragment)
        before = self.used.get(key)
        if before is not None and local_step == before:
            yield f"{who}: its report of local step {local_step}, fragment {fragment}, counts twice"
        elif before is not None and local_step < before:
            yield (
                f"{who}: its report of local step {local_step}, fragment {fragment}, is older "
                f"than that of {before}, merged before"
            )
        self.used[key] = max(local_step, before or 0)
        steps, tokens = _number(member, "steps"), _number(member, "tokens")
        weight = _number(member, "weight")
        expected = tokens * tokens / steps if steps > 0 and tokens > 0 else 0.0
        if not math.isclose(weight, expected, rel_tol=WEIGHT_TOLERANCE):
            yield (
                f"{who} has weight {weight:.12g}, expected {expected:.12g} for {tokens:g} tokens "
                f"in {steps:g} steps"
            )


def _parse(line: str) -> Mapping[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _number(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _MissingError(f"has {name} {value!r}, expected a number")
    return value


def _whole(event: Mapping[str, Any], name: str) -> int:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _MissingError(f"has {name} {value!r}, expected a whole number")
    return value


def _text(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    if not isinstance(value, str):
        raise _MissingError(f"has {name} {value!r}, expected a text")
    return value


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
