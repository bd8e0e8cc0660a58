"""
The learners of a job: sessions, incarnations, and what each learner last reported. Pure.

Rule: only `LearnerRecords` decides which incarnation of a learner is the current one.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.journal.records import RecordError, value
from diloco_syncer.core.events import BlocksStated, Close, Decision, Hello, Log, Recovered, Reported
from diloco_syncer.core.history import History, Origin
from diloco_syncer.core.pacing import ema
from diloco_syncer.core.upload_limits import UploadProgress
from diloco_syncer.core.used_reports import UsedReports

SPEED_SHARE = 16
"""The speeds of all are measured again after a sixteenth of the learners have reported."""

HANGS_SECONDS = 10.0
HANGS_STEPS = 4.0
"""A step that takes longer than this, and than so many of the learner's steps, hangs. Paper leaves this open."""


UNMEASURED_SECONDS = 60.0
"""Longest step that is believed without a measurement when others wait. Paper leaves this open."""

SILENT_SECONDS = 3.0
"""A learner sends something every 2 s: after this time, something is missing."""

FORGIVEN_PER_SECOND = 0.02
"""Of the time that others have waited for a learner, so much is forgiven: it may cost them 2 % of their time."""


@dataclass(slots=True)
class Waits:
    """Adds up the time that the others have waited for a learner, less what is forgiven."""

    seconds: float = 0.0
    """As of `at`."""
    begun: float = math.inf
    at: float = -math.inf
    """The newest time that was counted ends here and begins at `begun`, monotonic."""

    def left(self, now: float) -> float:
        """What is not forgiven."""
        return max(0.0, self.seconds - FORGIVEN_PER_SECOND * (now - self.at))

    def add(self, seconds: float, now: float, *, most: float) -> bool:
        """
        The others have waited this long until now; at most `most` of it counts. Whether any of it does.

        Overlapping rounds wait at the same time: that counts once.
        """
        begun = now - seconds
        counted = max(0.0, self.at - max(begun, self.begun))
        if seconds - counted <= 0:
            return False
        self.seconds = self.left(now) + min(seconds - counted, most)
        self.begun = min(begun, self.begun) if begun <= self.at else begun
        self.at = now
        return True

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused: that time does not count."""
        self.begun += seconds
        self.at += seconds


@dataclass(slots=True)
class Probe:
    """A pull whose upload is discarded: proof that a learner delivers (core/ejection.py)."""

    round: int
    attempt: int
    upload: UploadProgress
    needed: bool = False
    """Whether the rounds needed the learner at the last scan."""


@dataclass(slots=True)
class Ejection:
    """Why the rounds do without a learner, and when it is probed."""

    reason: str
    probe_at: float
    """Monotonic; no probe before, unless the quorum is short of learners."""
    failed_at: float
    """When it last failed, monotonic."""
    unproven: int = 0
    """Probes that ended without a fault of the learner: no failures, but the next ones come more rarely."""
    probe: Probe | None = None


@dataclass(slots=True, kw_only=True)
class LearnerRecord:
    """One learner as the syncer knows it, over all its incarnations."""

    name: str
    region: str
    incarnation: int = 0
    session: int | None = None
    """None: not connected."""
    last_seen: float = 0.0
    """Monotonic time of its last message."""
    report: Reported | None = None
    """Newest metadata of this session; None until the first step after a join."""
    reported_at: float = 0.0
    """Monotonic time of that report."""
    hangs: bool = False
    """Its present step takes much longer than its steps before, as of the last tick."""
    history: History = field(default_factory=History)
    """What its reports are credited with."""
    used_reports: UsedReports = field(default_factory=UsedReports)
    """Its reports that rounds have used (docs/algorithm.md, "Reports and quorum")."""
    local_step: int = 0
    """Highest t_m ever reported: its data position."""
    total_tokens: int = 0
    origin: Origin | None = None
    """Its position at its first message to this syncer; None: there was none."""
    step_tokens: float = 0.0
    """Tokens of its last step."""
    step_seconds: float | None = None
    """ξ_step of this learner, moving average."""
    merged_round: int = 0
    """Global step of the last merge it was part of."""
    merges: int = 0
    restarts: int = 0
    """Restarts of its process, as its supervisor counts them."""
    peer_address: str = ""
    """host:port on which it answers other learners; "": it does not."""
    began_at: int = 0
    """Global step of the syncer when its process began without a recent checkpoint; 0: it did not, or before all."""
    cluster: str = ""
    """The network that this address is of."""
    first_choices: int = 0
    """How often a learner that joined was to ask this one first."""
    first_peer: str = ""
    """The learner that its present process was to ask first; "": none."""
    recovery: Recovered | None = None
    """With which state the optimizers of its present process began; None: not stated."""
    joined_round: int = 0
    """Global step of the syncer when its session began: no announcement of this session has an older one."""
    lag: float = 0.0
    """Global steps between an announcement and the first report that knows it (core/announcements.py)."""
    confirmed: bool = False
    """
    Its last upload that was merged confirms its steps: it has a length, and tokens. Until one does, and
    after many steps without one, its steps count for the pace only as fast as those of others.
    """
    unproven_steps: int = 0
    """Steps that it reported since an upload of it was last merged, those that it repeated in another session too."""
    paced_at: float = -math.inf
    """When its steps last counted for the pace, or should have, monotonic."""
    ejection: Ejection | None = None
    """None: it takes part in rounds."""
    ejections: int = 0
    """Failures since it last delivered for a while, those of probes included."""
    long_waits: int = 0
    """How often either of the next two has reached its limit."""
    waits: Waits = field(default_factory=Waits)
    """In vain, since then."""
    late: Waits = field(default_factory=Waits)
    """What it cost the others, in vain or in merges that it was part of, since then."""
    failed_at: float = -math.inf
    """When it was last ejected, monotonic."""
    delivered_in_row: int = 0
    """Merges since the last failure."""

    @property
    def training(self) -> bool:
        """Connected and stepping."""
        return self.session is not None and self.report is not None

    @property
    def state(self) -> str:
        """For people: Training, Ejected, Joining or Gone."""
        if self.session is None:
            return "Gone"
        if not self.training:
            return "Joining"
        return "Training" if self.ejection is None else "Ejected"

    @property
    def fresh(self) -> bool:
        """Has metadata newer than every report that a round has used."""
        return self.report is not None and self.used_reports.fresh(self.report.local_step, self.lag)


class LearnerRecords:
    """All learners ever seen, in the fixed order of names, so that nothing depends on the order of joins."""

    def __init__(self, by_name: dict[str, LearnerRecord] | None = None) -> None:
        self.by_name: dict[str, LearnerRecord] = dict(by_name or {})
        self._names = sorted(self.by_name)
        self._connected: list[LearnerRecord] | None = None
        self._training: list[LearnerRecord] | None = None
        self._ejected: list[LearnerRecord] | None = None
        self._able: list[LearnerRecord] | None = None
        self._measured: tuple[float | None, float, list[float]] | None = None
        self._reports = 0
        """Since the speeds were measured."""

    def __iter__(self) -> Iterator[LearnerRecord]:
        """By name."""
        return (self.by_name[name] for name in self._names)

    def get_or_add(self, name: str, *, region: str) -> LearnerRecord:
        """The record of a learner, new if it was never seen."""
        record = self.by_name.get(name)
        if record is None:
            record = self.by_name[name] = LearnerRecord(name=name, region=region)
            bisect.insort(self._names, name)
        return record

    def changed(self) -> None:
        """A learner joined, left, began to report, hangs or no longer does, was ejected or readmitted."""
        self._connected = self._training = self._ejected = self._able = self._measured = None

    def confirm(self, confirmed: Mapping[str, bool]) -> None:
        """Record whose merged uploads confirm their steps."""
        for name, is_confirmed in confirmed.items():
            record = self.by_name[name]
            record.confirmed, record.unproven_steps = is_confirmed, 0
        self._measured = None

    def expire_confirmation(self, record: LearnerRecord, steps: int) -> None:
        """
        Its last upload confirms no more than this many reported steps after it.

        Not its position, which a new session may state: a learner that was cut off trained without a report,
        and one that connects again and again, or reports the same steps again, must not stay confirmed.
        """
        if record.confirmed and record.unproven_steps > steps:
            record.confirmed = False
            self._measured = None

    def paces(self, record: LearnerRecord, now: float) -> bool:
        """
        Whether a step that the learner reports now counts for the pace.

        Not more often than `least_step_seconds` on average: a step that comes a little early counts with
        the next one, so that an honest learner of that speed loses none but the first.
        """
        least = self.least_step_seconds(record)
        if now - record.paced_at < least:
            return False
        record.paced_at = max(record.paced_at + least, now - least)
        return True

    def note_hanging(self, now: float) -> None:
        """Note which learners hang: one that makes no steps is not the fastest."""
        for record in (*self.training(), *self.ejected()):
            limit = max(HANGS_SECONDS, HANGS_STEPS * (record.step_seconds or 0.0))
            if record.hangs != (now - record.reported_at > limit):
                record.hangs = not record.hangs
                self.changed()

    def of_session(self, learner: str, session: int) -> LearnerRecord | None:
        """The learner, if this session is its current one."""
        record = self.by_name.get(learner)
        return record if record is not None and record.session == session else None

    def connected(self) -> list[LearnerRecord]:
        """Learners with a session, by name."""
        if self._connected is None:
            self._connected = [record for record in self if record.session is not None]
        return self._connected

    def training(self) -> list[LearnerRecord]:
        """Connected learners that have reported since they joined and are not ejected, by name."""
        if self._training is None:
            self._training = [r for r in self.connected() if r.training and r.ejection is None]
        return self._training

    def patience_seconds(self, quorum: int) -> float:
        """After this time without what so many learners that step would do, the others are needed."""
        return max(HANGS_SECONDS, HANGS_STEPS * self.quorum_step_seconds(quorum))

    def quorum_step_seconds(self, quorum: int) -> float:
        """Between the steps of the slowest learner that the quorum needs; 0: it is not known."""
        return next(reversed(self._speeds()[2][:quorum]), 0.0)

    def able(self) -> list[LearnerRecord]:
        """Those of `training` that can fill a quorum: one that hangs cannot, unless every learner does."""
        if self._able is None:
            steps = any(not record.hangs for record in (*self.training(), *self.ejected()))
            self._able = [r for r in self.training() if not (steps and r.hangs)]
        return self._able

    def silent_with_most(self, record: LearnerRecord, now: float) -> bool:
        """Whether nothing comes from this learner and from more than half of all, itself and those connected."""
        if now - record.last_seen <= SILENT_SECONDS:
            return False
        others = [other for other in self.connected() if other is not record]
        silent = sum(now - other.last_seen > SILENT_SECONDS for other in others)
        return 2 * (1 + silent) > 1 + len(others)

    def ejected(self) -> list[LearnerRecord]:
        """Connected learners that have reported but are ejected, by name."""
        if self._ejected is None:
            self._ejected = [r for r in self.connected() if r.training and r.ejection is not None]
        return self._ejected

    def fastest_step_seconds(self) -> float | None:
        """ξ_step: that of the fastest learner that is training, as far as its Reports and uploads show."""
        return self._speeds()[0]

    def least_step_seconds(self, record: LearnerRecord) -> float:
        """Shortest time between its steps that count for the pace; 0: its uploads confirm its speed."""
        return _least(record, self._speeds()[1])

    def _speeds(self) -> tuple[float | None, float, list[float]]:
        """
        ξ_step, the time between steps that counts for learners without a proof (0: only one trains), and
        that of each learner that steps, ascending.

        Measured again after one learner in SPEED_SHARE has reported, so that a report costs the same
        however many learners there are.
        """
        training = self.training()
        if self._measured is None or self._reports * SPEED_SHARE >= len(training):
            self._reports = 0
            self._measured = _measure(training)
        return self._measured

    def implausible(self, event: Hello | Reported | BlocksStated, now: float) -> str:
        """Why the learner cannot have come as far as it states; empty: it can."""
        record = self.by_name.get(event.learner)
        tokens = event.total_tokens if isinstance(event, Reported) else 0
        if record is None:
            return Origin(0, 0, now).implausible(event.local_step, tokens, now)
        if record.origin is None:
            record.origin = Origin(record.local_step, record.total_tokens, now)
        return record.origin.implausible(event.local_step, tokens, now)

    def admit(self, hello: Hello, *, now: float) -> tuple[LearnerRecord, int | None] | None:
        """
        Open a session, of a new incarnation or as the continuation of the current one.

        Returns:
            The record and the session it replaces (None: there was none); or None when a newer
            incarnation has joined and this one must be refused.
        """
        record = self.get_or_add(hello.learner, region=hello.region)
        if hello.incarnation < record.incarnation:
            return None
        replaced = record.session
        record.incarnation = hello.incarnation
        record.session = hello.session
        record.last_seen = now
        record.restarts = hello.restarts
        record.peer_address, record.cluster = hello.peer_address, hello.cluster
        record.report = None
        record.region = hello.region
        record.step_seconds = None
        record.local_step = max(record.local_step, hello.local_step)
        record.lag = 0.0
        record.history.pause()
        if hello.fresh:
            record.first_peer, record.recovery = "", None
            record.used_reports, record.confirmed = UsedReports(), False
            record.history.restart()
        self.changed()
        return record, replaced

    def report(self, event: Reported, *, now: float) -> int | None:
        """
        Record the metadata of a learner.

        Returns:
            How many steps it advanced (0: nothing new); None for a session that is not current.
        """
        record = self.of_session(event.learner, event.session)
        if record is None:
            return None
        record.last_seen = now
        before = record.report.local_step if record.report is not None else event.local_step - 1
        steps = event.local_step - before
        if steps <= 0:
            return 0
        if record.report is None:
            self.changed()
        record.report = event
        record.reported_at = now
        record.unproven_steps += steps
        if record.hangs:
            record.hangs = False
            self.changed()
        record.local_step = max(record.local_step, event.local_step)
        if event.total_tokens > record.total_tokens:
            record.step_tokens = (event.total_tokens - record.total_tokens) / steps
            record.total_tokens = event.total_tokens
        if event.step_seconds > 0:
            record.step_seconds = ema(record.step_seconds, event.step_seconds + event.sync_seconds)
        self._reports += 1
        newest = record.history.newest
        if newest is not None and event.local_step <= newest.local_step:
            return 0  # reported in an earlier session of this process
        return min(steps, record.history.add(event, now))

    def leave(self, learner: str, session: int) -> LearnerRecord | None:
        """Close a session; None if it was not current."""
        record = self.of_session(learner, session)
        if record is not None:
            record.session = None
            record.report = None
            record.step_seconds = None
            self.changed()
        return record

    def to_json(self) -> dict[str, Any]:
        """What must outlive the syncer: data positions, tokens, incarnations."""
        return {
            record.name: {
                "region": record.region,
                "incarnation": record.incarnation,
                "localStep": record.local_step,
                "tokens": record.total_tokens,
                "reports": record.used_reports.to_json(),
                "mergedRound": record.merged_round,
                "merges": record.merges,
                "restarts": record.restarts,
                "beganAt": record.began_at,
            }
            for record in self
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LearnerRecords:
        """The records that `to_json` described; no learner is connected."""
        return cls(
            {
                name: LearnerRecord(
                    name=name,
                    region=str(m["region"]),
                    incarnation=int(m["incarnation"]),
                    local_step=int(m["localStep"]),
                    total_tokens=int(m["tokens"]),
                    used_reports=UsedReports.from_json(m["reports"]),
                    merged_round=int(m["mergedRound"]),
                    merges=int(m["merges"]),
                    restarts=int(m.get("restarts", 0)),  # older snapshots have none
                    began_at=int(m.get("beganAt", 0)),  # likewise
                )
                for name, m in data.items()
            }
        )

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> int:
        """
        Catch up with audit lines written after the snapshot this was read from.

        A killed syncer loses the merges after its last snapshot. It must not lose which incarnations it admitted and
        which reports it merged, or a replaced process could return, or a report be merged in two epochs.

        Returns:
            How many lines were left out because they are damaged: the journal has no checksums, and
            what it lost must not keep the job from starting. `diloco audit` names them.
        """
        damaged = 0
        for line in lines:
            try:
                if line.get("event") == "join":
                    self._replay_join(line)
                elif line.get("event") == "merge":
                    self._replay_merge(line)
            except RecordError:
                damaged += 1
        return damaged

    def _replay_join(self, line: Mapping[str, Any]) -> None:
        name, incarnation = value(line, "learner", str), value(line, "incarnation", int)
        local_step = value(line, "localStep", int)
        region, _, index = name.partition("/")
        if not (region and index.isascii() and index.isdigit()):
            raise RecordError(f"has learner {name!r}, expected one like eu/0")
        record = self.get_or_add(name, region=region)
        if incarnation > record.incarnation:
            record.incarnation, record.used_reports = incarnation, UsedReports()
        record.local_step = max(record.local_step, local_step)

    def _replay_merge(self, line: Mapping[str, Any]) -> None:
        members = line.get("members")
        if not isinstance(members, list) or not all(isinstance(m, dict) for m in members):
            raise RecordError("has no list of members")
        used = [
            (value(m, "learner", str), value(m, "incarnation", int), value(m, "step", int))
            for m in members
        ]
        for name, incarnation, local_step in used:
            known = self.by_name.get(name)
            if known is not None:
                known.local_step = max(known.local_step, local_step)
                if known.incarnation == incarnation:
                    known.used_reports.add(local_step)


def _measure(training: list[LearnerRecord]) -> tuple[float | None, float, list[float]]:
    usual = _usual(training)
    stepping = [r for r in training if not r.hangs] or training
    measured = [
        max(r.step_seconds, r.history.seconds_per_step or 0.0, _least(r, usual))
        for r in stepping
        if r.step_seconds is not None
    ]
    intervals = sorted(found for r in stepping if (found := _evident_interval(r)) is not None)
    return min(measured, default=None), usual, intervals


def _usual(training: list[LearnerRecord]) -> float:
    """
    Time between steps of the learners whose uploads confirm their speed, or while there are none, of all.

    Paper leaves this open: the median, and of two the slower. So a learner that was never merged sets no
    faster pace than the others do; one that really is faster does from its first merge on.
    """
    if len(training) < 2:
        return 0.0
    confirmed = [r for r in training if r.confirmed] or training
    seconds = [found for r in confirmed if (found := _interval(r)) is not None]
    return statistics.median_high(seconds) if seconds else 0.0


def _interval(record: LearnerRecord) -> float | None:
    """Between its Reports; as it states itself at first, and where its trainer was paused in between."""
    measured, stated = record.history.seconds_per_step, record.step_seconds
    if measured is None or stated is None:
        return measured or stated
    return min(measured, HANGS_STEPS * stated)


def _evident_interval(record: LearnerRecord) -> float | None:
    """As `_interval`; while nothing was measured, a learner cannot excuse more than UNMEASURED_SECONDS."""
    found = _interval(record)
    if found is None or record.history.seconds_per_step is not None:
        return found
    return min(found, UNMEASURED_SECONDS)


def _least(record: LearnerRecord, usual: float) -> float:
    return 0.0 if record.confirmed else usual


def refusal(event: Hello | Reported | BlocksStated, reason: str, detail: str) -> list[Decision]:
    """Close a session because of its Hello, without a join, or because of a Report."""
    fields = {"learner": event.learner, "reason": reason, "detail": detail}
    close = Close(session=event.session, reason=reason, detail=detail)
    return [close, Log(event="refuse", fields=fields)]
