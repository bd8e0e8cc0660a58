"""
What one learner has counted, as its Reports showed it, and never more than time and its own past explain. Pure.

A weight is tokens² / steps, so both counters are worth a lie. A Report may add at most
    - the steps that the time since the last one allows, at HISTORY_MULTIPLE times its usual speed, and
      what the time before allowed if the last ones were held up on their way,
    - HISTORY_MULTIPLE times its usual tokens for each of them,
to what was credited before. An upload states the counters of its copy; they must be those of the
Report of that step. A link that is behind replaces Reports with newer ones, so there may be none: then
the neighbouring Reports must explain the counters, and they are credited what a Report of that step
would have been at most.
"""

from __future__ import annotations

import math
from bisect import bisect_right
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
"""
Reports whose counters are kept: the newest, the first, and the fewer of those between the older they are.

An upload is of one of the newest, or, after a pull that was long on its way, of an older one. Without
its Report, what bounds it is further apart, and honest counters always fit.
"""

MAX_UNSPENT = 1024.0
"""
Steps that one Report may make up for when those before it were held up on their way.

Paper leaves this open. A connection that delivers nothing ends within a minute; what a round credits
of it is bounded by the round.
"""

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
    """An upload states other counters than the Reports of its learner show."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The counters of one Report, of all fragments, offered or not."""

    stated: Reported
    credited: Reported
    """The same Report with the counters that are credited."""
    reached: int
    """Steps credited from the first Report of its incarnation up to this one."""
    usual: float | None
    """The learner's tokens per step then."""

    @property
    def local_step(self) -> int:
        """Its t_m."""
        return self.stated.local_step

    def start(self, fragment: int) -> int:
        """t_m at which the fragment was last received, as stated."""
        return self.stated.local_step - self.stated.steps[fragment]


@dataclass(slots=True)
class History:
    """The Reports of one learner; its averages outlive its incarnations, its counters do not."""

    tokens_per_step: float | None = None
    seconds_per_step: float | None = None
    """Between Reports, by the syncer's clock; moving averages."""
    newest: Reported | None = None
    """Of this incarnation, with the counters that are credited."""
    usual_seconds: float | None = None
    """The same for the limit on steps: a Report that was held up raises it by HISTORY_MULTIPLE at most."""
    unspent: float = 0.0
    """Steps that the time up to the newest Report allows beyond what was stated: it may have been held up."""
    reported_at: float = 0.0
    paused: bool = True
    """The time since the last Report is not that of steps."""
    reports: list[Shown] = field(default_factory=list)
    """Of this incarnation, by t_m; at most MAX_REPORTS."""

    def pause(self) -> None:
        """No session, or the syncer was paused: the next interval does not show its speed."""
        self.paused = True

    def restart(self) -> None:
        """A new incarnation counts from zero."""
        self.newest, self.unspent = None, 0.0
        self.reports.clear()

    def add(self, event: Reported, now: float) -> int:
        """Record a Report of a larger t_m than the last; returns the steps that it is credited."""
        before = self.newest
        stated_steps = event.local_step - before.local_step if before else 1
        steps = self._steps(stated_steps, now - self.reported_at) if before else stated_steps
        stated_tokens = event.total_tokens - before.total_tokens if before else 0
        credited = tuple(
            self._counters(event, fragment, steps, stated_steps, stated_tokens)
            for fragment in range(len(event.steps))
        )
        self._learn(event, stated_steps, stated_tokens, now)
        c_steps, c_tokens = tuple(s for s, _ in credited), tuple(t for _, t in credited)
        same = (c_steps, c_tokens) == (event.steps, event.tokens)
        self.newest = event if same else replace(event, steps=c_steps, tokens=c_tokens)
        reached = self.reports[-1].reached + steps if self.reports else 0
        self.reports.append(Shown(event, self.newest, reached, self.tokens_per_step))
        if len(self.reports) > MAX_REPORTS:
            half = MAX_REPORTS // 2
            self.reports[:half] = self.reports[:half:2]  # with the first: it bounds every upload
        self.reported_at, self.paused = now, False
        return steps

    def credit(self, upload: Contribution, fragment: int) -> Contribution | None:
        """
        The contribution with the counters that its learner is credited.

        Returns:
            None: the Report of its step has not arrived; it travels on another connection.

        Raises:
            CountsDifferError: the upload states others than its Reports show.
        """
        if self.newest is None or upload.local_step > self.newest.local_step:
            return None
        index = bisect_right(self.reports, upload.local_step, key=lambda shown: shown.local_step)
        if index == 0:
            raise CountsDifferError(
                f"its upload comes from a copy of local step {upload.local_step}; no report of local "
                f"step {upload.local_step} or before has arrived, so none offered it; not merged"
            )
        before = self.reports[index - 1]
        if before.local_step == upload.local_step:
            return _as_reported(upload, fragment, before)
        return _as_explained(upload, fragment, before, self.reports[index])

    def _steps(self, stated: int, seconds: float) -> int:
        """How many of the stated steps the time allows; one at least: messages that were held up arrive together."""
        if self.usual_seconds is None:
            return stated
        by_time = HISTORY_MULTIPLE * seconds / self.usual_seconds
        limit = by_time + self.unspent
        steps = stated if limit >= stated else min(stated, 1 + math.ceil(limit))
        # What was held up arrives at once. After that, nothing is left to make up for.
        kept = self.unspent if by_time < steps else self.unspent / 2
        self.unspent = min(max(0.0, kept + by_time - HISTORY_MULTIPLE * steps), MAX_UNSPENT)
        return steps

    def _counters(
        self, event: Reported, fragment: int, steps: int, stated_steps: int, stated_tokens: int
    ) -> tuple[int, int]:
        """Of one fragment: what was credited before, and what this Report may add; or a new start."""
        c_steps, c_tokens = event.steps[fragment], event.tokens[fragment]
        if self.newest is not None:
            most = self.newest.steps[fragment] + steps
            # More tokens than since the last Report: the fragment was not received in between, and
            # fewer steps would be worth more.
            continued = c_tokens > stated_tokens
            c_steps = most if continued else min(c_steps, most)
            more = min(self._tokens(steps), _share(stated_tokens, steps, stated_steps))
            c_tokens = min(c_tokens, self.newest.tokens[fragment] + more)
        return c_steps, min(c_tokens, self._tokens(c_steps))

    def _tokens(self, steps: int) -> int:
        return _most_tokens(steps, self.tokens_per_step)

    def _learn(self, event: Reported, steps: int, tokens: int, now: float) -> None:
        if self.newest is None:
            longest = max(zip(event.steps, event.tokens, strict=True), default=(0, 0))
            if self.tokens_per_step is None and longest[0] > 0 < longest[1]:
                self.tokens_per_step = longest[1] / longest[0]
            return
        seconds = (now - self.reported_at) / steps
        if seconds > 0 and not self.paused:
            self.seconds_per_step = ema(self.seconds_per_step, seconds)
            slowest = HISTORY_MULTIPLE * (self.usual_seconds or math.inf)
            self.usual_seconds = ema(self.usual_seconds, min(seconds, slowest))
        if tokens > 0:
            per_step = tokens / steps
            if self.tokens_per_step is not None:
                per_step = min(per_step, HISTORY_MULTIPLE * self.tokens_per_step)
            self.tokens_per_step = ema(self.tokens_per_step, per_step)


