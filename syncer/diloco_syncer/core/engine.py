"""
Algorithm 2 of the paper as a state machine: `handle(event, now) -> decisions`.

Pure: no clock, socket, file or thread. The runner drives it, and tests run it in virtual time.

The engine dispatches events to its parts: scheduler (rounds), ejection, initialisation, durability,
announcements. Only it and the learners' records keep the rule that nothing of an older incarnation or session
reaches a merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core import peers
from diloco_syncer.core.announcements import Announcements, lag_of
from diloco_syncer.core.blocks import BlockLedger
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.durability import Durability, Stage
from diloco_syncer.core.ejection import Ejections
from diloco_syncer.core.initialisation import Initialisation
from diloco_syncer.core.learner_limits import beyond
from diloco_syncer.core.learners import LearnerRecord, LearnerRecords, refusal
from diloco_syncer.core.scheduler import AFTER_HALT, Scheduler

HEARTBEAT_SECONDS = 2.0
"""A learner sends something at least this often."""

LATE_HEARTBEATS = 3
"""After this many silent intervals a learner counts as gone (docs/algorithm.md, "Failure detection")."""

OWN_PAUSE_SECONDS = 3.0
"""A longer time between two events is a pause of the syncer itself: it ticks at least every 2 s."""

CONFIRMED_INTERVALS = 4
CONFIRMED_STEPS = 16
"""
An upload confirms the speed of a learner for this many H of its own steps, and a few for small H.

