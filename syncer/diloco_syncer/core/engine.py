"""
Algorithm 2 of the paper as a state machine: `handle(event, now) -> decisions`.

Pure: no clock, socket, file or thread. The server runs it, and the tests run it in virtual time.

Rules kept here, and nowhere else:
  1. Only one round collects reports at a time, the oldest; at most τ are in flight; commits happen in order.
  2. A report is merged at most once, and never below K reports (also when members are lost on the way).
  3. Nothing of an older incarnation or session reaches a merge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco.fragments import due
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.members import Member, Members
from diloco_syncer.core.outer import weight
from diloco_syncer.core.round import Phase, Round, merge_line
from diloco_syncer.core.schedule import Grace, Pace

HEARTBEAT_SECONDS = 2.0
"""How often a learner says something at least."""

LATE_HEARTBEATS = 3
"""So many intervals without a word: the learner is gone (decision 12)."""

RETRY_SECONDS = 0.05
RETRY_MOST_SECONDS = 5.0
"""An attempt that left fewer than K members is repeated after this, doubled each time, at most that."""

ANSWER_SECONDS = 30.0
"""How long a member may take from the pull to its upload's header."""


@dataclass(slots=True)
class Engine:
    """The syncer's decisions. `step` is the global step t: the last one that is done."""

    spec: RunSpec
    epoch: int
    step: int = 0
    initialised: bool = False
    """Θ exists."""
    members: Members = field(default_factory=Members)
    rounds: list[Round] = field(default_factory=list)
    """In flight, oldest first."""
    pace: Pace = field(init=False)
    grace: Grace = field(init=False)
    initialiser: str | None = None
    complete: bool = False
    merges: int = 0
    last_members: int = 0
    last_merge_at: float | None = None
    last_window_seconds: float = 0.0
    _announced: tuple[int, tuple[int, ...]] = (-1, ())
    _snapshot_running: bool = False
    _snapshot_wanted: bool = False
    _snapshot_step: int = 0

    def __post_init__(self) -> None:
        self.pace = Pace(step=self.step)
        self.grace = Grace(
            overlap=self.spec.overlap,
            max_steps=self.spec.grace_max_steps,
            safety=self.spec.grace_safety,
        )
        self._snapshot_step = self.step
        self.complete = self.initialised and self.step >= self.spec.steps

    # ------------------------------------------------------------ entry

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        """
        Take one fact in and say what follows.

        Args:
            event: what happened.
            now: monotonic seconds; never smaller than in the call before.

        Returns:
            Decisions, to be carried out in this order.
        """
        return [*self._take_in(event, now), *self._advance(now)]

    def _take_in(self, event: ev.Event, now: float) -> list[ev.Decision]:
        match event:
            case ev.Hello():
                return self._hello(event, now)
            case ev.Left():
                return self._left(event, now)
            case ev.Reported():
                return self._reported(event, now)
            case ev.Heard():
                return self._heard(event, now)
            case ev.Initialised():
                return self._initialised(event)
            case ev.Answered():
                return self._answered(event, now)
            case ev.Progressing():
                return self._progressing(event, now)
            case ev.Dropped():
                return self._dropped(event, now)
            case ev.Merged():
                return self._merged(event, now)
            case ev.SnapshotDone():
                return self._snapshot_done()
            case ev.Tick():
                return self._tick(now)

    @property
    def tokens(self) -> int:
        """Tokens trained by all learners, as far as they reported."""
        return sum(m.total_tokens for m in self.members)

    def waiting_for(self) -> str:
        """One sentence for people when nothing can proceed; empty otherwise."""
        if self.complete:
            return ""
        if not self.initialised:
            who = self.initialiser or "the first learner"
            return f"{who} to upload the initial model"
        training = len(self.members.training())
        if training < self.spec.quorum:
            return f"{self.spec.quorum} training learners for the quorum; there are {training}"
        return ""

    # ------------------------------------------------------------ membership

    def _hello(self, event: ev.Hello, now: float) -> list[ev.Decision]:
        admitted = self.members.admit(event, now=now)
        if admitted is None:
            living = self.members.by_name[event.learner].incarnation
            detail = (
                f"incarnation {event.presented_incarnation} of {event.learner} was replaced by {living}; "
                "this process must stop"
            )
            return [
                ev.Close(session=event.session, reason="StaleIncarnation", detail=detail),
                ev.Log(
                    event="refuse",
                    fields={
                        "learner": event.learner,
                        "reason": "StaleIncarnation",
                        "detail": detail,
                    },
                ),
            ]
        member, replaced = admitted
        out: list[ev.Decision] = []
        if replaced is not None:
            detail = f"{event.learner} joined again as incarnation {member.incarnation}"
            out.append(ev.Close(session=replaced, reason="StaleIncarnation", detail=detail))
            out += self._lost(event.learner, "Replaced", now)
        fresh = event.presented_incarnation == 0
        age = self.step - event.checkpoint_step
        use_checkpoint = fresh and self.initialised and 0 <= age <= self.spec.interval
        out += [
            ev.Log(
                event="join",
                fields={
                    "learner": member.name,
                    "incarnation": member.incarnation,
                    "step": self.step,
                    "fresh": fresh,
                    "localStep": member.local_step,
                },
            ),
            ev.Admit(
                session=event.session,
                learner=member.name,
                incarnation=member.incarnation,
                local_step=member.local_step,
                use_checkpoint=use_checkpoint and event.checkpoint_step > 0,
                total_tokens=member.total_tokens,
            ),
        ]
        self.pace.join(member.name)
        if self.initialiser == member.name:
            self.initialiser = None  # the session that was asked is over: ask this one
        self._announced = (-1, ())  # the newcomer has not heard it
        if self.initialised:
            out.append(ev.SayReady(learner=member.name))
        if self.complete:
            out.append(ev.SayComplete(learner=member.name))
        return out

    def _left(self, event: ev.Left, now: float) -> list[ev.Decision]:
        member = self.members.leave(event.learner, event.session)
        if member is None:
            return []
        self.pace.leave(member.name)
        if self.initialiser == member.name:
            self.initialiser = None
        log = ev.Log(
            event="leave",
            fields={
                "learner": member.name,
                "incarnation": member.incarnation,
                "reason": event.reason,
            },
        )
        return [log, *self._lost(member.name, event.reason, now)]

    def _reported(self, event: ev.Reported, now: float) -> list[ev.Decision]:
        taken = self.members.report(event, now=now)
        if taken is not None:
            member, moved = taken
            self.pace.stepped(member.name, moved)
        return []

    def _heard(self, event: ev.Heard, now: float) -> list[ev.Decision]:
        member = self.members.of_session(event.learner, event.session)
        if member is not None:
            member.heard = now
        return []

    def _initialised(self, event: ev.Initialised) -> list[ev.Decision]:
        if self.initialised:
            return []
        self.initialised = True
        self.initialiser = None
        ready: list[ev.Decision] = [ev.SayReady(learner=m.name) for m in self.members.connected()]
        return [
            ev.Log(event="initialised", fields={"learner": event.learner}),
            *self._snapshot(),
            *ready,
        ]

    def _tick(self, now: float) -> list[ev.Decision]:
        out: list[ev.Decision] = []
        limit = HEARTBEAT_SECONDS * LATE_HEARTBEATS
        for member in self.members.connected():
            silent = now - member.heard
            if silent > limit and member.session is not None:
                session = member.session
                detail = f"nothing heard from {member.name} for {silent:.1f} s; connect again"
                out.append(ev.Close(session=session, reason="Unavailable", detail=detail))
                out += self._left(
                    ev.Left(session=session, learner=member.name, reason="HeartbeatLate"), now
                )
        for round_ in list(self.rounds):
            late = round_.deadline is not None and now >= round_.deadline
            if round_.phase is Phase.PULLING and late:
                attempt = round_.attempt
                for name in [n for n in round_.previous if n not in round_.answers]:
                    # Dropping one may have begun another attempt, in which nobody is late yet.
                    if (round_.phase, round_.attempt) == (Phase.PULLING, attempt):
                        out += self._drop(round_, name, "AnswerLate", now)
        return out

    # ------------------------------------------------------------ rounds

    def _answered(self, event: ev.Answered, now: float) -> list[ev.Decision]:
        round_ = self._round(event.round, event.attempt)
        if round_ is None or round_.phase is not Phase.PULLING:
            return []
        if event.learner not in round_.previous:
            return []
        member = self.members.by_name[event.learner]
        if member.incarnation != event.incarnation:
            return []
        if event.local_step <= round_.previous[event.learner]:
            reason = f"t_m {event.local_step} was merged before"
            return self._drop(round_, event.learner, reason, now)
        member.pulled_step = max(member.pulled_step, event.local_step)
        round_.answers[event.learner] = event
        return self._merge_if_answered(round_, now)

    def _progressing(self, event: ev.Progressing, now: float) -> list[ev.Decision]:
        round_ = self._round(event.round, event.attempt)
        if (
            round_ is not None
            and round_.phase is Phase.PULLING
            and event.learner in round_.previous
        ):
            # A whole fragment over a thin link may take minutes; silence may not.
            round_.deadline = now + ANSWER_SECONDS
        return []

    def _merge_if_answered(self, round_: Round, now: float) -> list[ev.Decision]:
        if set(round_.answers) != set(round_.previous):
            return []
        facts = tuple(self._facts(round_.answers[name]) for name in sorted(round_.answers))
        round_.deadline = None
        if all(f.weight == 0 for f in facts):
            round_.phase = Phase.MERGED
            round_.merged = ev.Merged(
                round=round_.step,
                attempt=round_.attempt,
                delta_norm=0.0,
                bytes_up=0,
                bytes_result=0,
            )
            abort = ev.AbortMerge(
                round=round_.step, attempt=round_.attempt, reason="all weights are zero"
            )
            return [abort, *self._commit_in_order(now)]
        round_.phase = Phase.MERGING
        return [
            ev.BeginMerge(
                round=round_.step, attempt=round_.attempt, fragment=round_.fragment, members=facts
            )
        ]

    @staticmethod
    def _facts(answer: ev.Answered) -> ev.MemberFacts:
        return ev.MemberFacts(
            learner=answer.learner,
            incarnation=answer.incarnation,
            local_step=answer.local_step,
            steps=answer.steps,
            tokens=answer.tokens,
            weight=weight(tokens=answer.tokens, steps=answer.steps),
            base=answer.base,
        )

    def _dropped(self, event: ev.Dropped, now: float) -> list[ev.Decision]:
        round_ = self._round(event.round, event.attempt)
        if round_ is None or event.learner not in round_.previous:
            return []
        log = ev.Log(
            event="refuse",
            fields={
                "learner": event.learner,
                "reason": event.reason,
                "detail": event.detail,
                "step": round_.step,
                "fragment": round_.fragment,
            },
        )
        return [log, *self._drop(round_, event.learner, event.reason, now, consumed=True)]

    def _lost(self, learner: str, reason: str, now: float) -> list[ev.Decision]:
        """
        A learner is gone: take it out of every round that is not yet committed.

        Also out of one that is merged and only waits for its turn: it must not commit after a successor has joined.
        """
        out: list[ev.Decision] = []
        for round_ in list(self.rounds):
            if learner in round_.previous and not round_.open:
                out += self._drop(round_, learner, reason, now)
        return out

    def _drop(
        self, round_: Round, learner: str, reason: str, now: float, *, consumed: bool = False
    ) -> list[ev.Decision]:
        """Go on without one member: same attempt, next attempt, or back to collecting."""
        before = round_.previous.pop(learner)
        round_.answers.pop(learner, None)
        if not consumed:
            self.members.by_name[learner].pulled_step = before
        out: list[ev.Decision] = []
        if round_.phase is Phase.PULLING and len(round_.previous) >= self.spec.quorum:
            return self._merge_if_answered(round_, now)
        out.append(ev.AbortMerge(round=round_.step, attempt=round_.attempt, reason=reason))
        if len(round_.previous) >= self.spec.quorum:
            return [*out, *self._pull(round_, dict(round_.previous), now)]
        for name, step in round_.previous.items():
            self.members.by_name[name].pulled_step = step
        round_.previous.clear()
        round_.answers.clear()
        round_.phase = Phase.COLLECTING
        round_.retry_at = now + min(
            RETRY_MOST_SECONDS, RETRY_SECONDS * 2.0 ** min(round_.attempt, 16)
        )
        round_.attempt += 1
        round_.deadline = None
        round_.quorum_at = None
        return out

    def _merged(self, event: ev.Merged, now: float) -> list[ev.Decision]:
        round_ = self._round(event.round, event.attempt)
        if round_ is None or round_.phase is not Phase.MERGING:
            return []
        round_.phase = Phase.MERGED
        round_.merged = event
        return self._commit_in_order(now)

    def _commit_in_order(self, now: float) -> list[ev.Decision]:
        out: list[ev.Decision] = []
        while self.rounds and self.rounds[0].phase is Phase.MERGED:
            round_ = self.rounds.pop(0)
            out += self._commit(round_, now)
        return out

    def _commit(self, round_: Round, now: float) -> list[ev.Decision]:
        merged = round_.merged
        if merged is None:
            raise AssertionError("a round is merged without a result")
        facts = [self._facts(round_.answers[name]) for name in sorted(round_.answers)]
        changed = any(f.weight > 0 for f in facts)
        self._settle()
        self.merges += 1
        self.last_members = len(facts)
        self.last_merge_at = now
        self.grace.synced(now - round_.pulled_at)
        for fact in facts:
            member = self.members.by_name[fact.learner]
            member.merged_round = round_.step
            member.merges += 1
        receivers = len(self.members.connected())
        line = merge_line(
            round_, merged, facts, quorum=self.spec.quorum, receivers=receivers, now=now
        )
        out: list[ev.Decision] = [
            ev.Log(event="merge", fields=line),
            ev.Commit(
                round=round_.step,
                attempt=round_.attempt,
                fragment=round_.fragment,
                changed=changed,
            ),
        ]
        if self.step - self._snapshot_step >= self.spec.syncer_checkpoint.every_steps:
            out += self._snapshot()
        return out

    def _round(self, step: int, attempt: int) -> Round | None:
        for round_ in self.rounds:
            if round_.step == step and round_.attempt == attempt:
                return round_
        return None

    # ------------------------------------------------------------ going on

    def _advance(self, now: float) -> list[ev.Decision]:
        """Everything that follows from the state as it is: initialise, collect, start, finish, announce, wake."""
        out: list[ev.Decision] = []
        if not self.initialised:
            if self.initialiser is None and (connected := self.members.connected()):
                self.initialiser = connected[0].name
                out.append(ev.AskInitial(learner=self.initialiser))
            return [*out, ev.WakeAt(seconds=now + HEARTBEAT_SECONDS)]
        self._start_steps(now)
        out += self._collect(now)
        if not self.complete and not self.rounds and self.step >= self.spec.steps:
            self.complete = True
            out += [
                ev.Log(event="complete", fields={"step": self.step, "tokens": self.tokens}),
                ev.Finish(step=self.step),
            ]
        out += self._announce()
        out.append(ev.WakeAt(seconds=min([now + HEARTBEAT_SECONDS, *self._deadlines(now)])))
        return out

    def _deadlines(self, now: float) -> list[float]:
        """Of the rounds that move when they pass: one that waits behind an older collecting round does not."""
        collecting = next((r for r in self.rounds if r.open), None)
        moving = [r for r in self.rounds if r is collecting or r.phase is Phase.PULLING]
        times = [r.deadline for r in moving if r.deadline is not None]
        if collecting is not None and collecting.retry_at > now:
            times.append(collecting.retry_at)
        return times

    def _start_steps(self, now: float) -> None:
        """Start global steps as long as pace and τ allow; a step without a due fragment is done at once."""
        while (
            self.pace.step < self.spec.steps
            and len(self.rounds) < self.spec.overlap
            and self.pace.may_start()
        ):
            step = self.pace.start()
            fragment = self._due(step)
            if fragment is not None:
                self.rounds.append(Round(step=step, fragment=fragment, started=now))
            self._settle()

    def _settle(self) -> None:
        """t is the last global step before which nothing is in flight."""
        self.step = self.rounds[0].step - 1 if self.rounds else self.pace.step

    def _due(self, step: int) -> int | None:
        return due(step, num_fragments=self.spec.fragments, interval=self.spec.interval)

    def _collect(self, now: float) -> list[ev.Decision]:
        """Move the oldest round that still collects: quorum, grace, close (paper 3.2)."""
        round_ = next((r for r in self.rounds if r.open), None)
        if round_ is None or now < round_.retry_at:
            return []
        training = self.members.training()
        ready = [
            m
            for m in training
            if m.fresh and m.report is not None and round_.fragment in m.report.offers
        ]
        if len(ready) < self.spec.quorum:
            round_.phase, round_.deadline = Phase.COLLECTING, None
            return []
        if round_.phase is Phase.COLLECTING:
            round_.phase = Phase.GRACE
            round_.quorum_at = now
            self.grace.reached_quorum(now - round_.started)
            self.last_window_seconds = self.grace.window(self.members.fastest_step_seconds())
            round_.deadline = now + self.last_window_seconds
        everyone = len(ready) == len(training)
        if not everyone and round_.deadline is not None and now < round_.deadline:
            return []
        round_.grace_seconds = now - (round_.quorum_at or now)
        return self._pull(round_, {m.name: m.pulled_step for m in ready}, now)

    def _pull(self, round_: Round, previous: dict[str, int], now: float) -> list[ev.Decision]:
        round_.phase = Phase.PULLING
        round_.attempt += 1
        round_.previous = previous
        round_.answers = {}
        round_.pulled_at = now
        round_.deadline = now + ANSWER_SECONDS
        for name in previous:
            member = self.members.by_name[name]
            if member.report is not None:
                member.pulled_step = max(member.pulled_step, member.report.local_step)
        return [
            ev.PullFrom(
                round=round_.step,
                attempt=round_.attempt,
                fragment=round_.fragment,
                learners=tuple(sorted(previous)),
            )
        ]

    def _announce(self) -> list[ev.Decision]:
        """Which fragments may be asked for next: those of rounds in flight, then of the steps to come."""
        fragments = [r.fragment for r in self.rounds if r.askable]
        step = self.pace.step
        while len(fragments) <= self.spec.overlap and step < self.spec.steps:
            step += 1
            fragment = self._due(step)
            if fragment is not None:
                if fragment in fragments:
                    break
                fragments.append(fragment)
        news = (self.step, tuple(fragments))
        if news == self._announced:
            return []
        self._announced = news
        return [ev.Announce(step=self.step, fragments=news[1])]

    # ------------------------------------------------------------ snapshots

    def _snapshot(self) -> list[ev.Decision]:
        if self._snapshot_running:
            self._snapshot_wanted = True
            return []
        self._snapshot_running = True
        self._snapshot_step = self.step
        return [ev.TakeSnapshot(step=self.step)]

    def _snapshot_done(self) -> list[ev.Decision]:
        self._snapshot_running = False
        wanted, self._snapshot_wanted = self._snapshot_wanted, False
        return self._snapshot() if wanted and not self.complete else []

    # ------------------------------------------------------------ state that outlives the process

    def to_json(self) -> dict[str, Any]:
        """What a snapshot must hold besides Θ and momentum."""
        return {"step": self.step, "merges": self.merges, "members": self.members.to_json()}

    @classmethod
    def resume(cls, spec: RunSpec, *, epoch: int, state: dict[str, Any]) -> Engine:
        """The engine as it was when `to_json` was taken, in a new epoch."""
        engine = cls(
            spec=spec,
            epoch=epoch,
            step=int(state["step"]),
            initialised=True,
            members=Members.from_json(state["members"]),
        )
        engine.merges = int(state["merges"])
        return engine

    def staleness(self, member: Member) -> int:
        """Global steps since this learner was last part of a merge."""
        return self.step - member.merged_round
