"""
Ways to break a core, each with the checker that must find it.

A break replaces one function of the real core, in tests only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from diloco.errors import StorageError, UnavailableError
from diloco.journal.writer import JournalWriter
from diloco.model.tensorfile import parse
from diloco.runtime.disk import File
from diloco_sim import journal
from diloco_sim.checkers.liveness import Bounds
from diloco_sim.description import Description
from diloco_sim.disk import SimulatedFile
from diloco_sim.faults import Kind
from diloco_sim.world import Outcome, World
from diloco_syncer import sessions
from diloco_syncer.attempts import Attempts
from diloco_syncer.core import admission, contribution, engine, history, scheduler
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Admission, Applicant
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.durability import Durability
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.history import History
from diloco_syncer.core.learners import LearnerRecord, LearnerRecords
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.core.rounds import Phase, Round
from diloco_syncer.core.scheduler import Scheduler
from diloco_syncer.core.used_reports import UsedReports
from diloco_syncer.storage import model
from diloco_syncer.storage.durable import bytes_of, read_into
from diloco_syncer.storage.parameters import FragmentParameters, Parameters
from diloco_syncer.storage.store import Store
from diloco_worker.core.events import Welcomed
from diloco_worker.core.inbox import Slot
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.trainer import TrainerCore
from diloco_worker.core.updates import Updates
from diloco_worker.link.buffers import BufferPool

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Break:
    """A broken core."""

    apply: Callable[[Patch], None]
    checker: str
    """That must find it."""
    sentence: str
    """Part of what it states, as a regular expression."""
    needs: tuple[Kind, ...] = ()
    """Faults without which no world finds it."""

    def found(self, outcome: Outcome) -> bool:
        """Whether this is what a world found."""
        violation = outcome.violation
        return violation is not None and (
            violation.checker == self.checker
            and re.search(self.sentence, violation.sentence) is not None
        )


BREAKS: dict[str, Break] = {}


def finds(
    checker: str, sentence: str, *needs: Kind, name: str = ""
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """What is decorated breaks a core: this checker finds it, with this in its sentence."""

    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BREAKS[name or apply.__name__] = Break(apply, checker, sentence, needs)
        return apply

    return add


def broken(name: str, description: Description) -> Outcome:
    """Run a world with a broken core."""
    with pytest.MonkeyPatch.context() as patch:
        BREAKS[name].apply(patch)
        return World(description).run()


# ------------------------------------------------------------ merges


@finds("replay", "from the replay")
def another_weight(patch: Patch) -> None:
    """The weight of a member is tokens³ / steps."""
    patch.setattr(contribution.outer, "weight", lambda *, tokens, steps: tokens**3 / steps)


@finds("replay", "from the replay")
def another_momentum(patch: Patch) -> None:
    """The momentum of the outer optimizer is 1 % larger."""
    factors = OuterOptimizer.factors.fget  # type: ignore[attr-defined]

    def changed(self: OuterOptimizer) -> object:
        rate, momentum, delta, buffer = factors(self)
        return rate, momentum * np.float32(1.01), delta, buffer

    patch.setattr(OuterOptimizer, "factors", property(changed))


@finds("reports", "it was merged at")
def reports_that_count_twice(patch: Patch) -> None:
    """A report is fresh whatever it was used for."""
    patch.setattr(UsedReports, "fresh", lambda self, local_step, lag: True)
    patch.setattr(UsedReports, "refused", lambda self, round_, local_step: "")


@finds("quorum", "learners, the quorum is")
def rounds_without_a_quorum(patch: Patch) -> None:
    """A round begins with one report."""
    collect = Scheduler.collect

    def impatient(self: Scheduler, now: float) -> object:
        spec, self.spec = self.spec, replace(self.spec, quorum=1)
        try:
            return collect(self, now)
        finally:
            self.spec = spec

    patch.setattr(Scheduler, "collect", impatient)


@finds("rounds", "are in flight, at most", name="one_round_too_many")
@finds("rounds", "is pulled while round", name="two_rounds_of_a_fragment")
def rounds_that_begin_too_early(patch: Patch) -> None:
    """One round more is in flight, of whatever fragment."""

    def start_steps(self: Scheduler, now: float) -> None:
        most = self.spec.overlap + 1
        while (
            self.pace.step < self.spec.steps
            and len(self.in_flight) < most
            and self.pace.may_start()
        ):
            step = self.pace.start()
            fragment = self.due(step)
            if fragment is not None:
                self.in_flight.append(Round(step=step, fragment=fragment, started=now))
            self._settle()

    patch.setattr(Scheduler, "start_steps", start_steps)


@finds("rounds", "it is committed before round")
def commits_out_of_order(patch: Patch) -> None:
    """A round commits as soon as it is merged."""

    def at_once(self: Scheduler, now: float) -> list[ev.Decision]:
        merged = [round_ for round_ in self.in_flight if round_.phase is Phase.MERGED]
        for round_ in merged:
            self.in_flight.remove(round_)
        return [decision for round_ in merged for decision in self._commit(round_, now)]

    patch.setattr(Scheduler, "_commit_in_order", at_once)


@finds("incarnations", "is merged")
def members_that_left(patch: Patch) -> None:
    """A learner that is gone stays in its rounds."""
    patch.setattr(Scheduler, "lost", lambda self, learner, reason, now, **_: [])


def believe_headers(patch: Patch) -> None:
    """A member is credited what the header of its upload states."""
    credit = History.credit

    def believing(self: History, upload: Contribution, fragment: int) -> Contribution | None:
        return upload if credit(self, upload, fragment) is not None else None

    patch.setattr(History, "credit", believing)


finds("credits", r"explain at most \d+ tokens", Kind.LIE_TOKENS, name="false_tokens")(
    believe_headers
)
finds("credits", r"explain at most \d+ steps", Kind.LIE_STEPS, name="false_steps")(believe_headers)


@finds("credits", "the honest learner has")
def halved_credits(patch: Patch) -> None:
    """A member is credited half of its tokens."""
    credit = History.credit

    def halving(self: History, upload: Contribution, fragment: int) -> Contribution | None:
        found = credit(self, upload, fragment)
        return found and replace(found, tokens=found.tokens // 2)

    patch.setattr(History, "credit", halving)


@finds("credits", "its report not")
def reports_that_differ(patch: Patch) -> None:
    """A learner reports a token more than it uploads, and the syncer does not compare."""
    patch.setattr(history, "_as_reported", lambda upload, fragment, shown: upload)
    state = TrainerCore.state

    def forgetful(self: TrainerCore, **what: Any) -> object:
        found = state(self, **what)
        return replace(found, tokens=[tokens + 1 for tokens in found.tokens])

    patch.setattr(TrainerCore, "state", forgetful)


# ------------------------------------------------------------ snapshots and the journal


@finds("durable", "the restart")
def snapshots_that_are_not_written(patch: Patch) -> None:
    """A snapshot counts as durable and is nowhere."""
    patch.setattr(Store, "write", lambda self, snapshot: self.root)


@finds("durable", "the newest durable snapshot is of")
def oldest_snapshot(patch: Patch) -> None:
    """A restart takes the oldest snapshot."""
    stems = Store._stems
    patch.setattr(Store, "_stems", lambda self: stems(self)[::-1])


@finds("durable", "no snapshot was taken of", Kind.DISK_FLIP)
def unchecked_snapshots(patch: Patch) -> None:
    """The data of a snapshot is not compared with its digest."""

    def unchecked(self: Store, path: object, file: File, body: dict, target: Any) -> None:
        head = memoryview(bytearray(body["headerBytes"]))
        read_into(file, 0, head)
        for name, entry in parse(head, file.size()).items():
            if target is not None:
                read_into(file, entry.lo, bytes_of(target(name, entry)))

    patch.setattr(Store, "_check_data", unchecked)


@finds("durable", "starts over", Kind.DISK_FLIP, Kind.CRASH)
def unreadable_snapshots_ignored(patch: Patch) -> None:
    """A syncer starts over if no snapshot can be read."""
    newest = Store.newest

    def forgiving(self: Store) -> object:
        try:
            return newest(self)
        except StorageError:
            return None

    patch.setattr(Store, "newest", forgiving)


@finds("durable", "tokens 0 instead of", Kind.CRASH)
def tokens_forgotten(patch: Patch) -> None:
    """A restart forgets the tokens of the learners."""
    from_json = LearnerRecords.from_json

    def without_tokens(data: dict) -> LearnerRecords:
        return from_json({name: {**facts, "tokens": 0} for name, facts in data.items()})

    patch.setattr(LearnerRecords, "from_json", without_tokens)


@finds("durable", "counts as not merged", Kind.CRASH)
def used_reports_forgotten(patch: Patch) -> None:
    """A restart forgets which reports were merged."""
    patch.setattr(UsedReports, "from_json", lambda data: UsedReports())


@finds("durable", "counts as merged", Kind.CRASH)
def used_reports_invented(patch: Patch) -> None:
    """A restart counts a report as merged that was not."""
    from_json = UsedReports.from_json
    patch.setattr(
        UsedReports, "from_json", lambda data: from_json({**data, "merged": [*data["merged"], 999]})
    )


@finds("durable", "the restart has merges 0", Kind.CRASH)
def merges_counted_anew(patch: Patch) -> None:
    """A restart counts merges from 0."""
    resume = Engine.resume.__func__  # type: ignore[attr-defined]

    def forgetful(cls: type[Engine], *args: Any, state: dict, **how: Any) -> Engine:
        return resume(cls, *args, state={**state, "merges": 0}, **how)

    patch.setattr(Engine, "resume", classmethod(forgetful))


def halt_forgotten(patch: Patch) -> None:
    """A restart does not know that a snapshot is of a syncer that no longer merged."""
    resume = Engine.resume.__func__  # type: ignore[attr-defined]

    def forgetful(cls: type[Engine], *args: Any, state: dict, **how: Any) -> Engine:
        return resume(cls, *args, state={**state, "halted": ""}, **how)

    patch.setattr(Engine, "resume", classmethod(forgetful))


@finds("journalled", "is not in events.jsonl", Kind.CRASH)
def journal_not_synced(patch: Patch) -> None:
    """The lines before a snapshot are not made durable."""
    patch.setattr(JournalWriter, "sync", lambda self: True)


@finds("journalled", "the merge of step 7")
def line_never_written(patch: Patch) -> None:
    """The line of a merge is left out."""
    append = JournalWriter.append

    def leave_out(self: JournalWriter, event: dict) -> None:
        if (event["event"], event.get("step")) != ("merge", 7):
            append(self, event)

    patch.setattr(JournalWriter, "append", leave_out)


@finds("audited", "has weight")
def doubled_weight_in_the_journal(patch: Patch) -> None:
    """The line of a merge states twice the weight of a member."""
    merge_line = scheduler.merge_line

    def doubled(*facts: Any, **more: Any) -> dict:
        line = merge_line(*facts, **more)
        line["members"][0]["weight"] *= 2
        return line

    patch.setattr(scheduler, "merge_line", doubled)


@finds("completion", "newest durable snapshot")
def complete_too_early(patch: Patch) -> None:
    """A learner is notified before the last snapshot is written."""
    reached_end = Durability.reached_end

    def hasty(self: Durability, step: int) -> list[ev.Decision]:
        return [ev.AnnounceComplete(learner="eu/0"), *reached_end(self, step)]

    patch.setattr(Durability, "reached_end", hasty)


@finds("completion", "before the model is durable")
def model_not_synced(patch: Patch) -> None:
    """The model is written and not synced."""
    write = model.write_temporary

    def unsynced(*args: Any, **how: Any) -> object:
        with patch.context() as inner:
            inner.setattr(SimulatedFile, "sync", lambda self: None)
            return write(*args, **how)

    patch.setattr(model, "write_temporary", unsynced)


@finds("completion", "the job is not complete")
def job_without_an_end(patch: Patch) -> None:
    """No model is written; liveness, which finds that as well, has no bounds."""
    endless = Bounds(progress=1e6, recovery=1e6, merge=1e6, participation=1e6, result=1e6)
    patch.setattr(Durability, "reached_end", lambda self, step: [])
    patch.setattr(Description, "bounds", property(lambda self: endless))
    patch.setattr(World, "deadline", 60.0)


# ------------------------------------------------------------ progress


@finds("liveness", "no merge for")
def nothing_offered(patch: Patch) -> None:
    """Links never tell their trainers which fragments to copy."""
    patch.setattr(LinkProtocol, "_publish_open", lambda self: None)


@finds("liveness", "no merge for", Kind.MUTE)
def no_member_is_late(patch: Patch) -> None:
    """A round waits for its members forever."""
    patch.setattr(Round, "late", lambda self, now, **_: [])
    patch.setattr(Round, "next_deadline", lambda self, *_: None)


@finds("liveness", "no merge for", Kind.CUT)
def no_learner_returns(patch: Patch) -> None:
    """A learner that has been in a session is not admitted again."""
    check = Admission._check_incarnation

    def once(self: Admission, applicant: Applicant, issued: Any) -> None:
        if applicant.incarnation:
            raise UnavailableError("it has been here before")
        check(self, applicant, issued)

    patch.setattr(Admission, "_check_incarnation", once)


@finds("liveness", "was committed more than")
def results_not_fetched(patch: Patch) -> None:
    """Links fetch no results."""
    patch.setattr(LinkProtocol, "_result_announced", lambda self, event, now: [])
    patch.setattr(LinkProtocol, "_committed", lambda self, event, now: [])


@finds("liveness", "was committed more than", Kind.DISK_RESTORED, name="lost_history_kept")
@finds("bases", "of another history", Kind.DISK_RESTORED, name="deltas_of_a_lost_history")
def lost_history_kept(patch: Patch) -> None:
    """Links compare their versions with those of a syncer whose files were restored."""
    patch.setattr(Updates, "_lost", lambda self, fragment, version: False)
    patch.setattr(Slot, "forget", lambda self: None)


@finds("bases", "of another history", Kind.DISK_RESTORED)
def starts_not_distinguished(patch: Patch) -> None:
    """Links take every start of the syncer for one that follows the one before."""
    began = Updates.began

    def following(self: Updates, versions: tuple, session: Welcomed) -> list:
        return began(self, versions, replace(session, start_id="", snapshot_start_id=""))

    patch.setattr(Updates, "began", following)


@finds("bases", "of another history", Kind.DISK_RESTORED)
def checkpoints_of_any_history(patch: Patch) -> None:
    """Links let trainers load local checkpoints of every start of the syncer."""
    patch.setattr(Updates, "follows", lambda self, start_id: True)


@finds("bounds", "downloads of fragment", Kind.CRASH)
def undone_parts_kept(patch: Patch) -> None:
    """A new learner keeps the parts of the model that a crash of the syncer has undone."""
    patch.setattr(Updates, "restart", lambda self: [])


@finds("liveness", "us/0 has been in no merge")
def one_left_out(patch: Patch) -> None:
    """The reports of one learner never count."""
    fresh = LearnerRecord.fresh.fget  # type: ignore[attr-defined]
    patch.setattr(
        LearnerRecord, "fresh", property(lambda self: self.name != "us/0" and fresh(self))
    )


@finds("status", "learners, the quorum is")
def waits_for_nothing(patch: Patch) -> None:
    """The status never states what is missing."""
    patch.setattr(Engine, "waiting_for", lambda self: "")


@finds("status", "there was no merge for")
def never_stuck(patch: Patch) -> None:
    """The status shows Training while nothing is merged, since nothing is offered."""
    patch.setattr(Engine, "_stuck", lambda self: "")
    nothing_offered(patch)


@finds("broken", "unexpected")
def engine_that_raises(patch: Patch) -> None:
    """The engine fails at each merge."""

    def fail(self: Scheduler, event: object, now: float) -> object:
        raise RuntimeError("unexpected")

    patch.setattr(Scheduler, "merged", fail)


# ------------------------------------------------------------ membership


@finds("incarnations", "of its predecessor", Kind.CRASH)
def incarnation_issued_twice(patch: Patch) -> None:
    """Every process gets incarnation 1."""
    patch.setattr(Store, "next_incarnation", lambda self, at_least: 1)


@finds("incarnations", "comes after", Kind.CRASH)
def epoch_counted_twice(patch: Patch) -> None:
    """Every start is of epoch 1."""
    patch.setattr(Store, "next_epoch", lambda self: 1)


@finds("incarnations", "an impersonator is admitted", Kind.IMPERSONATE)
def impersonators_admitted(patch: Patch) -> None:
    """Any incarnation may join."""
    patch.setattr(Admission, "_check_incarnation", lambda self, *a, **k: None)


@finds("limits", "the job has .* learners", Kind.SCALE)
def joins_beyond_the_number(patch: Patch) -> None:
    """A learner that was removed may join."""
    patch.setattr(admission, "beyond", lambda learner, limits: "")
    patch.setattr(engine, "beyond", lambda learner, limits: "")


@finds("limits", "the job has .* learners", Kind.SCALE)
def removed_learners_stay(patch: Patch) -> None:
    """A learner that was removed stays in its session."""
    patch.setattr(engine, "beyond", lambda learner, limits: "")


@finds("limits", "in force are", Kind.SCALE)
def more_learners_unnoticed(patch: Patch) -> None:
    """The syncer takes over smaller numbers of learners only."""
    known = Engine._limits_changed

    def fewer_only(self: Engine, event: ev.LimitsChanged, now: float) -> list[ev.Decision]:
        fewer = sum(event.learners.values()) < sum(self.limits.values())
        return known(self, event, now) if fewer else []

    patch.setattr(Engine, "_limits_changed", fewer_only)


# ------------------------------------------------------------ bounds


@finds("bounds", "attempts are open")
def attempts_kept(patch: Patch) -> None:
    """An attempt stays after its commit."""
    patch.setattr(Attempts, "commit", lambda self, attempt: attempt.finish(committed=True))


@finds("bounds", "bytes are held by a link")
def buffers_kept(patch: Patch) -> None:
    """A link reuses no buffer and keeps them all."""

    def hoard(self: BufferPool, size_bytes: int) -> object:
        buffer = np.empty(size_bytes, np.uint8)
        self._used[id(buffer)] = buffer
        self._idle.append(np.empty(size_bytes, np.uint8))
        self._most_idle_bytes = 1 << 40
        return buffer

    patch.setattr(BufferPool, "acquire", hoard)


@finds("bounds", "bytes of vectors are held")
def old_parameters_kept(patch: Patch) -> None:
    """The syncer keeps every version of its parameters."""
    commit, kept = Parameters.commit, []

    def keep(self: Parameters, fragment: int, merged: FragmentParameters) -> None:
        kept.append(merged)
        commit(self, fragment, merged)

    patch.setattr(Parameters, "commit", keep)


@finds("bounds", "bytes are in the journal")
def old_parts_kept(patch: Patch) -> None:
    """No part of events.jsonl is ever deleted."""
    patch.setattr(JournalWriter, "_delete_old", lambda self, needed, total_bytes: None)


def record_more(patch: Patch, lines: int) -> None:
    """Let the engine record lines for each report."""
    handle = Engine.handle

    def more(self: Engine, event: ev.Event, now: float) -> list[ev.Decision]:
        found = handle(self, event, now)
        if isinstance(event, ev.Reported):
            found += [ev.Log(event="unchanged", fields={"step": self.step})] * lines
        return found

    patch.setattr(Engine, "handle", more)


@finds("bounds", "lines within 10 s")
def too_many_lines(patch: Patch) -> None:
    """The engine records 50 lines for each report."""
    record_more(patch, 50)


@finds("bounds", "events and lines wait", Kind.DISK_HANG)
def endless_queue_of_lines(patch: Patch) -> None:
    """The engine records 8 lines for each report, and all wait for the disk."""
    record_more(patch, 8)
    patch.setattr(journal, "CAPACITY", 1 << 30)


@finds("bounds", "messages wait for a session", Kind.HALF_OPEN)
def endless_outbox(patch: Patch) -> None:
    """Any number of messages waits for a learner."""
    patch.setattr(sessions, "MAX_QUEUED", 1 << 30)
