"""
The engine of a replay: rounds, members and counters as the tape has them (paper E.1). Pure.

Clock, pace, quorum, grace window and lateness decide nothing. What is left is causality:

    a round begins         when fewer than τ are in flight, none of them of its fragment
    it pulls its members   when each has reported the step that was merged, and all learners are as far as they were
    a learner is shown     a version that it applied, when its merged copies of before have arrived
    a process gets Ready   when every version exists that it began with; results once it has reported, so has begun
    an epoch begins        when all merges of the one before it are committed, those that its snapshot lacks included

Nothing that a member cannot deliver can be replaced: the round is repeated with the same members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from diloco.journal.records import Merge
from diloco.journal.replay import Life, Peer, Plan, Result
from diloco.journal.replay_epochs import Epoch, Version
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.durability import Stage
from diloco_syncer.core.engine import HEARTBEAT_SECONDS, Engine
from diloco_syncer.core.learners import LearnerRecord, refusal
from diloco_syncer.core.rounds import Phase, Round
from diloco_syncer.core.scheduler import Scheduler


class TapeScheduler(Scheduler):
    """
    The rounds of one epoch of a plan.

    Args:
        epoch: of the syncer.
        engine: has spec and learners.
    """

    __slots__ = ("_next", "_plan")

    def __init__(self, epoch: Epoch, engine: Engine) -> None:
        super().__init__(engine.spec, engine.learners, epoch.step)
        self._plan = {merge.step: merge for merge in epoch.rounds}
        self._next = deque(epoch.rounds)
        self.merges = len(epoch.made_in)

    def merge(self, step: int) -> Merge:
        """That of this global step."""
        return self._plan[step]

    @property
    def done(self) -> bool:
        """Whether all rounds are committed."""
        return not (self._next or self.in_flight)

    def start_steps(self, now: float) -> None:
        """See `Scheduler.start_steps`."""
        while self._next and len(self.in_flight) < self.spec.overlap:
            merge = self._next[0]
            if any(round_.fragment == merge.fragment for round_ in self.in_flight):
                break
            self._next.popleft()
            self.in_flight.append(Round(step=merge.step, fragment=merge.fragment, started=now))
            self.pace.step = merge.step
        self._settle()

    def ends(self, step: int) -> None:
        """All rounds are done: no fragment is due up to this global step."""
        if self.done:
            self.pace.step = max(self.pace.step, step)
            self._settle()

    def collect(self, now: float) -> list[ev.Decision]:
        """Pull the members of every round whose learners are as far as they were."""
        out: list[ev.Decision] = []
        for round_ in self.in_flight:
            merge = self._plan[round_.step]
            if round_.open and now >= round_.retry_at and self._reached(merge):
                round_.quorum_at = round_.quorum_at or now
                out += self._pull(round_, sorted(m.learner for m in merge.members), now)
        return out

    def _reached(self, merge: Merge) -> bool:
        records = self.learners.by_name
        for member in merge.members:
            record = records.get(member.learner)
            report = record.report if record is not None else None
            if report is None or report.local_step < member.step:
                return False
        clock: Mapping[str, int] = merge.clock or {}
        return all(
            local_step == 0 or (name in records and records[name].local_step >= local_step)
            for name, local_step in clock.items()
        )

    def contributed(self, event: Contribution, now: float) -> list[ev.Decision]:
        """With the counters of the tape: of which a report is credited depends on the time."""
        round_ = self._round(event.round, event.attempt)
        if round_ is None or round_.phase is not Phase.PULLING:
            return []
        merge = self._plan[round_.step]
        member = next((m for m in merge.members if m.learner == event.learner), None)
        if member is None or event.learner not in round_.members:
            return []
        credited = replace(event, steps=int(member.steps), tokens=int(member.tokens))
        round_.contributed(credited, now)
        return self._merge_if_complete(round_, now)

    def dropped(self, event: ev.Dropped, now: float) -> list[ev.Decision]:
        """A member cannot deliver: the same again."""
        log = ev.Log(
            event="refuse",
            fields={
                "learner": event.learner, "reason": event.reason, "detail": event.detail, "step": event.round,
            },
        )  # fmt: skip
        return [log, *self.retry(event.round, event.attempt, event.reason, now)]

    def unreceived(
        self, begin: ev.BeginMerge, learner: str, reason: str, now: float
    ) -> list[ev.Decision]:
        """As `dropped`."""
        return self.retry(begin.round, begin.attempt, reason, now)

    def lost(
        self, learner: str, reason: str, now: float, *, charged: bool = True
    ) -> list[ev.Decision]:
        """A member is gone: the same again, once it is back."""
        out: list[ev.Decision] = []
        for round_ in [r for r in self.in_flight if r.transferring and learner in r.members]:
            if not round_.members[learner].done:
                out += self.retry(round_.step, round_.attempt, reason, now)
        return out

    def reported(self, learner: str, now: float) -> list[ev.Decision]:
        """Reports count when a round is pulled."""
        return []

    def tick(self, now: float) -> list[ev.Decision]:
        """No member is late."""
        return []

    def _delivered(self, round_: Round, now: float) -> list[ev.Decision]:
        return []

    def deadlines(self, now: float) -> list[float]:
        """See `Scheduler.deadlines`."""
        return [r.retry_at for r in self.in_flight if r.open and r.retry_at > now]


@dataclass(slots=True, kw_only=True)
class _Process:
    """How far a process of a learner is."""

    life: Life
    results: dict[int, deque[Result]]
    """By fragment, those that it was not shown."""
    reached: dict[int, int] = field(default_factory=dict)
    """Fragment → local step at which it applies the version that it was shown last."""
    began: bool = False
    """It was shown the versions that it begins with."""
    ready: bool = False
    """Its session was sent Ready."""

    @classmethod
    def of(cls, life: Life) -> _Process:
        results: dict[int, deque[Result]] = {}
        for result in life.results:
            results.setdefault(result.fragment, deque()).append(result)
        return cls(life=life, results=results)


@dataclass(slots=True)
class ReplayEngine(Engine):
    """`Engine`, with the decisions of a plan."""

    plan: Plan = field(kw_only=True)
    _epochs: deque[Epoch] = field(init=False)
    """The present one and those that follow."""
    _committed: dict[int, Version] = field(default_factory=dict)
    """Fragment → the newest version that there was."""
    _processes: dict[str, _Process] = field(default_factory=dict)
    """By learner, the one that joined last."""
    _announced: dict[str, int] = field(default_factory=dict)
    """Learner → global step that was announced to it."""

    @classmethod
    def of(cls, spec: RunSpec, plan: Plan) -> Self:
        """The engine of a replay, in the first epoch of the run."""
        return cls(spec=spec, epoch=plan.epochs[0].number, plan=plan)

    def __post_init__(self) -> None:
        """Replace the scheduler."""
        Engine.__post_init__(self)
        self._epochs = deque(self.plan.epochs)
        self.scheduler = TapeScheduler(self._epochs[0], self)

    def members(self, step: int) -> Iterator[tuple[str, Version | None]]:
        """Members of the round of a global step in this epoch, and the bases of their deltas; None: sent whole."""
        epoch = self._epochs[0]
        for member in self._tape.merge(step).members:
            yield member.learner, epoch.base(member)

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        """See `Engine.handle`."""
        # Before the event that follows: the lines of the last one are of the epoch that ends.
        out = self._begin_epoch(now) if self._epoch_ends else []
        out += Engine.handle(self, event, now)
        for decision in out:
            if isinstance(decision, ev.Commit) and decision.changed:
                self._committed[decision.fragment] = (self.epoch, decision.round)
        if self.initialised:
            for record in self.learners.connected():
                out += self._show(record)
        return [*out, *self._announce_step()]

    @property
    def _tape(self) -> TapeScheduler:
        if not isinstance(self.scheduler, TapeScheduler):
            raise AssertionError("a replay without its scheduler")
        return self.scheduler

    @property
    def _epoch_ends(self) -> bool:
        return self.initialised and len(self._epochs) > 1 and self._tape.done

    def _begin_epoch(self, now: float) -> list[ev.Decision]:
        """
        The syncer was started again here: Θ is that of its snapshot, and learners connect again.

        They keep what they have applied, and are still shown what they applied later of the epoch that ends.
        """
        out: list[ev.Decision] = []
        self._epochs.popleft()
        begun = self._epochs[0]
        detail = f"the run had another syncer from here on: epoch {begun.number}; connect again"
        for record in list(self.learners.connected()):
            closed = self._close(record, detail, "Restarted", now, charged=False)
            # A syncer that was killed wrote no lines about it.
            out += [each for each in closed if isinstance(each, ev.Close)]
        for record in self.learners:
            record.merged_round = min(record.merged_round, begun.step)
        changed = self.scheduler.parameters_changed
        self.epoch, self.start_step, self._commits = begun.number, begun.step, 0
        self.scheduler = TapeScheduler(begun, self)
        self.scheduler.parameters_changed = changed
        self.durability.snapshot_step = begun.step
        return [*out, ev.BeginEpoch(versions=begun.versions, initial=begun.initial)]

    def _exists(self, fragment: int, version: Version) -> bool:
        return self._committed.get(fragment, self.plan.epochs[0].initial) >= version

    def _show(self, record: LearnerRecord) -> list[ev.Decision]:
        """The versions that a learner may have now."""
        learner, process = record.name, self._processes[record.name]
        out = list[ev.Decision]()
        if not process.ready:
            if not all(self._exists(*held) for held in process.life.held()):
                return []
            if not process.began:
                out += [
                    ev.ShowVersion(
                        learner=learner, fragment=fragment, version=version, announced=False
                    )
                    for fragment, version in process.life.held()
                ]
            process.began = process.ready = True
            out.append(ev.AnnounceReady(learner=learner))
        if record.report is None:
            return (
                out  # it may still download the model, and would get a newer version of a fragment
            )
        for fragment, results in process.results.items():
            # Not of the record: an earlier process may have made more steps than this one began with.
            while results and self._may_have(process, results[0], record.report.local_step):
                result = results.popleft()
                process.reached[fragment] = result.local_step
                out.append(
                    ev.ShowVersion(
                        learner=learner, fragment=fragment, version=result.version, announced=True
                    )
                )
        return out

    def _may_have(self, process: _Process, result: Result, local_step: int) -> bool:
        exists = self._exists(result.fragment, result.version)
        before = process.reached.get(result.fragment, 0)  # the inbox holds one version
        merged = (self.epoch, self.step) >= result.after
        return exists and merged and local_step >= before

    def _announce_step(self) -> list[ev.Decision]:
        """The global step: a learner copies a fragment again when what it copied before is merged."""
        names = [
            r.name for r in self.learners.connected() if self._announced.get(r.name) != self.step
        ]
        self._announced |= dict.fromkeys(names, self.step)
        if not names:
            return []
        return [ev.AnnounceFragments(learners=tuple(names), step=self.step, fragments=())]

    def _hello(self, event: ev.Hello, now: float) -> list[ev.Decision]:
        life = self.plan.lives.get((event.learner, event.restarts))
        if life is None:
            detail = f"the tape has no process of {event.learner} after {event.restarts} restarts"
            return refusal(event, "Config", detail)
        if life.peer is not None and not self._has_saved(life.peer):
            detail = f"{life.peer.learner} has not reached local step {life.peer.local_step}; connect again"
            return refusal(event, "Unavailable", detail)
        out = Engine._hello(self, event, now)
        if not any(isinstance(decision, ev.Admit) for decision in out):
            return out
        known = self._processes.get(event.learner)
        if known is None or known.life is not life:
            self._processes[event.learner] = _Process.of(life)
        self._processes[event.learner].ready = False
        self._announced.pop(event.learner, None)
        # AnnounceReady follows when the versions exist that it began with.
        kept = (decision for decision in out if not isinstance(decision, ev.AnnounceReady))
        return [self._recorded(each, life) if isinstance(each, ev.Admit) else each for each in kept]

    def _has_saved(self, peer: Peer) -> bool:
        record = self.learners.by_name.get(peer.learner)
        report = record.report if record is not None else None
        return report is not None and report.local_step >= peer.local_step

    def _recorded(self, admit: ev.Admit, life: Life) -> ev.Admit:
        begin, peer = life.process.begin, life.peer
        admit = replace(
            admit, local_step=begin.local_step, total_tokens=begin.tokens,
            use_checkpoint=begin.source == "checkpoint", peers=(),
        )  # fmt: skip
        if peer is None:
            return admit
        address = self.learners.by_name[peer.learner].peer_address
        return replace(admit, peers=(ev.PeerAddress(peer.learner, address),), step=peer.step)

    def _initialise(self, now: float) -> list[ev.Decision]:
        names = [r.name for r in self.learners.connected() if r.name == self.plan.initialiser]
        return self.initialisation.request(names, now)

    def _advance(self, now: float) -> list[ev.Decision]:
        if not self.initialised:
            return [*self._initialise(now), ev.WakeAt(seconds=now + HEARTBEAT_SECONDS)]
        if self._epoch_ends:
            return [ev.WakeAt(seconds=now)]
        newest = len(self._epochs) == 1
        # A snapshot of what the next epoch undoes would be of no use.
        out = self._snapshot_if_due() if newest else []
        self.scheduler.start_steps(now)
        out += self.scheduler.collect(now)
        if newest and self.plan.complete:
            self._tape.ends(self.spec.steps)
        ended = self.step >= self.spec.steps and not self.scheduler.in_flight
        if ended and self.durability.stage is Stage.TRAINING:
            out += self.durability.reached_end(self.step)
        times = [now + HEARTBEAT_SECONDS, *self.scheduler.deadlines(now)]
        if self.durability.retry_at is not None:
            times.append(self.durability.retry_at)
        return [*out, ev.WakeAt(seconds=min(times))]
