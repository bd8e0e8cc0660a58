"""
The rounds of a job (Algorithm 2 of the paper): which begin, whom they pull, when they merge and commit. Pure.

Only this module keeps these rules:
  1. Only one round collects reports at a time, the oldest; at most τ are in flight, each of another
     fragment; commits happen in order.
  2. A report is merged at most once, and never with fewer than K reports (also when members are lost).
  3. No member delays the others for longer than core/upload_limits.py allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.model.fragments import due, next_due
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core import upload_limits
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.ejection import Ejections
from diloco_syncer.core.growth import Growth
from diloco_syncer.core.guard import explained_members, guarded
from diloco_syncer.core.history import CountsDifferError
from diloco_syncer.core.learners import LearnerRecords
from diloco_syncer.core.pacing import PACE_LAG_STEPS, Grace, Pace
from diloco_syncer.core.readiness import Readiness
from diloco_syncer.core.rounds import Phase, Round, merge_line
from diloco_syncer.core.used_reports import UsedReports

UNCHANGED_ROUNDS = 8
"""
After this many rounds in a row without a change, the status reports it. Paper leaves this open: one such round
is possible when all members have just received the fragment.
"""

AFTER_HALT = "stop the learner that caused it, then choose the snapshot to continue from (docs/operations.md)"
"""What a person has to do."""


@dataclass(slots=True)
class Scheduler:
    """The rounds in flight. `step` is the global step t: the last one that is done."""

    spec: RunSpec
    learners: LearnerRecords
    step: int = 0
    in_flight: list[Round] = field(default_factory=list)
    """Oldest first."""
    pace: Pace = field(init=False)
    grace: Grace = field(init=False)
    ejections: Ejections = field(init=False)
    growth: Growth = field(default_factory=Growth)
    halted: str = ""
    """Why rounds may no longer begin, in this process or a later one; empty: rounds may."""
    commits: int = 0
    """In this process, those without a change of Θ included."""
    merges: int = 0
    last_members: int = 0
    last_merge_at: float | None = None
    """Of those that changed Θ."""
    last_window_seconds: float = 0.0
    unchanged: int = 0
    """Newest commits in a row that changed nothing: no member had a weight."""
    without_tokens: tuple[str, ...] = ()
    """Members of the last of them that reported no tokens, by name."""
    parameters_changed: bool = False
    """Whether a merge, of former processes too, had a delta of trained parameters that is not zero."""
    _readiness: Readiness = field(init=False)

    def __post_init__(self) -> None:
        self._readiness = Readiness(self.learners)
        self.pace = Pace(step=self.step)
        self.grace = Grace(
            overlap=self.spec.overlap,
            max_steps=self.spec.grace_max_steps,
            safety=self.spec.grace_safety,
        )
        self.ejections = Ejections(
            self.learners,
            self.pace,
            self.spec.quorum,
            hold_seconds=self.hold_seconds,
            free_seconds=self._free_seconds,
            sync_seconds=lambda: self.grace.sync_seconds or 0.0,
        )

    # ------------------------------------------------------------ begin and collect

    def start_steps(self, now: float) -> None:
        """Start global steps while pace and τ allow; a step without a due fragment is done at once."""
        while (
            not self.halted
            and self.pace.step < self.spec.steps
            and len(self.in_flight) < self.spec.overlap
            and self.pace.may_start()
        ):
            fragment = self.due(self.pace.step + 1)
            if any(round_.fragment == fragment for round_ in self.in_flight):
                return  # two rounds of one fragment would overwrite each other
            step = self.pace.start()
            if fragment is not None:
                self.in_flight.append(Round(step=step, fragment=fragment, started=now))
            self._settle()

    def _settle(self) -> None:
        """Set t: the last global step before which nothing is in flight."""
        self.step = self.in_flight[0].step - 1 if self.in_flight else self.pace.step

    def due(self, step: int) -> int | None:
        """The fragment of a global step; None: none is due."""
        return due(step, num_fragments=self.spec.fragments, interval=self.spec.interval)

    def next_due(self, step: int) -> int:
        """The first global step after this one that has a fragment."""
        return next_due(step, num_fragments=self.spec.fragments, interval=self.spec.interval)

    def collect(self, now: float) -> list[ev.Decision]:
        """Move the oldest round that still collects: quorum, grace, close (paper 3.2)."""
        round_ = next((r for r in self.in_flight if r.open), None)
        # A quorum that is lost again each time is none: it counts from the beginning of the round.
        repeated = next((now - r.started for r in self.in_flight[:1] if r.repeats), 0.0)
        if round_ is None or now < round_.retry_at:
            self.ejections.note_wait(repeated)
            return []
        ready = self._readiness.ready(round_.fragment)
        if len(ready) < self.spec.quorum:
            round_.phase, round_.deadline = Phase.COLLECTING, None
            self.ejections.note_wait(max(repeated, now - round_.started))
            return []
        self.ejections.note_wait(repeated)
        if round_.phase is Phase.COLLECTING:
            round_.phase = Phase.GRACE
            round_.quorum_at = now
            self.grace.reached_quorum(now - round_.started)
            self.last_window_seconds = self.grace.window(self.learners.fastest_step_seconds())
            round_.deadline = now + self.last_window_seconds
        complete = len(ready) == len(self.learners.training())
        if not complete and round_.deadline is not None and now < round_.deadline:
            return []
        round_.grace_seconds = now - (round_.quorum_at or now)
        return self._pull(round_, sorted(ready), now)

    def _pull(self, round_: Round, members: list[str], now: float) -> list[ev.Decision]:
        round_.pull(members, now)
        round_.clock = {r.name: r.local_step for r in self.learners.training()}
        for name in members:
            record = self.learners.by_name[name]
            if record.report is not None:
                self._used_reports(name).pull(round_.step, record.report.local_step)
        return [
            ev.Pull(
                round=round_.step,
                attempt=round_.attempt,
                fragment=round_.fragment,
                learners=tuple(sorted(members)),
            )
        ]

    # ------------------------------------------------------------ members

    def _used_reports(self, learner: str) -> UsedReports:
        """The claims of a learner, to be changed."""
        self._readiness.touch(learner)
        return self.learners.by_name[learner].used_reports

    def contributed(self, event: Contribution, now: float) -> list[ev.Decision]:
        """The header of a member's upload has arrived."""
        round_ = self._round(event.round, event.attempt)
        if round_ is None or round_.phase is not Phase.PULLING:
            return []
        if event.learner not in round_.members:
            return []
        record = self.learners.by_name[event.learner]
        if record.incarnation != event.incarnation:
            return []
        used_reports = self._used_reports(event.learner)
        if refused := used_reports.refused(round_.step, event.local_step):
            used_reports.spend(round_.step)
            log = _refusal(round_, event.learner, "ReportUsed", refused)
            # The same report is not pulled again, so that no pause grows.
            waited = round_.waited_seconds(
                event.learner, now, quorum=self.spec.quorum, pauses=False
            )
            waited -= self._window_seconds()
            ejected = self.ejections.waited(event.learner, waited, "ReportUsed", now)
            return [log, *ejected, *self._drop(round_, event.learner, refused, now)]
        try:
            credited = record.history.credit(event, round_.fragment)
        except CountsDifferError as error:
            return self._unusable(round_, event.learner, "CountsDiffer", str(error), now)
        if credited is None:
            round_.early[event.learner] = event
            return []
        used_reports.claim(round_.step, event.local_step)
        round_.contributed(credited.credited(self._most_steps), now)
        round_.update_hold(now, quorum=self.spec.quorum)
        return self._merge_if_complete(round_, now)

    def reported(self, learner: str, now: float) -> list[ev.Decision]:
        """A report has arrived: an upload that was faster than it may count now."""
        self._readiness.touch(learner)
        out: list[ev.Decision] = []
        for round_ in list(self.in_flight):
            if (early := round_.early.pop(learner, None)) is not None:
                out += self.contributed(early, now)
        return out

    @property
    def _most_steps(self) -> int:
        """c_steps that the schedule explains: H, and what the rounds in flight may add at both ends."""
        return self.spec.interval + 2 * self.spec.overlap + PACE_LAG_STEPS

    def progressed(self, event: ev.Progress, now: float) -> list[ev.Decision]:
        """A member's upload has come further."""
        round_ = self._round(event.round, event.attempt)
        if round_ is None or not round_.transferring or event.learner not in round_.members:
            return []
        round_.progressed(event, now)
        round_.update_hold(now, quorum=self.spec.quorum)
        return []

    def _delivered(self, round_: Round, now: float) -> list[ev.Decision]:
        """All members have delivered: the next rounds do without those that are late again and again."""
        window = self._window_seconds()
        late = round_.late_seconds(window)
        out: list[ev.Decision] = []
        for name, ejected in self.ejections.delivered_late(late, now, window=window).items():
            out += [*ejected, *self._drop_everywhere(name, "Slow", now)]
        return out

    def _drop_everywhere(self, name: str, reason: str, now: float) -> list[ev.Decision]:
        """Continue without this learner in every round to which it has not delivered yet."""
        out: list[ev.Decision] = []
        for round_ in list(self.in_flight):
            member = round_.members.get(name)
            if round_.transferring and member is not None and not member.done:
                out += self._drop(round_, name, reason, now)
        return out

    def _merge_if_complete(self, round_: Round, now: float) -> list[ev.Decision]:
        if len(round_.contributions) < len(round_.members):
            return []  # only members contribute
        if not round_.changes_parameters:
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
            return [abort, *self._delivered(round_, now), *self._commit_in_order(now)]
        limited = guarded(round_.by_name(), self.spec.guard)
        round_.contributions = {c.learner: c for c in limited}
        round_.merge(now)
        return [
            ev.BeginMerge(
                round=round_.step,
                attempt=round_.attempt,
                fragment=round_.fragment,
                contributions=round_.by_name(),
            )
        ]

    def dropped(self, event: ev.Dropped, now: float) -> list[ev.Decision]:
        """A member cannot deliver for this attempt."""
        round_ = self._round(event.round, event.attempt)
        if round_ is None or event.learner not in round_.members:
            return []
        if event.reason == ev.STREAM_BROKEN:
            return self._broken(round_, event.learner, event.detail, now)
        return self._unusable(round_, event.learner, event.reason, event.detail, now)

    def unreceived(
        self, begin: ev.BeginMerge, learner: str, reason: str, now: float
    ) -> list[ev.Decision]:
        """The syncer could not receive the upload of one member: that must not stop the others."""
        round_ = self._round(begin.round, begin.attempt)
        if round_ is None or learner not in round_.members:
            return []
        detail = f"the syncer could not receive the upload: {reason}"
        return self._broken(round_, learner, detail, now)

    def _broken(self, round_: Round, learner: str, detail: str, now: float) -> list[ev.Decision]:
        """
        The connection of a member broke: as if it had left, and its report may be used again.

        A learner that breaks it again and again costs the others time, which adds up.
        """
        round_.failure = f"{learner}: {ev.STREAM_BROKEN}"
        waited = self._waited_seconds(round_, learner, now)
        ejected = self.ejections.waited(learner, waited, ev.STREAM_BROKEN, now)
        return [
            _refusal(round_, learner, ev.STREAM_BROKEN, detail),
            *ejected,
            *self._drop(round_, learner, ev.STREAM_BROKEN, now),
            *(self._drop_everywhere(learner, ev.STREAM_BROKEN, now) if ejected else ()),
        ]

    def _waited_seconds(self, round_: Round, learner: str, now: float) -> float:
        return round_.waited_seconds(learner, now, quorum=self.spec.quorum)

    def _unusable(
        self, round_: Round, learner: str, reason: str, detail: str, now: float
    ) -> list[ev.Decision]:
        """What a member delivered cannot be merged."""
        used_reports = self._used_reports(learner)
        pulled = used_reports.pulled.get(round_.step)
        out = self._refuse_member(round_, learner, reason, detail, now)
        if pulled is not None:
            used_reports.add(pulled)  # used up: the same report would fail again
        return out

    def lost(
        self, learner: str, reason: str, now: float, *, charged: bool = True
    ) -> list[ev.Decision]:
        """
        Remove a learner that is gone from every round that is not yet committed.

        Also from a round that is merged and waits for its turn: it must not commit after a successor has joined.

        Args:
            learner: its name.
            reason: why it is gone.
            now: monotonic seconds.
            charged: False: the syncer ended its session for a reason that is not the learner's.
        """
        rounds = [r for r in self.in_flight if learner in r.members and not r.open]
        waited = max((self._waited_seconds(r, learner, now) for r in rounds), default=0.0)
        out = self.ejections.waited(learner, waited, "LeftRound", now) if charged else []
        # The newest first: a drop may commit its round, and with it newer ones that are merged.
        # A drop may also eject another learner, and with it commit older rounds or send them back to collect.
        for round_ in reversed(rounds):
            if learner not in round_.members or round_ not in self.in_flight:
                continue
            out += self._drop(round_, learner, reason, now)
        return out

    def _drop(self, round_: Round, learner: str, reason: str, now: float) -> list[ev.Decision]:
        """Continue without this member: same attempt, next attempt, or back to collecting."""
        round_.remove(learner)
        round_.update_hold(now, quorum=self.spec.quorum)
        self._used_reports(learner).release(round_.step)
        if round_.phase is Phase.PULLING and len(round_.members) >= self.spec.quorum:
            return self._merge_if_complete(round_, now)
        return self._again(round_, reason, now)

    def _again(self, round_: Round, reason: str, now: float) -> list[ev.Decision]:
        """Abort the attempt and begin another, with the same members if they are still K."""
        abort = ev.AbortMerge(round=round_.step, attempt=round_.attempt, reason=reason)
        if len(round_.members) >= self.spec.quorum:
            return [abort, *self._pull(round_, list(round_.members), now)]
        self._release(round_)
        round_.collect_again(now)
        return [abort]

    def retry(self, step: int, attempt: int, reason: str, now: float) -> list[ev.Decision]:
        """Abort an attempt for a reason that is no member's fault; collect again after a pause."""
        round_ = self._round(step, attempt)
        if round_ is None:
            return []
        round_.failure = reason
        self._release(round_)
        abort = ev.AbortMerge(round=step, attempt=attempt, reason=reason)
        round_.collect_again(now)
        return [abort]

    def _release(self, round_: Round) -> None:
        for name in round_.members:
            self._used_reports(name).release(round_.step)

    def merged(self, event: ev.Merged, now: float) -> list[ev.Decision]:
        """A merge is done: commit it, and what waited for it."""
        round_ = self._round(event.round, event.attempt)
        if round_ is None or round_.phase is not Phase.MERGING:
            return []
        if implausible := self.growth.check(round_.fragment, *event.sizes):
            return self._halt(round_, implausible)
        round_.phase = Phase.MERGED
        round_.merged = event
        return [*self._delivered(round_, now), *self._commit_in_order(now)]

    def _halt(self, round_: Round, reason: str) -> list[ev.Decision]:
        """Stop merging: the newest snapshot is the last state that can be trusted."""
        self.halted = reason
        out: list[ev.Decision] = [
            ev.Log(
                event="halt",
                fields={
                    "step": round_.step,
                    "fragment": round_.fragment,
                    "reason": reason,
                    "learners": ", ".join(c.learner for c in round_.by_name()),
                },
            )
        ]
        for each in self.in_flight:
            self._release(each)
            out.append(ev.AbortMerge(round=each.step, attempt=each.attempt, reason=reason))
        self.in_flight.clear()
        return out

    def replayed(self, lines: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The audit lines after the snapshot that this began with, unchanged: a halt among them still counts."""
        for line in lines:
            if line.get("event") == "halt":
                self.halted = str(line.get("reason") or "a merge was implausible")
            yield line

    def _commit_in_order(self, now: float) -> list[ev.Decision]:
        out: list[ev.Decision] = []
        while self.in_flight and self.in_flight[0].phase is Phase.MERGED:
            round_ = self.in_flight.pop(0)
            out += self._commit(round_, now)
        return out

    def _commit(self, round_: Round, now: float) -> list[ev.Decision]:
        merged = round_.merged
        if merged is None:
            raise AssertionError("a round is merged without a result")
        self._settle()
        self.commits += 1
        self.merges += 1
        self.last_members = len(round_.contributions)
        if round_.changes_parameters:
            self.last_merge_at = now
        self.grace.synced(now - round_.pulled_at)
        # How far buffers move confirms no steps.
        if not any(c.buffers for c in round_.contributions.values()):
            confirmed = explained_members(round_.contributions, merged.confirmed, self.spec.guard)
            self.learners.confirm({name: name in confirmed for name in round_.contributions})
            # Of a whole fragment, what the wire has rounded is a delta too.
            self.parameters_changed |= any(
                found.norm > 0 and round_.contributions[found.learner].base is not None
                for found in merged.confirmed
            )
        for name, contribution in round_.contributions.items():
            record = self.learners.by_name[name]
            self._used_reports(name).merge(round_.step, contribution.local_step)
            record.merged_round = round_.step
            record.merges += 1
            self.ejections.merged(record, now)
        warning = self._count_unchanged(round_)
        receivers = len(self.learners.connected())
        line = merge_line(
            round_,
            merged,
            quorum=self.spec.quorum,
            guard=self.spec.guard,
            receivers=receivers,
            now=now,
        )
        return [
            ev.Log(event="merge", fields=line),
            ev.Commit(
                round=round_.step,
                attempt=round_.attempt,
                fragment=round_.fragment,
                changed=round_.changes_parameters,
            ),
            *warning,
        ]

    def unchanged_for(self) -> str:
        """Why the rounds change nothing, for people; empty: they do."""
        if (rounds := self.unchanged) < UNCHANGED_ROUNDS:
            return ""
        names = self.without_tokens
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        members = ", ".join(names[:8]) or "their members"
        return (
            f"tokens: the last {rounds} merges changed nothing, and {members}{more} "
            "reported none; pass the number of tokens of each step to learner.step()"
        )

    def _count_unchanged(self, round_: Round) -> list[ev.Decision]:
        """Count the commits that change nothing; a line when they are too many to be chance."""
        self.unchanged = 0 if round_.changes_parameters else self.unchanged + 1
        self.without_tokens = tuple(c.learner for c in round_.by_name() if c.tokens == 0)
        if self.unchanged != UNCHANGED_ROUNDS:
            return []
        names = ", ".join(self.without_tokens)
        fields = {"step": round_.step, "rounds": self.unchanged, "learners": names}
        return [ev.Log(event="unchanged", fields=fields)]

    def _round(self, step: int, attempt: int) -> Round | None:
        for round_ in self.in_flight:
            if round_.step == step and round_.attempt == attempt:
                return round_
        return None

    def _window_seconds(self) -> float:
        """
        How long a round may take without delaying the next ones: τ steps.

        Two pulls may reach a far learner within one of its steps. It answers both with the same
        report, and the second one is refused although the learner does nothing wrong.
        """
        return self.spec.overlap * (self.learners.fastest_step_seconds() or 0.0)

    def _free_seconds(self) -> float:
        """How much longer than a merge a probe may take."""
        return upload_limits.free_seconds(
            overlap=self.spec.overlap, step_seconds=self.learners.fastest_step_seconds()
        )

    def hold_seconds(self) -> float:
        """How long the members that have delivered wait for the others."""
        return upload_limits.hold_seconds(
            overlap=self.spec.overlap, step_seconds=self.learners.fastest_step_seconds()
        )

    def tick(self, now: float) -> list[ev.Decision]:
        """Continue without the members that are late."""
        out: list[ev.Decision] = []
        for round_ in list(self.in_flight):
            attempt = round_.attempt
            late = round_.late(
                now, hold_seconds=self.hold_seconds(), window_seconds=self._window_seconds()
            )
            for name in late:
                # A drop may have begun another attempt, in which no member is late yet.
                member = round_.transferring and name in round_.members
                if member and round_.attempt == attempt:
                    out += self._late(round_, name, now)
        return out

    def _late(self, round_: Round, name: str, now: float) -> list[ev.Decision]:
        member = round_.members[name]
        reason = "Stalled" if name in round_.contributions else "AnswerLate"
        detail = (
            f"{name} delivered {member.received_bytes} bytes of fragment {round_.fragment} in "
            f"{now - member.begun:.1f} s; the round continues without it"
        )
        return self._refuse_member(round_, name, reason, detail, now)

    def _refuse_member(
        self, round_: Round, name: str, reason: str, detail: str, now: float
    ) -> list[ev.Decision]:
        """A member did not deliver, or not what can be merged: eject it and continue without it."""
        round_.failure = f"{name}: {reason}"
        waited = self._waited_seconds(round_, name, now)
        ejected = self.ejections.eject(name, reason, now, waited=waited)
        return [
            _refusal(round_, name, reason, detail),
            *ejected,
            *self._drop(round_, name, reason, now),
            *(self._drop_everywhere(name, reason, now) if ejected else ()),
        ]

    def shift(self, seconds: float) -> None:
        """The syncer itself was paused: nothing is late because of it."""
        self.ejections.shift(seconds)
        for round_ in self.in_flight:
            round_.shift(seconds)

    def deadlines(self, now: float) -> list[float]:
        """Deadlines of the rounds that can move: not of those that wait behind an older collecting round."""
        collecting = next((r for r in self.in_flight if r.open), None)
        times: list[float] = []
        if collecting is not None:
            if collecting.deadline is not None:
                times.append(collecting.deadline)
            if collecting.retry_at > now:
                times.append(collecting.retry_at)
        hold = self.hold_seconds()
        window = self._window_seconds()
        late = (round_.next_deadline(hold, window, now) for round_ in self.in_flight)
        times += [at for at in late if at is not None]
        return times


def _refusal(round_: Round, learner: str, reason: str, detail: str) -> ev.Log:
    """The line about a member whose upload a round does not use."""
    fields = {
        "learner": learner,
        "reason": reason,
        "detail": detail,
        "step": round_.step,
        "fragment": round_.fragment,
    }
    return ev.Log(event="refuse", fields=fields)
