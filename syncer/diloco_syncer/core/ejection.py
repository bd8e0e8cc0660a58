"""
Learners that the rounds do without until they have proven that they deliver. Pure.

As with outlier ejection in load balancers: a member that misses a deadline or delivers what cannot
be merged is ejected, probed after a growing back-off, and readmitted when a probe is delivered in
time. A probe is a pull whose upload is discarded, so no merge waits for it.

Leaving is no way around it: what the others waited for a learner that left before it delivered is
added up, also with what it costs them in merges that it is part of, and a learner for which they waited
long twice is not probed earlier because it rejoins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from diloco.runtime.backoff import doubled
from diloco_syncer.core import events as ev
from diloco_syncer.core.learners import (
    FORGIVEN_PER_SECOND,
    Ejection,
    LearnerRecord,
    LearnerRecords,
    Probe,
)
from diloco_syncer.core.pacing import Pace
from diloco_syncer.core.upload_limits import HOLD_WINDOWS, UploadProgress

BACKOFF_SECONDS = 5.0
MAX_BACKOFF_SECONDS = 600.0

FORGIVEN_AFTER_MERGES = 16
FORGIVEN_AFTER_HOLDS = 1 / FORGIVEN_PER_SECOND
"""
Merges in a row, and time since the last ejection in multiples of `hold_seconds`, after which earlier
failures no longer count. An ejection costs the others at most one hold, so a learner that fails as
often as this allows costs them 2 % of their time. Waits that lead to none are forgiven at that rate.
"""

LATE_WINDOWS = 2.5
MIN_LATE_SECONDS = 4.5
"""
A learner is ejected when what it costs the others, less 2 % of the time, adds up
to this multiple of τ·ξ_step, and at least to this. One pause of a process does not: at most one hold counts.
"""

PROBE_ATTEMPT = 1 << 20
"""Attempts of probes are numbered from here on, so that they are never an attempt of a round."""


def backoff_seconds(ejections: int) -> float:
    """Time until the next probe after this many failures in a row (1: the first)."""
    return doubled(BACKOFF_SECONDS, ejections - 1, MAX_BACKOFF_SECONDS)


def _nth(fragments: frozenset[int], failures: int) -> int:
    """Another fragment after each failure: one may be too large for a link that carries the others."""
    return sorted(fragments)[failures % len(fragments)]


@dataclass(slots=True)
class Ejections:
    """Ejects, probes and readmits the learners of one job."""

    learners: LearnerRecords
    pace: Pace
    quorum: int
    hold_seconds: Callable[[], float]
    free_seconds: Callable[[], float]
    sync_seconds: Callable[[], float]
    """Moving average of the time from the pull to the commit."""
    _probes: int = 0
    _waits: bool = False
    """A round waits for its quorum for longer than learners that step and offer would take."""
    _scanned: list[LearnerRecord] | None = None
    """The ejected learners at the last scan; None: scan again."""
    _next_at: float = math.inf
    """
    When the next of their probes is due or late, as of that scan: an event must not cost one. A pace
    that rises meanwhile ends a probe a little later than it could.
    """

    def eject(
        self, name: str, reason: str, now: float, *, waited: float = 0.0
    ) -> list[ev.Decision]:
        """
        Eject a learner, unless there would be no quorum without it, or most are silent as it is; empty if it was not.

        Args:
            name: of the learner.
            reason: one of a fixed set.
            now: monotonic seconds.
            waited: seconds that the others waited for it in vain.
        """
        record = self.learners.by_name[name]
        if record.session is None or self.learners.silent_with_most(record, now):
            return []
        self._charge(record, waited, now)
        return self._eject(record, reason, now)

    def waited(self, name: str, seconds: float, reason: str, now: float) -> list[ev.Decision]:
        """
        The others waited in vain for a learner that left, lost its connection, or delivered what was used before.

        It may be gone. It is ejected once that adds up to what a round could have waited for it.
        """
        record = self.learners.by_name[name]
        return self._eject(record, reason, now) if self._charge(record, seconds, now) else []

    def delivered_late(
        self, seconds: dict[str, float], now: float, *, window: float
    ) -> dict[str, list[ev.Decision]]:
        """
        Members of a round that have delivered cost the others this.

        Args:
            seconds: by learner.
            now: monotonic seconds.
            window: seconds of τ steps.

        Returns:
            The decisions about those that are ejected because that has added up.
        """
        most, hold = max(MIN_LATE_SECONDS, LATE_WINDOWS * window), self.hold_seconds()
        records = [self.learners.by_name[name] for name in seconds]
        charged = [r for r in records if r.late.add(seconds[r.name], now, most=hold)]
        if charged:
            self._excuse(now)
        over = [r for r in charged if r.late.seconds >= most]
        ejected = {}
        for record in over:
            record.late.seconds = 0.0
            record.long_waits += 1
            if decisions := self._eject(record, "Slow", now):
                ejected[record.name] = decisions
        return ejected

    def _excuse(self, now: float) -> None:
        """What more than half of all learners cost is the fault of none: jitter, or a slow syncer."""
        training = self.learners.training()
        common = sorted(record.late.left(now) for record in training)[: (len(training) + 1) // 2]
        if common and common[-1] > 0:
            for record in self.learners:  # also those that are gone now: leaving is no fault
                record.late.seconds = max(0.0, record.late.seconds - common[-1])

    def _charge(self, record: LearnerRecord, seconds: float, now: float) -> bool:
        """
        Add up a wait in vain, also to what the learner costs in all; whether either is too much now.

        While most learners are silent, the cause is common, such as the network of the syncer: that is the fault
        of none.
        """
        if seconds > 0 and self.learners.silent_with_most(record, now):
            return False
        hold = self.hold_seconds()
        if not record.waits.add(seconds, now, most=hold):
            return False
        record.late.add(seconds, now, most=hold)
        self._excuse(now)
        in_vain = record.waits.seconds >= hold
        in_all = record.late.seconds >= max(MIN_LATE_SECONDS, hold * LATE_WINDOWS / HOLD_WINDOWS)
        if in_vain:
            record.waits.seconds = 0.0
        if in_all:
            record.late.seconds = 0.0
        record.long_waits += in_vain or in_all
        return in_vain or in_all

    def _eject(self, record: LearnerRecord, reason: str, now: float) -> list[ev.Decision]:
        if record.ejection is not None:
            return []
        if sum(other is not record for other in self.learners.able()) < self.quorum:
            return []  # an ejection would not help: the rounds need it
        name = record.name
        record.ejections, record.delivered_in_row = record.ejections + 1, 0
        record.failed_at = now
        pause = backoff_seconds(record.ejections)
        record.ejection = Ejection(reason=reason, probe_at=now + pause, failed_at=now)
        self.learners.changed()
        self.pace.leave(name)
        fields = {"learner": name, "reason": reason, "probeSeconds": pause}
        return [ev.Log(event="eject", fields=fields)]

    def tick(self, now: float) -> list[ev.Decision]:
        """Begin the probes that are due and end those that are late."""
        ejected = self.learners.ejected()
        if self._scanned is ejected and now < self._next_at:
            return []
        out: list[ev.Decision] = []
        for record in ejected:
            out += self._tick(record, now)
        self._scanned = ejected
        self._next_at = min(self._times(ejected, now), default=math.inf)
        return out

    def reported(self, name: str, now: float) -> None:
        """An ejected learner whose probe is due may have something to upload now."""
        record = self.learners.by_name[name]
        state = record.ejection
        if state is None or state.probe is not None or record.report is None:
            return
        if record.report.offers and now >= self._due(state):
            self._scanned = None

    def _tick(self, record: LearnerRecord, now: float) -> list[ev.Decision]:
        state = record.ejection
        if state is None or record.report is None:
            return []
        if state.probe is not None:
            return self._end_late(record, state.probe, now)
        if now < self._due(state) or not record.report.offers:
            return []
        self._probes += 1
        state.probe = Probe(
            round=max(1, self.pace.step),
            attempt=PROBE_ATTEMPT + self._probes,
            upload=UploadProgress.begin(now),
            needed=self._needed(),
        )
        return [
            ev.ProbeLearner(
                round=state.probe.round,
                attempt=state.probe.attempt,
                fragment=_nth(record.report.offers, record.ejections + state.unproven - 1),
                learner=record.name,
            )
        ]

    def _end_late(self, record: LearnerRecord, probe: Probe, now: float) -> list[ev.Decision]:
        """End a probe that is late: no failure if it had more time until now, because the rounds needed it."""
        was_needed, probe.needed = probe.needed, self._needed()
        if now >= probe.upload.deadline:
            return self.end_probe(record, now)
        if now >= self._probe_limit(probe):
            return self.end_probe(record, now, counts=not was_needed)
        return []

    def deadlines(self, now: float) -> list[float]:
        """When the next probe is due or late; empty without one."""
        ejected = self.learners.ejected()
        if self._scanned is not ejected:
            return self._times(ejected, now)
        return [self._next_at] if self._next_at > now else []

    def _times(self, ejected: list[LearnerRecord], now: float) -> list[float]:
        states = [record.ejection for record in ejected if record.ejection is not None]
        times = [
            self._due(state)
            if state.probe is None
            else min(state.probe.upload.deadline, self._probe_limit(state.probe))
            for state in states
        ]
        return [at for at in times if at > now]

    def note_wait(self, seconds: float) -> None:
        """The oldest round has waited for its quorum for this long."""
        waits = seconds > self.learners.patience_seconds(self.quorum)
        if waits != self._waits:
            self._waits, self._scanned = waits, None

    def _needed(self) -> bool:
        """Whether the rounds need the ejected learners: too few others, or these do not offer what is due."""
        return self._waits or len(self.learners.able()) < self.quorum

    def _due(self, state: Ejection) -> float:
        if self._needed():
            return min(state.probe_at, state.failed_at + BACKOFF_SECONDS)  # the rounds need it
        return state.probe_at

    def _probe_limit(self, probe: Probe) -> float:
        """It must not take longer than rounds may wait for it regularly, unless they need it."""
        if self._needed():
            return math.inf  # then its own limit counts
        return probe.upload.begun + self.free_seconds() + self.sync_seconds()

    def end_probe(
        self, record: LearnerRecord, now: float, *, delivered: bool = False, counts: bool = True
    ) -> list[ev.Decision]:
        """
        A probe is over.

        Args:
            record: of the learner.
            now: monotonic seconds.
            delivered: all of it.
            counts: False: the learner is not at fault; only the next probe comes later for it, with another fragment.
        """
        state = record.ejection
        if state is None or state.probe is None:
            return []
        probe, state.probe = state.probe, None
        self._scanned = None
        out: list[ev.Decision] = [
            ev.AbortMerge(round=probe.round, attempt=probe.attempt, reason="the probe is over")
        ]
        if not delivered:
            record.ejections += counts
            state.unproven += not counts
            pause = backoff_seconds(record.ejections + state.unproven)
            state.failed_at, state.probe_at = now, now + pause
            return out
        record.ejection = None
        record.failed_at = now  # from now on it has to deliver
        self.learners.changed()
        self.pace.join(record.name)
        return [*out, ev.Log(event="readmit", fields={"learner": record.name})]

    def probed(self, learner: str, round_: int, attempt: int) -> LearnerRecord | None:
        """The learner, if this is its probe."""
        record = self.learners.by_name.get(learner)
        probe = record.ejection.probe if record is not None and record.ejection else None
        return record if probe and (probe.round, probe.attempt) == (round_, attempt) else None

    def joined(self, record: LearnerRecord, now: float) -> list[ev.Decision]:
        """A session began: an ejected learner is probed as soon as it reports, unless it costs too much."""
        if record.ejection is None:
            self.pace.join(record.name)
            return []
        state, out = record.ejection, self._end_unanswered(record)
        again = record.long_waits > 1
        earliest = state.failed_at + backoff_seconds(record.long_waits) if again else now
        state.probe_at = max(now, earliest)
        return out

    def left(self, record: LearnerRecord) -> list[ev.Decision]:
        """A session ended, and its probe with it."""
        self.pace.leave(record.name)
        return self._end_unanswered(record)

    def _end_unanswered(self, record: LearnerRecord) -> list[ev.Decision]:
        """Abort a probe whose session is over: neither a success nor a failure."""
        state, self._scanned = record.ejection, None
        if state is None or state.probe is None:
            return []
        probe, state.probe = state.probe, None
        return [ev.AbortMerge(round=probe.round, attempt=probe.attempt, reason="the session ended")]

    def progressed(self, event: ev.Progress, now: float) -> list[ev.Decision] | None:
        """Account for the upload of a probe; None: it is not of a probe."""
        record = self.probed(event.learner, event.round, event.attempt)
        if record is None or record.ejection is None or record.ejection.probe is None:
            return None
        record.ejection.probe.upload.progressed(event, now)
        return self.end_probe(record, now, delivered=True) if event.done else []

    def merged(self, record: LearnerRecord, now: float) -> None:
        """A learner was part of a merge; after enough of them its failures are forgotten."""
        record.delivered_in_row += 1
        if record.delivered_in_row < FORGIVEN_AFTER_MERGES:
            return
        if now - record.failed_at >= FORGIVEN_AFTER_HOLDS * self.hold_seconds():
            record.ejections = record.long_waits = 0

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused: the times of probes move, and those of the waits that were counted."""
        for record in self.learners:
            record.waits.shift(seconds)
            record.late.shift(seconds)
        for record in self.learners.ejected():
            if record.ejection is not None and record.ejection.probe is not None:
                record.ejection.probe.upload.shift(seconds)
