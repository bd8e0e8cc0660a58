"""
What one learner has counted, as its Reports showed it, and never more than time and its own past explain. Pure.

A weight is tokens² / steps, so both counters are worth a lie. A Report may add at most
    - the steps that the time since the last one allows, at HISTORY_MULTIPLE times its usual speed,
    - HISTORY_MULTIPLE times its usual tokens for each of them,
to what was credited before. An upload states the counters of its copy; they must be those of the
Report of that step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import Reported
from diloco_syncer.core.pacing import ema

HISTORY_MULTIPLE = 4.0
"""
How far one Report may exceed the learner's moving averages.

Paper leaves this open. Sequences that are packed differ by less than 2; a schedule that doubles the
batch is followed at once, one that multiplies it by more within a few steps.
"""

MAX_REPORTS = 32
"""Reports whose counters are kept: an upload is of one of the newest."""


STEPS_PER_SECOND = 1000
TOKENS_PER_SECOND = 1 << 27
"""No learner is faster: its position in the data and its tokens do not grow faster."""

ABSENT_STEPS = STEPS_PER_SECOND * 86400 * 30
ABSENT_TOKENS = 1 << 44
"""
What it may have trained while this syncer did not run, or its clock stopped: a month at that speed.

Paper leaves this open. A position never moves back, so one that no learner can have reached must not
be accepted; a wrong one within the bound costs the learner data, and nothing else.
"""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a learner was at its first message to this syncer."""

    local_step: int
    tokens: int
    at: float
    """Monotonic."""

    def implausible(self, local_step: int, tokens: int, now: float) -> str:
        """Why the learner cannot have come so far since then; empty: it can."""
        seconds = max(0.0, now - self.at)
        steps = self.local_step + ABSENT_STEPS + int(STEPS_PER_SECOND * seconds)
        most_tokens = self.tokens + ABSENT_TOKENS + int(TOKENS_PER_SECOND * seconds)
        if local_step > steps:
            return f"local_step is {local_step}, and time permits at most {steps}"
        if tokens > most_tokens:
            return f"total_tokens is {tokens}, and time permits at most {most_tokens}"
        return ""


class CountsDifferError(Exception):
    """An upload states other counters than the Report of its step."""


@dataclass(frozen=True, slots=True)
class Counters:
    """c_steps and c_tokens of one fragment at one t_m."""

    stated: tuple[int, int]
    credited: tuple[int, int]


@dataclass(slots=True)
class History:
    """The Reports of one learner; its averages outlive its incarnations, its counters do not."""

    tokens_per_step: float | None = None
    seconds_per_step: float | None = None
    """Between Reports, by the syncer's clock; moving averages."""
    newest: Reported | None = None
    """Of this incarnation, with the counters that are credited."""
    reported_at: float = 0.0
    paused: bool = True
    """The time since the last Report is not that of steps."""
    offered: dict[int, dict[int, Counters]] = field(default_factory=dict)
    """t_m → fragment → its counters, of the newest Reports."""

    def pause(self) -> None:
        """No session, or the syncer stood still: the next interval does not show its speed."""
        self.paused = True

    def restart(self) -> None:
        """A new incarnation counts from zero."""
        self.newest = None
        self.offered.clear()

    def add(self, event: Reported, now: float) -> int:
        """Record a Report of a larger t_m than the last; returns the steps that it is credited."""
        before = self.newest
        stated_steps = event.local_step - before.local_step if before else 1
        steps = self._steps(stated_steps, now - self.reported_at) if before else 1
        stated_tokens = event.total_tokens - before.total_tokens if before else 0
        credited = tuple(
            self._counters(event, fragment, steps, stated_tokens)
            for fragment in range(len(event.steps))
        )
        self.offered[event.local_step] = {
            fragment: Counters((event.steps[fragment], event.tokens[fragment]), credited[fragment])
            for fragment in event.offers
        }
        while len(self.offered) > MAX_REPORTS:
            del self.offered[next(iter(self.offered))]
        self._learn(event, stated_steps, stated_tokens, now)
        self.newest = replace(
            event, steps=tuple(s for s, _ in credited), tokens=tuple(t for _, t in credited)
        )
        self.reported_at, self.paused = now, False
        return steps

    def credit(self, upload: Contribution, fragment: int) -> Contribution | None:
        """
        The contribution with the counters that its learner is credited.

        Returns:
            None: the Report of its step has not arrived; it travels on another connection.

        Raises:
            CountsDifferError: the upload states others than the Report of its step.
        """
        if self.newest is None or upload.local_step > self.newest.local_step:
            return None
        found = self.offered.get(upload.local_step, {}).get(fragment)
        if found is None:
            return self._estimated(upload)
        if found.stated != (upload.steps, upload.tokens):
            raise CountsDifferError(
                f"its upload states {upload.tokens} tokens in {upload.steps} steps, its report of "
                f"local step {upload.local_step} {found.stated[1]} in {found.stated[0]}; not merged"
            )
        if found.credited == found.stated:
            return upload
        return replace(upload, steps=found.credited[0], tokens=found.credited[1])

    def _steps(self, stated: int, seconds: float) -> int:
        if self.seconds_per_step is None or self.seconds_per_step <= 0:
            return stated
        # One step is always possible: messages that were held up arrive together.
        most = HISTORY_MULTIPLE * seconds / self.seconds_per_step
        return stated if most >= stated else min(stated, 1 + math.ceil(most))

    def _counters(
        self, event: Reported, fragment: int, steps: int, stated_tokens: int
    ) -> tuple[int, int]:
        """Of one fragment: what was credited before, and what this Report may add; or a new start."""
        c_steps, c_tokens = event.steps[fragment], event.tokens[fragment]
        if self.newest is not None:
            most = self.newest.steps[fragment] + steps
            # More tokens than since the last Report: the fragment was not received in between, and
            # fewer steps would be worth more.
            continued = c_tokens > stated_tokens
            c_steps = most if continued else min(c_steps, most)
            c_tokens = min(c_tokens, self.newest.tokens[fragment] + self._tokens(steps))
        return c_steps, min(c_tokens, self._tokens(c_steps))

    def _tokens(self, steps: int) -> int:
        """The most tokens that so many steps may count."""
        if self.tokens_per_step is None:
            return 1 << 62
        return math.ceil(HISTORY_MULTIPLE * steps * self.tokens_per_step)

    def _learn(self, event: Reported, steps: int, tokens: int, now: float) -> None:
        if self.newest is None:
            longest = max(zip(event.steps, event.tokens, strict=True), default=(0, 0))
            if self.tokens_per_step is None and longest[0] > 0 < longest[1]:
                self.tokens_per_step = longest[1] / longest[0]
            return
        seconds = (now - self.reported_at) / steps
        if seconds > 0 and not self.paused:
            self.seconds_per_step = ema(self.seconds_per_step, seconds)
        if tokens > 0:
            per_step = tokens / steps
            if self.tokens_per_step is not None:
                per_step = min(per_step, HISTORY_MULTIPLE * self.tokens_per_step)
            self.tokens_per_step = ema(self.tokens_per_step, per_step)

    def _estimated(self, upload: Contribution) -> Contribution:
        """Of a step without a Report: steps as stated, at the learner's usual tokens per step."""
        usual = math.ceil(upload.steps * (self.tokens_per_step or 0.0))
        return upload if upload.tokens <= usual else replace(upload, tokens=usual)