def _most_tokens(steps: int, usual: float | None) -> int:
    """The most tokens that so many steps may count, at the usual tokens per step; no steps count none."""
    if usual is None:
        return 1 << 62 if steps else 0
    return math.ceil(HISTORY_MULTIPLE * steps * usual)


def _share(tokens: int, steps: int, of_steps: int) -> int:
    """Of the tokens of `of_steps` steps, those of `steps`, rounded up."""
    return tokens if steps >= of_steps else -(-max(0, tokens) * steps // of_steps)


def _as_reported(upload: Contribution, fragment: int, shown: Shown) -> Contribution:
    """
    Of a step with a Report: what that is credited.

    Raises:
        CountsDifferError: the upload states other counters.
    """
    steps, tokens = shown.stated.steps[fragment], shown.stated.tokens[fragment]
    if (steps, tokens) != (upload.steps, upload.tokens):
        raise CountsDifferError(
            f"its upload states {upload.tokens} tokens in {upload.steps} steps, its report of "
            f"local step {upload.local_step} {tokens} in {steps}; not merged"
        )
    credited = shown.credited.steps[fragment], shown.credited.tokens[fragment]
    if credited == (steps, tokens):
        return upload
    return replace(upload, steps=credited[0], tokens=credited[1])


def _as_explained(upload: Contribution, fragment: int, before: Shown, after: Shown) -> Contribution:
    """
    Of a step without a Report: what a Report of that step would have been credited at most.

    Raises:
        CountsDifferError: the Reports before and after it do not explain the counters.
    """
    _check_explained(upload, fragment, before, after)
    start = upload.local_step - upload.steps
    continues = start == before.start(fragment)
    since = upload.local_step - before.local_step
    steps = min(since, after.reached - before.reached)
    trained = upload.tokens - (before.stated.tokens[fragment] if continues else 0)
    of_steps = since if continues else upload.steps
    tokens = min(_most_tokens(steps, before.usual), _share(trained, steps, of_steps))
    if continues:
        steps += before.credited.steps[fragment]
        tokens += before.credited.tokens[fragment]
    else:
        steps = min(steps, upload.steps)
    tokens = min(tokens, upload.tokens, _most_tokens(steps, before.usual))
    if start == after.start(fragment):
        tokens = min(tokens, after.credited.tokens[fragment])
    if (steps, tokens) == (upload.steps, upload.tokens):
        return upload
    return replace(upload, steps=steps, tokens=tokens)


def _check_explained(upload: Contribution, fragment: int, before: Shown, after: Shown) -> None:
    """
    Whether the counters can be those of a step between two Reports. No honest learner's are refused.

        t_m      before ──────────── copy ──────────── after
        c_steps  counts from where the fragment was received last: that is where it was in `before`, or
                 between the two; and unless it is received again after the copy, it is where it is in `after`
        c_tokens grows by at most what the learner trains on from `before` to `after`

    At the step of a Report or a copy, the fragment may also be received after that.

    Raises:
        CountsDifferError: they cannot.
    """
    start = upload.local_step - upload.steps
    later = after.start(fragment)
    continues = start == before.start(fragment)
    possible = (continues or before.local_step <= start < upload.local_step) and (
        later == start or later >= upload.local_step
    )
    least = before.stated.tokens[fragment] if continues else 0
    most = least + after.stated.total_tokens - before.stated.total_tokens
    if later == start:
        most = min(most, after.stated.tokens[fragment])
    if possible and least <= upload.tokens <= most:
        return
    shown = " and ".join(
        f"{of.stated.tokens[fragment]} in {of.stated.steps[fragment]} at {of.local_step}"
        for of in (before, after)
    )
    raise CountsDifferError(
        f"its upload states {upload.tokens} tokens in {upload.steps} steps at local step "
        f"{upload.local_step}, its reports {shown}; not merged"
    )