Paper leaves this open. A learner that trains is merged once in H steps; one that reports steps and uploads
nothing loses its influence on the pace.
"""

STUCK_SECONDS = 30.0
STUCK_STEPS = 10.0
"""Without a merge for this long, plus this many of its steps, a round is reported as stuck."""


@dataclass(slots=True)
class Engine:
    """The syncer's decisions. `step` is the global step t: the last one that is done."""

    spec: RunSpec
    epoch: int
    start_step: int = 0
    """t of the snapshot that it begins with."""
    initialised: bool = False
    """Θ exists."""
    exported: bool = False
    """At the start: the model of step T is written already."""
    learners: LearnerRecords = field(default_factory=LearnerRecords)
    blocks: BlockLedger = field(default_factory=BlockLedger)
    scheduler: Scheduler = field(init=False)
    initialisation: Initialisation = field(init=False)
    durability: Durability = field(init=False)
    _announcements: Announcements = field(init=False)
    _commits: int = 0
    """Commits after which a snapshot was considered."""
    _now: float | None = None
    """Time of the last event."""
    _mergeless_at: float = 0.0
    """The first event, the initial model or the last merge; later by pauses and the time without a quorum."""
    _limits: Mapping[str, int] | None = None
    """What replaced the spec's numbers of learners; None: nothing."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.spec, self.learners, self.start_step)
        self.initialisation = Initialisation(parts=self.spec.fragments + 1)
        self.durability = Durability(
            every_steps=self.spec.syncer_checkpoint.every_steps,
            capture=self.to_json,
            snapshot_step=self.step,
        )
        if self.exported and self.initialised and self.step >= self.spec.steps:
            self.durability.stage = Stage.COMPLETE
        self._announcements = Announcements(
            overlap=self.spec.overlap,
            steps=self.spec.steps,
            due=self.scheduler.due,
            next_due=self.scheduler.next_due,
        )

    @property
    def step(self) -> int:
        """The global step t: the last one that is done."""
        return self.scheduler.step

    @property
    def ejections(self) -> Ejections:
        """Learners that the rounds do without."""
        return self.scheduler.ejections

    # ------------------------------------------------------------ entry

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        """
        Process one event.

        Args:
            event: what happened.
            now: monotonic seconds; never smaller than in the call before.

        Returns:
            Decisions, to be carried out in this order.
        """
        seconds = now - (now if self._now is None else self._now)
        pause = self._own_pause(now)
        if not pause and len(self.learners.training()) < self.spec.quorum:
            self._excuse_mergeless(seconds)
        out = [*pause, *self._process(event, now), *self.blocks.advance(now), *self._advance(now)]
        if any(isinstance(decision, ev.TakeSnapshot) for decision in out):
            self.scheduler.growth.snapshot()
        return out

    def _own_pause(self, now: float) -> list[ev.Decision]:
        """Restart all leases after the syncer itself was paused: nothing could be received meanwhile."""
        previous, self._now = self._now, now
        if previous is None:
            self._mergeless_at = now
            return []
        seconds = now - previous
        if seconds <= OWN_PAUSE_SECONDS:
            return []
        for record in self.learners.connected():
            record.last_seen += seconds
            record.reported_at += seconds
            record.history.pause()
        self.scheduler.shift(seconds)
        self.initialisation.shift(seconds)
        self.blocks.shift(seconds)
        self._excuse_mergeless(seconds)
        return [ev.Log(event="pause", fields={"seconds": round(seconds, 3)})]

    def _excuse_mergeless(self, seconds: float) -> None:
        """There could be no merge for this long; only this time is excused, however often it happens."""
        self._mergeless_at = self._merge_missing_since() + seconds

    def _merge_missing_since(self) -> float:
        """Time from which on one is missing."""
        return max(self._mergeless_at, self.scheduler.last_merge_at or self._mergeless_at)

    def _process(self, event: ev.Event, now: float) -> list[ev.Decision]:
        match event:
            case ev.Hello():
                return self._hello(event, now)
            case ev.Left():
                return self._left(event, now)
            case ev.Reported():
                return self._reported(event, now)
            case ev.BlocksStated():
                return self._blocks_stated(event, now)
            case ev.Heartbeat():
                return self._heartbeat(event, now)
            case ev.Recovered():
                record = self.learners.of_session(event.learner, event.session)
                return peers.recovered(record, event, step=self.step)
            case ev.Initialised():
                return self._initialised(event, now)
            case ev.InitialFailed():
                return self._initial_failed(event)
            case Contribution():
                return self.scheduler.contributed(event, now)
            case ev.Progress():
                return self._progress(event, now)
            case ev.Dropped():
                return self._dropped(event, now)
            case ev.Merged():
                return self.scheduler.merged(event, now)
            case ev.SnapshotDone():
                self.scheduler.growth.snapshot_done(durable=event.step is not None)
                return self.durability.snapshot_done(event, self.step, now)
            case ev.Exported():
                return self._exported()
            case ev.ExportFailed():
                self.durability.export_failed(event.reason, now)
                return []
            case ev.Failed():
                return self._failed(event, now)
            case ev.LimitsChanged():
                return self._limits_changed(event, now)
            case ev.Tick():
                return self._tick(now)

    @property
    def limits(self) -> Mapping[str, int]:
        """Region → number of its learners that may join now."""
        return self.spec.learners if self._limits is None else self._limits

    @property
    def tokens(self) -> int:
        """Tokens trained by all learners, as far as they reported."""
        return sum(record.total_tokens for record in self.learners)

    @property
    def complete(self) -> bool:
        """Global step T is done, its snapshot is durable and its model is exported."""
        return self.durability.stage is Stage.COMPLETE

    @property
    def durable_step(self) -> int:
        """Global step of the newest durable snapshot."""
        return max(0, self.durability.durable_step)

    @property
    def initialiser(self) -> str | None:
        """The learner that must upload Θ^(0)."""
        return self.initialisation.learner

    def waiting_for(self) -> str:
        """What is missing, for people, while nothing can proceed; empty otherwise."""
        if self.complete:
            return ""
        if not self.initialised:
            return self.initialisation.waiting_for()
        if self.scheduler.halted:
            return f"manual action: {self.scheduler.halted}; {AFTER_HALT}"
        if end := self.durability.waiting_for():
            return end
        training = len(self.learners.training())
        if training < self.spec.quorum:
            text = f"a quorum of {self.spec.quorum} (learners training: {training})"
            ejected = [
                f"{r.name} ({r.ejection.reason})" for r in self.learners.ejected() if r.ejection
            ]
            return f"{text}; ejected: {', '.join(ejected[:8])}" if ejected else text
        return self.scheduler.unchanged_for() or self._stuck()

    def _stuck(self) -> str:
        """Why there was no merge for longer than anything explains; empty: it is not that long."""
        if self._now is None:
            return ""
        between = self.spec.interval / self.spec.fragments + self.spec.overlap
        step_seconds = self.learners.quorum_step_seconds(self.spec.quorum)
        seconds = self._now - self._merge_missing_since()
        if seconds <= STUCK_SECONDS + STUCK_STEPS * between * step_seconds:
            return ""
        if not self.scheduler.in_flight:
            return f"a learner to make a step; no round began for {seconds:.0f} s"
        oldest = self.scheduler.in_flight[0]
        text = (
            f"a merge of fragment {oldest.fragment} (step {oldest.step}, {oldest.phase.value}); "
            f"there was none for {seconds:.0f} s"
        )
        return f"{text}; last failure: {oldest.failure}" if oldest.failure else text

    # ------------------------------------------------------------ membership

    def _limits_changed(self, event: ev.LimitsChanged, now: float) -> list[ev.Decision]:
        """Learners beyond the new limits leave as if they had closed their session."""
        if event.learners == self.limits:
            return []
        self._limits = event.learners
        out: list[ev.Decision] = [
            ev.Log(event="limits", fields={"learners": event.learners, "step": self.step})
        ]
        for record in list(self.learners.connected()):
            if detail := beyond(record.name, event.learners):
                out += self._close(record, detail, "Removed", now, charged=False)
        return out

    def _hello(self, event: ev.Hello, now: float) -> list[ev.Decision]:
        if self._limits is not None and (detail := beyond(event.learner, self._limits)):
            # The limits have changed since it was admitted.
            return refusal(event, "Unavailable", detail)
        if detail := self.learners.implausible(event, now):
            return refusal(event, "Protocol", detail)
        admitted = self.learners.admit(event, now=now)
        if admitted is None:
            current = self.learners.by_name[event.learner].incarnation
            detail = (
                f"incarnation {event.incarnation} of {event.learner} was replaced by {current}; "
                "this process must stop"
            )
            return refusal(event, "StaleIncarnation", detail)
        record, replaced = admitted
        record.joined_round = self.step
        out: list[ev.Decision] = []
        if replaced is not None:
            detail = f"{event.learner} joined again as incarnation {record.incarnation}"
            out.append(ev.Close(session=replaced, reason="StaleIncarnation", detail=detail))
            out += self.scheduler.lost(event.learner, "Replaced", now)
        age = self.step - event.checkpoint_step
        fresh, interval = event.fresh and self.initialised, self.spec.interval
        use_checkpoint = fresh and event.checkpoint_step > 0 and 0 <= age <= interval
        known = self.learners if fresh and not use_checkpoint else None
        out += [
            ev.Log(
                event="join",
                fields={
                    "learner": record.name,
                    "incarnation": record.incarnation,
                    "step": self.step,
                    "fresh": event.fresh,
                    "localStep": record.local_step,
                    "peer": event.peer,
                    "certificate": event.certificate,
                },
            ),
            ev.Admit(
                session=event.session, learner=record.name, incarnation=record.incarnation,
                local_step=record.local_step, use_checkpoint=use_checkpoint, total_tokens=record.total_tokens,
                peers=peers.offered(known, record, step=self.step, interval=interval),
            ),
        ]  # fmt: skip
        out += self.blocks.joined(record.name, record.incarnation)
        out += self.ejections.joined(record, now)
        self.initialisation.withdraw(record.name)  # the request went to the old session: repeat it
        self.initialisation.joined(record.name)
        self._announcements.forget(record.name)
        if self.initialised:
            out.append(ev.AnnounceReady(learner=record.name))
        if self.complete:
            out.append(ev.AnnounceComplete(learner=record.name))
        return out

    def _close(
        self, record: LearnerRecord, detail: str, reason: str, now: float, *, charged: bool = True
    ) -> list[ev.Decision]:
        """End the learner's session, if it has one, as if it had left for this reason; it connects again."""
        if record.session is None:
            return []
        close = ev.Close(session=record.session, reason="Unavailable", detail=detail)
        left = ev.Left(session=record.session, learner=record.name, reason=reason)
        return [close, *self._left(left, now, charged=charged)]

    def _left(self, event: ev.Left, now: float, *, charged: bool = True) -> list[ev.Decision]:
        record = self.learners.leave(event.learner, event.session)
        if record is None:
            return []
        ended = self.ejections.left(record)
        self.initialisation.withdraw(record.name)
        self._announcements.forget(record.name)
        fields = {"learner": record.name, "incarnation": record.incarnation, "reason": event.reason}
        log = ev.Log(event="leave", fields=fields)
        lost = self.scheduler.lost(record.name, event.reason, now, charged=charged)
        return [log, *ended, *self.blocks.left(record.name, event.reason, now), *lost]

    def _reported(self, event: ev.Reported, now: float) -> list[ev.Decision]:
        current = self.learners.of_session(event.learner, event.session) is not None
        if current and (detail := self.learners.implausible(event, now)):
            left = ev.Left(session=event.session, learner=event.learner, reason="Protocol")
            return [*refusal(event, "Protocol", detail), *self._left(left, now)]
        steps = self.learners.report(event, now=now)
        if steps is not None:
            record = self.learners.by_name[event.learner]
            # A step that was announced before a cut would show how long the cut was, not the round trip.
            if event.global_step >= record.joined_round:
                record.lag = lag_of(
                    record.lag, started=self.scheduler.pace.step, global_step=event.global_step
                )
            self.learners.expire_confirmation(
                record, CONFIRMED_INTERVALS * self.spec.interval + CONFIRMED_STEPS
            )
            self._announcements.touch(event.learner)
            if steps:
                self.blocks.stepped(event.learner, now)
            self.ejections.reported(event.learner, now)
            if self.learners.paces(record, now):
                self.scheduler.pace.stepped(event.learner, steps)
            return self.scheduler.reported(event.learner, now)
        return []

    def _blocks_stated(self, event: ev.BlocksStated, now: float) -> list[ev.Decision]:
        record = self.learners.of_session(event.learner, event.session)
        if record is None:
            return []
        if detail := self.blocks.conflict(event) or self.learners.implausible(event, now):
            left = ev.Left(session=event.session, learner=event.learner, reason="Config")
            return [*refusal(event, "Config", detail), *self._left(left, now)]
        return self.blocks.stated(event, incarnation=record.incarnation, now=now)

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> list[ev.Decision]:
        record = self.learners.of_session(event.learner, event.session)
        if record is not None:
            record.last_seen = now
        return []

    def _initialised(self, event: ev.Initialised, now: float) -> list[ev.Decision]:
        if self.initialised:
            return []
        self.initialised, self._mergeless_at = True, now
        self.initialisation.learner = None
        self.initialisation.waiting.clear()
        ready = [ev.AnnounceReady(learner=record.name) for record in self.learners.connected()]
        return [
            ev.Log(event="initialised", fields={"learner": event.learner}),
            *self.durability.snapshot(self.step),
            *ready,
        ]

    def _initial_failed(self, event: ev.InitialFailed) -> list[ev.Decision]:
        out = self.initialisation.fail(event.learner, event.reason, event.detail)
        record = self.learners.by_name.get(event.learner)
        if out and record is not None and record.session is not None:
            close = ev.Close(session=record.session, reason=event.reason, detail=event.detail)
            return [*out, close]
        return out

    def _tick(self, now: float) -> list[ev.Decision]:
        out: list[ev.Decision] = []
        limit = HEARTBEAT_SECONDS * LATE_HEARTBEATS
        for record in list(self.learners.connected()):
            if (silent := now - record.last_seen) > limit:
                detail = f"nothing received from {record.name} for {silent:.1f} s; connect again"
                out += self._close(record, detail, "HeartbeatLate", now)
        self.learners.note_hanging(now)
        out += self.initialisation.tick(now)
        out += self.durability.tick(self.step, now)
        return [*out, *self.scheduler.tick(now)]

    # ------------------------------------------------------------ uploads and failures

    def _progress(self, event: ev.Progress, now: float) -> list[ev.Decision]:
        if event.round == 0:
            self.initialisation.progressed(event.learner, event.received_bytes, now)
            return []
        probed = self.ejections.progressed(event, now)
        return self.scheduler.progressed(event, now) if probed is None else probed

    def _dropped(self, event: ev.Dropped, now: float) -> list[ev.Decision]:
        probed = self.ejections.probed(event.learner, event.round, event.attempt)
        if probed is not None:
            counts = event.reason != ev.STREAM_BROKEN
            return self.ejections.end_probe(probed, now, counts=counts)
        return self.scheduler.dropped(event, now)

    def _failed(self, event: ev.Failed, now: float) -> list[ev.Decision]:
        """
        A decision could not be carried out: repeat what it was part of.

        Raises:
            RuntimeError: nothing that can be repeated; the state in memory cannot be trusted.
        """
        decision, reason = event.decision, event.reason
        log = ev.Log(event="error", fields={"decision": type(decision).__name__, "reason": reason})
        match decision:
            case ev.BeginMerge() if event.learner:
                return [log, *self.scheduler.unreceived(decision, event.learner, reason, now)]
            case ev.Pull() | ev.BeginMerge():
                retried = self.scheduler.retry(decision.round, decision.attempt, reason, now)
                return [log, *retried]
            case ev.AnnounceFragments():
                for name in decision.learners:
                    self._announcements.forget(name)
                return [log]
            case ev.ProbeLearner():
                record = self.ejections.probed(decision.learner, decision.round, decision.attempt)
                if record is None:
                    return [log]
                return [log, *self.ejections.end_probe(record, now, counts=False)]
            case ev.TakeSnapshot():
                done = ev.SnapshotDone(step=None, reason=reason)
                self.scheduler.growth.snapshot_done(durable=False)
                return [log, *self.durability.snapshot_done(done, self.step, now)]
            case ev.Finish():
                self.durability.export_failed(reason, now)
                return [log]
            case (
                ev.Admit()
                | ev.RequestInitial()
                | ev.AnnounceReady()
                | ev.AnnounceComplete()
                | ev.LeaseBlocks()
            ):
                return [log, *self._start_session_over(decision.learner, reason, now)]
            case ev.Log():
                return []  # the journal counts the lines that it lost
        raise RuntimeError(f"{type(decision).__name__} failed: {reason}")

    def _start_session_over(self, learner: str, reason: str, now: float) -> list[ev.Decision]:
        record = self.learners.by_name.get(learner)
        if record is None:
            return []
        detail = f"the syncer could not serve this session: {reason}; connect again"
        return self._close(record, detail, "Unavailable", now, charged=False)

    # ------------------------------------------------------------ progress

    def _advance(self, now: float) -> list[ev.Decision]:
        """Everything that follows from the current state: initialise, start, collect, finish, announce, wake."""
        if not self.initialised:
            return [*self._initialise(now), ev.WakeAt(seconds=now + HEARTBEAT_SECONDS)]
        out = [*self._snapshot_if_due(), *self.ejections.tick(now)]
        self.scheduler.start_steps(now)
        out += self.scheduler.collect(now)
        ended = self.step >= self.spec.steps and not self.scheduler.in_flight
        if ended and self.durability.stage is Stage.TRAINING:
            out += self.durability.reached_end(self.step)
        out += self._announcements.update(
            self.learners,
            in_flight=[r.fragment for r in self.scheduler.in_flight if r.may_pull],
            step=self.step,
            started=self.scheduler.pace.step,
        )
        times = [now + HEARTBEAT_SECONDS, *self.scheduler.deadlines(now)]
        times += self.ejections.deadlines(now)
        if self.durability.retry_at is not None:
            times.append(self.durability.retry_at)
        out.append(ev.WakeAt(seconds=min(times)))
        return out

    def _snapshot_if_due(self) -> list[ev.Decision]:
        """After all commits of an event: a snapshot holds the engine and Θ as of the same step."""
        if self.durability.stage is not Stage.TRAINING or self._commits == self.scheduler.commits:
            return []
        self._commits = self.scheduler.commits
        return self.durability.committed(self.step)

    def _initialise(self, now: float) -> list[ev.Decision]:
        """Ask the next learner for Θ^(0), or make room for one with another model."""
        connected = list(self.learners.connected())
        names = [record.name for record in connected]
        self.initialisation.expire(names, now)
        if not (first := self.initialisation.preceding(names)):
            return self.initialisation.request(names, now)
        out: list[ev.Decision] = []
        for record in connected:
            detail = (
                f"no learner that joined has uploaded the initial parameters, so the model of {first}, which "
                f"waits with another one, counts now; {record.name} connects again"
            )
            out += self._close(record, detail, "OtherModel", now)
        return out

    def waits(self, learner: str) -> None:
        """The learner retries, because it trains a different model than those that joined."""
        if self._now is not None:
            self.initialisation.wait(learner, self._now)

    def _exported(self) -> list[ev.Decision]:
        if self.durability.stage is not Stage.EXPORT:
            return []
        more = {} if self.scheduler.parameters_changed else {"unchanged": True}
        return [
            *self.durability.exported(),
            ev.Log(event="complete", fields={"step": self.step, "tokens": self.tokens, **more}),
            *(ev.AnnounceComplete(learner=r.name) for r in self.learners.connected()),
        ]

    # ------------------------------------------------------------ state that outlives the process

    def to_json(self) -> dict[str, Any]:
        """What a snapshot must hold besides Θ and momentum."""
        return {
            "step": self.step,
            "merges": self.scheduler.merges,
            "members": self.learners.to_json(),
            "halted": self.scheduler.halted,
            "parametersChanged": self.scheduler.parameters_changed,
            "blocks": self.blocks.to_json(),
        }

    @classmethod
    def resume(
        cls, spec: RunSpec, *, epoch: int, state: dict[str, Any], exported: bool = False
    ) -> Engine:
        """
        The engine as `to_json` described it, in a new epoch.

        Args:
            spec: of the job; T may have been raised since.
            epoch: of this process.
            state: from the newest snapshot, so it is durable.
            exported: the model of that step is written.
        """
        engine = cls(
            spec=spec,
            epoch=epoch,
            start_step=int(state["step"]),
            initialised=True,
            exported=exported,
            learners=LearnerRecords.from_json(state["members"]),
            blocks=BlockLedger.from_json(state.get("blocks")),  # older snapshots have none
        )
        engine.scheduler.merges = int(state["merges"])
        engine.scheduler.halted = str(state.get("halted", ""))  # older snapshots have none
        engine.scheduler.parameters_changed = bool(state.get("parametersChanged", True))
        engine.durability.durable_step = engine.step
        return engine

    def staleness(self, record: LearnerRecord) -> int:
        """Global steps since this learner was last part of a merge."""
        return self.step - record.merged_round
