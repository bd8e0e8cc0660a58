"""
What a member is credited follows from its Reports and the header of its upload, as they arrived.

    ReportArrived ─┐
    Received ──────┴─► what is explained ─► compared with the contributions of BeginMerge

An honest learner is credited what it counted: what the header of its upload states, which its Report of
that step states as well; and no more than that if a connection or a paused process delays its
Reports, since a learner that seems to speed up by more than 4 times is limited. One that lies is credited at most
    - as many steps as since the latest local step at which one of its Reports showed the fragment as received,
    - the tokens of its header, and, from its first Report on, 4 times its usual ones for each further step.
Either is credited at most H + 2τ + 2 steps of a round. The syncer's own numbers are not used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import le
from typing import Any

from diloco.spec import RunSpec
from diloco.v1 import bulk_pb2 as bulk
from diloco.v1 import syncer_pb2 as pb
from diloco_sim.checkers.checker import Violation
from diloco_sim.checkers.observations import Received, ReportArrived, Resumed
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import BeginMerge

KEPT = 512
"""Reports of each learner, and headers of all, that are kept: far more than rounds in flight need."""

PACE_LAG = 2
MULTIPLE = 4.0

Counters = tuple[tuple[int, int], ...]
"""Steps and tokens by fragment."""

Upload = tuple[str, int, int, int, int]
"""Learner, incarnation, round, attempt, t_m."""


@dataclass(frozen=True, slots=True)
class _Report:
    """What one Report and those before it allow."""

    local_step: int
    total_tokens: int
    stated: Counters
    received_at: tuple[int, ...]
    """Per fragment, the latest local step at which a Report showed it as received, by steps and tokens."""
    most_tokens: tuple[float, ...]
    """Per fragment, the most c_tokens that are explained."""
    usual: float
    """Tokens per step; infinite: not known yet."""


@dataclass(slots=True)
class _Learner:
    incarnation: int = 0
    usual: float = math.inf
    """Survives incarnations."""
    reports: list[_Report] = field(default_factory=list)

    def add(self, incarnation: int, report: pb.Report) -> None:
        if incarnation < self.incarnation:
            return  # of a session that was replaced
        if incarnation > self.incarnation:
            self.incarnation, self.reports = incarnation, []
        stated = tuple(zip(report.steps, report.tokens, strict=True))
        if not self.reports:
            self.reports.append(self._first(report, stated))
        elif report.local_step > self.reports[-1].local_step:
            self.reports.append(self._next(report, stated, self.reports[-1]))
            del self.reports[:-KEPT]

    def _first(self, report: pb.Report, stated: Counters) -> _Report:
        if math.isinf(self.usual):
            steps, tokens = max(stated, default=(0, 0))
            self.usual = tokens / steps if steps and tokens else math.inf
        return _Report(
            local_step=report.local_step,
            total_tokens=report.total_tokens,
            stated=stated,
            received_at=tuple(report.local_step - steps for steps, _ in stated),
            most_tokens=tuple(min(tokens, self.most(steps)) for steps, tokens in stated),
            usual=self.usual,
        )

    def _next(self, report: pb.Report, stated: Counters, last: _Report) -> _Report:
        gap = report.local_step - last.local_step
        trained = report.total_tokens - last.total_tokens
        received_at = tuple(
            # More tokens than since the last Report: not received in between, whatever the steps.
            before if tokens > trained else max(before, report.local_step - steps)
            for (steps, tokens), before in zip(stated, last.received_at, strict=True)
        )
        more = self.most(gap)
        pairs = zip(stated, last.most_tokens, strict=True)
        most_tokens = tuple(min(tokens, before + more) for (_, tokens), before in pairs)
        self._learn(trained / gap)
        return _Report(
            local_step=report.local_step,
            total_tokens=report.total_tokens,
            stated=stated,
            received_at=received_at,
            most_tokens=most_tokens,
            usual=self.usual,
        )

    def most(self, steps: int) -> float:
        """The most tokens that so many steps add."""
        return most_tokens(self.usual, steps)

    def _learn(self, rate: float) -> None:
        """A moving average, of which one Report raises no more than the multiple."""
        if rate > 0:
            known = math.isfinite(self.usual)
            self.usual = (self.usual + min(rate, MULTIPLE * self.usual)) / 2 if known else rate

    def before(self, local_step: int) -> _Report | None:
        """The newest Report of this step or an earlier one."""
        index = bisect_right(self.reports, local_step, key=lambda report: report.local_step)
        return self.reports[index - 1] if index else None


class Credits:
    """
    Args:
        spec: of the job.
        false: learners whose counters are false at some time.
        delayed: learners whose Reports do not arrive as they are made.
    """

    observes = (Resumed, ReportArrived, Received, BeginMerge)

    def __init__(
        self, spec: RunSpec, *, false: Collection[str] = (), delayed: Collection[str] = ()
    ) -> None:
        self._most_steps = spec.interval + 2 * spec.overlap + PACE_LAG
        self._false, self._delayed = frozenset(false), frozenset(delayed)
        self._learners: dict[str, _Learner] = {}
        self._headers: dict[Upload, bulk.UploadHeader] = {}
        self.compared = 0
        """Contributions."""

    def observe(self, event: Any, now: float) -> None:
        """See `Checker`."""
        match event:
            case Resumed():
                self._learners.clear()
                self._headers.clear()
            case ReportArrived(learner, incarnation, report):
                self._learners.setdefault(learner, _Learner()).add(incarnation, report)
            case Received(header=header):
                if header.content not in (bulk.INITIAL, bulk.CONSTANTS):
                    self._headers[_key(header)] = header
                    if len(self._headers) > KEPT:
                        del self._headers[next(iter(self._headers))]
            case BeginMerge():
                self._merge(event, now)

    def finish(self, now: float) -> None:
        """See `Checker`."""

    def _merge(self, event: BeginMerge, now: float) -> None:
        for member in event.contributions:
            header = self._headers.get(_key(member))
            if header is None:
                self._fail("no upload of that step has arrived", member, now)
            elif member.learner not in self._learners:
                self._fail("no report of it has arrived", member, now)
            elif member.learner in self._false:
                self._judge(member, header, event.fragment, now)
            else:
                self._compare(member, header, event.fragment, now)
            self.compared += 1

    def _compare(
        self, member: Contribution, header: bulk.UploadHeader, fragment: int, now: float
    ) -> None:
        """Of an honest learner: exactly what it counted."""
        stated = header.steps, header.tokens
        expected = _limited(*stated, self._most_steps)
        found = member.steps, member.tokens
        less = all(map(le, found, expected)) and member.learner in self._delayed
        if found != expected and not less:
            self._fail(f"the honest learner has {expected[1]} in {expected[0]}", member, now)
        report = self._learners[member.learner].before(member.local_step)
        if report is None or report.local_step < member.local_step:
            return
        if report.stated[fragment] != stated:
            self._fail(f"its upload states {stated[1]} in {stated[0]}, its report not", member, now)

    def _judge(
        self, member: Contribution, header: bulk.UploadHeader, fragment: int, now: float
    ) -> None:
        """Of one that lies: no more than its Reports explain."""
        report = self._learners[member.learner].before(member.local_step)
        if report is None:
            return
        since = member.local_step - report.local_step
        most_steps = min(self._most_steps, member.local_step - report.received_at[fragment])
        if member.steps > most_steps:
            self._fail(f"its reports explain at most {most_steps} steps", member, now)
        explained = report.most_tokens[fragment] + most_tokens(report.usual, since)
        most = min(header.tokens, explained)
        if member.tokens > most:
            self._fail(f"its reports explain at most {most:.0f} tokens", member, now)

    def _fail(self, why: str, member: Contribution, now: float) -> None:
        raise Violation(
            "credits",
            f"{member.learner} is credited {member.tokens} tokens in {member.steps} steps at t_m "
            f"{member.local_step}: {why}",
            step=member.round,
            now=now,
        )


def _key(of: bulk.UploadHeader | Contribution) -> Upload:
    return of.learner, of.incarnation, of.round, of.attempt, of.local_step


def most_tokens(usual: float, steps: int) -> float:
    """The most tokens that so many steps add; no steps add none, also if nothing is usual yet."""
    if not steps or math.isinf(usual):
        return usual if steps else 0.0
    return math.ceil(MULTIPLE * usual * steps)


def _limited(steps: int, tokens: int, most: int) -> tuple[int, int]:
    """What a round credits at most, at the learner's own tokens per step."""
    return (most, tokens * most // steps) if steps > most else (steps, tokens)
