"""Checkers bite: each finds a core that a test has broken, in a world that passes otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diloco.errors import StorageError, UnavailableError
from diloco.journal.writer import JournalWriter
from diloco.model.tensorfile import parse
from diloco.runtime.disk import File
from diloco_sim import report
from diloco_sim.checkers.liveness import Bounds
from diloco_sim.description import Description, sample
from diloco_sim.disk import SimulatedDisk, SimulatedFile
from diloco_sim.shrink import shrink
from diloco_sim.world import World
from diloco_syncer.attempts import Attempts
from diloco_syncer.core import admission, contribution, engine, history, scheduler
from diloco_syncer.core import events as ev
from diloco_syncer.core.admission import Admission, Applicant
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.durability import Durability
from diloco_syncer.core.engine import Engine
from diloco_syncer.core.history import History
from diloco_syncer.core.learners import LearnerRecord
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.core.rounds import Phase, Round
from diloco_syncer.core.scheduler import Scheduler
from diloco_syncer.core.used_reports import UsedReports
from diloco_syncer.storage import model
from diloco_syncer.storage.durable import bytes_of, read_into
from diloco_syncer.storage.parameters import FragmentParameters, Parameters
from diloco_syncer.storage.store import Store
from diloco_testing.worlds import small, violation
from diloco_worker.core.link_protocol import LinkProtocol
from diloco_worker.core.trainer import TrainerCore
from diloco_worker.link.buffers import BufferPool

pytestmark = pytest.mark.slow  # whole worlds


def test_the_world_of_these_tests_passes():
    outcome = World(small("5..6 crash syncer\n 9..11 crash eu/0+trainer")).run()
    assert outcome.ok, outcome.violation


def test_replay_finds_another_weight(monkeypatch):
    monkeypatch.setattr(contribution.outer, "weight", lambda *, tokens, steps: tokens**3 / steps)
    assert violation(small()).checker == "replay"


def test_replay_finds_another_momentum(monkeypatch):
    factors = OuterOptimizer.factors.fget

    def changed(self: OuterOptimizer) -> object:
        rate, momentum, delta, buffer = factors(self)
        return rate, momentum * np.float32(1.01), delta, buffer

    monkeypatch.setattr(OuterOptimizer, "factors", property(changed))
    assert violation(small()).checker == "replay"


def test_durable_finds_a_snapshot_that_was_not_written(monkeypatch):
    monkeypatch.setattr(Store, "write", lambda self, snapshot: self.root)
    assert violation(small("8..9 crash syncer")).checker == "durable"


def test_durable_finds_a_restart_from_an_older_snapshot(monkeypatch):
    stems = Store._stems
    monkeypatch.setattr(Store, "_stems", lambda self: stems(self)[::-1])
    description = small("12..13 crash syncer")
    spec = replace(
        description.spec,
        syncer_checkpoint=replace(description.spec.syncer_checkpoint, every_steps=1, keep=3),
    )
    assert violation(replace(description, spec=spec)).checker == "durable"


def flips(monkeypatch, name: str) -> None:
    """Let bits flip in this file only."""
    flip = SimulatedDisk.flip
    monkeypatch.setattr(SimulatedDisk, "flip", lambda self: flip(self, name))


def test_a_flipped_bit_in_a_counter_is_read_from_its_other_copies(monkeypatch):
    flips(monkeypatch, "/epoch")
    outcome = World(small("8..9 disk-flip syncer\n 8..9 crash syncer")).run()
    assert (outcome.ok, outcome.stopped) == (True, ""), outcome


def test_the_summary_counts_worlds_that_stopped_at_a_damaged_file():
    outcome = replace(World(small()).run(), stopped="epoch: holds 'seven'")
    summary, failures = report.summary([outcome], steps=40, failed=print)
    assert "1 stopped until a person decides" in summary
    assert not failures


def test_durable_finds_a_snapshot_with_a_flipped_bit(monkeypatch):
    flips(monkeypatch, ".safetensors")

    def unchecked(self: Store, path: object, file: File, body: dict, target: object) -> None:
        head = memoryview(bytearray(body["headerBytes"]))
        read_into(file, 0, head)
        for name, entry in parse(head, file.size()).items():
            if target is not None:
                read_into(file, entry.lo, bytes_of(target(name, entry)))

    monkeypatch.setattr(Store, "_check_data", unchecked)
    found = violation(small("8..9 disk-flip syncer\n 8..9 crash syncer"))
    assert (found.checker, "no snapshot was taken of" in found.sentence) == ("durable", True), found


def test_durable_finds_a_start_over_snapshots_that_cannot_be_read(monkeypatch):
    flips(monkeypatch, ".json")
    newest = Store.newest

    def forgiving(self: Store) -> object:
        try:
            return newest(self)
        except StorageError:
            return None

    monkeypatch.setattr(Store, "newest", forgiving)
    description = small("3..4 disk-flip syncer\n 3..4 crash syncer")
    spec = replace(
        description.spec, syncer_checkpoint=replace(description.spec.syncer_checkpoint, every_steps=30)
    )  # fmt: skip
    found = violation(replace(description, spec=spec))
    assert (found.checker, "begins anew" in found.sentence) == ("durable", True), found


def test_liveness_finds_learners_that_offer_nothing(monkeypatch):
    monkeypatch.setattr(LinkProtocol, "_publish_open", lambda self: None)
    found = violation(small())
    assert found.checker == "liveness"
    assert "no merge for" in found.sentence


def test_liveness_finds_a_quorum_that_waits_for_a_learner_with_a_fault(monkeypatch):
    description = replace(small("5..200 mute us/0"), steps=400)
    assert World(description).run().ok
    monkeypatch.setattr(Round, "late", lambda self, now, *, hold_seconds: [])
    monkeypatch.setattr(Round, "next_deadline", lambda self, hold_seconds, now: None)
    found = violation(description)
    assert found.checker == "liveness"
    assert "with a quorum without a fault" in str(found)


def test_liveness_finds_a_quorum_that_is_healthy_again_and_merges_nothing(monkeypatch):
    """Long before all faults are over, which is when each learner is judged."""
    plan = "5..15 cut eu/0 syncer\n 5..15 cut eu/1 syncer\n 1100..1101 pause us/0"
    description = replace(small(plan), steps=2000)
    check = Admission._check_incarnation

    def once(self: Admission, applicant: Applicant, issued: object) -> None:
        if applicant.incarnation:
            raise UnavailableError("it has been here before")
        check(self, applicant, issued)

    monkeypatch.setattr(Admission, "_check_incarnation", once)
    found = violation(description)
    assert found.checker == "liveness"
    assert "with a quorum without a fault" in found.sentence
    assert found.now < 500.0 < description.quiet_at


def test_liveness_finds_results_that_do_not_arrive(monkeypatch):
    monkeypatch.setattr(LinkProtocol, "_result_announced", lambda self, event, now: [])
    monkeypatch.setattr(LinkProtocol, "_committed", lambda self, event, now: [])
    found = violation(replace(small(), steps=400))
    assert found.checker == "liveness"
    assert "was committed more than" in found.sentence


def test_liveness_finds_a_learner_that_takes_no_part(monkeypatch):
    bounds = Bounds(progress=100.0, recovery=100.0, merge=100.0, participation=60.0, result=100.0)
    monkeypatch.setattr(Description, "bounds", property(lambda self: bounds))
    fresh = LearnerRecord.fresh.fget
    monkeypatch.setattr(
        LearnerRecord, "fresh", property(lambda self: self.name != "us/0" and fresh(self))
    )
    found = violation(replace(small(), steps=300))
    assert found.checker == "liveness"
    assert "us/0 has been in no merge" in found.sentence


def test_bounds_finds_attempts_that_are_kept(monkeypatch):
    monkeypatch.setattr(Attempts, "commit", lambda self, attempt: attempt.finish(committed=True))
    found = violation(small())
    assert found.checker == "bounds"
    assert "attempts are open" in found.sentence


def test_bounds_finds_buffers_that_are_not_freed(monkeypatch):
    monkeypatch.setattr(BufferPool, "acquire", hoard)
    found = violation(small())
    assert (found.checker, "bytes are held by a link" in found.sentence) == ("bounds", True), found


def hoard(self: BufferPool, size_bytes: int) -> object:
    """`BufferPool.acquire` without reuse and without an end."""
    buffer = np.empty(size_bytes, np.uint8)
    self._used[id(buffer)] = buffer
    self._idle.append(np.empty(size_bytes, np.uint8))
    self._most_idle_bytes = 1 << 40
    return buffer


def test_bounds_finds_old_parameters_that_are_kept(monkeypatch):
    commit, kept = Parameters.commit, []

    def keep(self: Parameters, fragment: int, merged: FragmentParameters) -> None:
        kept.append(merged)
        commit(self, fragment, merged)

    monkeypatch.setattr(Parameters, "commit", keep)
    found = violation(small())
    assert (found.checker, "bytes of vectors are held" in found.sentence) == ("bounds", True), found


def test_bounds_finds_a_journal_whose_old_parts_stay(monkeypatch):
    assert World(small(part_bytes=400)).run().ok
    monkeypatch.setattr(JournalWriter, "_delete_old", lambda self, needed, total_bytes: None)
    found = violation(small(part_bytes=400))
    assert (found.checker, "bytes are in the journal" in found.sentence) == ("bounds", True), found


def test_reports_finds_a_report_that_is_merged_twice(monkeypatch):
    monkeypatch.setattr(UsedReports, "fresh", lambda self, local_step, lag: True)
    monkeypatch.setattr(UsedReports, "refused", lambda self, round_, local_step: "")
    assert violation(replace(small(), step_seconds=(1.0, 1.1, 3.0))).checker == "reports"


def test_quorum_finds_a_round_that_does_not_wait(monkeypatch):
    collect = Scheduler.collect

    def impatient(self: Scheduler, now: float) -> object:
        spec, self.spec = self.spec, replace(self.spec, quorum=1)
        try:
            return collect(self, now)
        finally:
            self.spec = spec

    monkeypatch.setattr(Scheduler, "collect", impatient)
    assert violation(small()).checker == "quorum"


def two_in_flight(self: Scheduler, now: float) -> None:
    """`Scheduler.start_steps` for an overlap of 2, and without its guard."""
    while self.pace.step < self.spec.steps and len(self.in_flight) < 2 and self.pace.may_start():
        step = self.pace.start()
        fragment = self.due(step)
        if fragment is not None:
            self.in_flight.append(Round(step=step, fragment=fragment, started=now))
        self._settle()


@pytest.mark.parametrize(
    ("fragments", "sentence"),
    [(3, "are in flight, at most 1 may be"), (1, "fragment 0 is pulled while round")],
)
def test_rounds_finds_a_round_that_begins_too_early(monkeypatch, fragments, sentence):
    monkeypatch.setattr(Scheduler, "start_steps", two_in_flight)
    description = small("5..20 latency eu/0 syncer 1.5")
    spec = replace(description.spec, fragments=fragments, interval=max(2, fragments))
    found = violation(replace(description, spec=spec))
    assert (found.checker, sentence in found.sentence) == ("rounds", True), found


def test_rounds_finds_a_round_that_does_not_wait_for_its_turn(monkeypatch):
    def at_once(self: Scheduler, now: float) -> list[object]:
        merged = [round_ for round_ in self.in_flight if round_.phase is Phase.MERGED]
        for round_ in merged:
            self.in_flight.remove(round_)
        return [decision for round_ in merged for decision in self._commit(round_, now)]

    monkeypatch.setattr(Scheduler, "_commit_in_order", at_once)
    description = small("5..20 trickle eu/0 300")
    spec = replace(description.spec, fragments=3, interval=3, overlap=2)
    found = violation(replace(description, spec=spec))
    assert (found.checker, "it is committed before round" in found.sentence) == ("rounds", True), (
        found
    )


def test_incarnations_finds_a_learner_that_is_merged_after_it_left(monkeypatch):
    monkeypatch.setattr(Scheduler, "lost", lambda self, learner, reason, now: [])
    found = violation(small("9..20 trickle us/0 200\n 10.5..12 crash eu/0+trainer"))
    assert (found.checker, "of eu/0 is merged" in found.sentence) == (
        "incarnations",
        True,
    ), found


def test_incarnations_finds_a_number_that_is_issued_twice(monkeypatch):
    monkeypatch.setattr(Store, "next_incarnation", lambda self, at_least: 1)
    found = violation(small("9..11 crash eu/0+trainer"))
    assert found.checker == "incarnations"
    assert "has incarnation 1 of its predecessor" in found.sentence


def test_incarnations_finds_an_epoch_that_is_counted_twice(monkeypatch):
    monkeypatch.setattr(Store, "next_epoch", lambda self: 1)
    found = violation(small("9..11 crash syncer"))
    assert (found.checker, found.sentence) == ("incarnations", "epoch 1 comes after 1")


def test_completion_finds_learners_that_are_notified_before_the_model_is_written(monkeypatch):
    reached_end = Durability.reached_end

    def hasty(self: Durability, step: int) -> list[ev.Decision]:
        return [ev.AnnounceComplete(learner="eu/0"), *reached_end(self, step)]

    monkeypatch.setattr(Durability, "reached_end", hasty)
    found = violation(small())
    assert (found.checker, "newest durable snapshot" in found.sentence) == ("completion", True)


def test_completion_finds_a_model_that_a_power_failure_would_take(monkeypatch):
    write = model.write_temporary

    def unsynced(*args: object, **how: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedFile, "sync", lambda self: None)
            return write(*args, **how)

    monkeypatch.setattr(model, "write_temporary", unsynced)
    found = violation(small())
    assert (found.checker, "before the model is durable" in found.sentence) == ("completion", True)


def test_completion_finds_a_job_that_never_ends(monkeypatch):
    """Liveness sees no merge either, unless its bound is longer than the world."""
    endless = Bounds(progress=1e6, recovery=1e6, merge=1e6, participation=1e6, result=1e6)
    monkeypatch.setattr(Durability, "reached_end", lambda self, step: [])
    monkeypatch.setattr(Description, "bounds", property(lambda self: endless))
    monkeypatch.setattr(World, "deadline", 60.0)
    found = violation(small())
    assert (found.checker, "the job is not complete" in found.sentence) == ("completion", True)


def test_the_audit_finds_a_weight_that_the_counters_do_not_explain(monkeypatch):
    merge_line = scheduler.merge_line

    def doubled(*facts: object, **more: object) -> dict:
        line = merge_line(*facts, **more)
        line["members"][0]["weight"] *= 2
        return line

    monkeypatch.setattr(scheduler, "merge_line", doubled)
    found = violation(small())
    assert (found.checker, "has weight 20000, expected 10000" in found.sentence) == (
        "audited",
        True,
    ), found


def test_status_finds_a_state_of_training_without_a_quorum(monkeypatch):
    monkeypatch.setattr(Engine, "waiting_for", lambda self: "")
    found = violation(small("5..20 leave eu/0\n 5..20 leave eu/1"))
    assert (found.checker, "with 1 learners, the quorum is 2" in found.sentence) == (
        "status",
        True,
    ), found


def test_status_counts_no_jump_and_no_pause_that_the_silence_does_not_overlap(monkeypatch):
    """The plan's 900 s, most of it later than the silence, would explain it for hours."""
    monkeypatch.setattr(Engine, "_stuck", lambda self: "")
    monkeypatch.setattr(LinkProtocol, "_publish_open", lambda self: None)
    found = violation(
        replace(small("1000..1001 jump us/0 300\n 1000..1600 pause us/0"), steps=2000)
    )
    assert (found.checker, "there was no merge for" in found.sentence) == ("status", True), found
    assert found.now < 100.0


def test_status_finds_a_state_of_training_while_nothing_is_merged(monkeypatch):
    monkeypatch.setattr(Engine, "_stuck", lambda self: "")
    monkeypatch.setattr(LinkProtocol, "_publish_open", lambda self: None)
    found = violation(small())
    assert (found.checker, "there was no merge for" in found.sentence) == ("status", True), found


@pytest.mark.parametrize(
    "plan",
    # The document changes before the pods if the begin is odd in milliseconds, else after them.
    ["6.001..12 scale learners 2", "6..12 scale learners 2",
     "6.001..20 scale learners 2\n 8..14 scale learners 2",
     "6.001..14 scale learners 2\n 8..9 crash syncer"],
)  # fmt: skip
def test_the_number_of_learners_changes_while_the_syncer_runs(plan):
    """In both orders of pods and document, and with a crash of the syncer in between."""
    changes = Seen()
    outcome = World(small(plan), checkers=[changes]).run()
    assert outcome.ok, outcome.violation
    assert changes.limits


def test_fewer_learners_than_the_quorum_are_not_taken_over():
    changes = Seen()
    outcome = World(small("6.001..20 scale learners 1"), checkers=[changes]).run()
    assert outcome.ok, outcome.violation
    assert changes.limits == []


class Seen:
    """The numbers of learners that a syncer took over while it ran."""

    observes = (dict,)

    def __init__(self) -> None:
        self.limits: list[object] = []

    def observe(self, event: dict, now: float) -> None:
        if event["event"] == "limits":
            self.limits.append(event["learners"])

    def finish(self, now: float) -> None:
        pass


def test_limits_finds_a_learner_that_joins_beyond_the_number(monkeypatch):
    monkeypatch.setattr(admission, "beyond", lambda learner, limits: "")
    monkeypatch.setattr(engine, "beyond", lambda learner, limits: "")
    assert violation(small("6.001..14 scale learners 2\n 8..9 crash eu/1")).checker == "limits"


def test_limits_finds_a_removed_learner_that_is_still_merged(monkeypatch):
    monkeypatch.setattr(engine, "beyond", lambda learner, limits: "")
    assert violation(small("6.001..14 scale learners 2")).checker == "limits"


def test_limits_finds_a_syncer_that_never_learns_of_more_learners(monkeypatch):
    known = Engine._limits_changed

    def fewer_only(self: Engine, event: ev.LimitsChanged, now: float) -> object:
        fewer = sum(event.learners.values()) < sum(self.limits.values())
        return known(self, event, now) if fewer else []

    monkeypatch.setattr(Engine, "_limits_changed", fewer_only)
    assert violation(small("6.001..14 scale learners 2")).checker == "limits"


def test_an_engine_that_raises_is_found(monkeypatch):
    def fail(self: Scheduler, event: object, now: float) -> object:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(Scheduler, "merged", fail)
    assert violation(small()).checker == "broken"


def test_a_world_that_fails_is_made_smaller(monkeypatch):
    monkeypatch.setattr(Store, "write", lambda self, snapshot: self.root)
    plan = "3..4 pause eu/0\n 8..9 crash syncer\n 10..12 cut us/0 syncer\n 13..14 slow eu/1 3"

    def fails(description: Description) -> bool:
        found = World(description).run().violation
        return found is not None and found.checker == "durable"

    found = shrink(small(plan), fails, most_runs=25)
    assert [fault.kind.value for fault in found.plan] == ["crash"]


@pytest.mark.parametrize("seed", [1, 2])
def test_an_outcome_without_a_violation_has_no_trace(seed):
    assert World(sample(seed, steps=5, faults=False)).run().trace == ()


def test_credits_finds_a_core_that_believes_the_header(monkeypatch):
    description = small("9..30 lie-tokens eu/0 1000")
    assert World(description).run().ok
    credit = History.credit

    def believing(self: History, upload: Contribution, fragment: int) -> object:
        return upload if credit(self, upload, fragment) is not None else None

    monkeypatch.setattr(History, "credit", believing)
    found = violation(description)
    assert (found.checker, "its reports explain at most" in found.sentence) == ("credits", True)


def test_credits_finds_a_core_that_believes_false_steps(monkeypatch):
    description = small("9..30 lie-steps eu/0 3")
    spec = replace(description.spec, interval=8)  # more than two steps count in a round
    description = replace(description, spec=spec)
    assert World(description).run().ok
    credit = History.credit

    def believing(self: History, upload: Contribution, fragment: int) -> object:
        return upload if credit(self, upload, fragment) is not None else None

    monkeypatch.setattr(History, "credit", believing)
    found = violation(description)
    assert (found.checker, "steps" in found.sentence) == ("credits", True), found


def test_credits_finds_a_core_that_halves_what_an_honest_learner_counted(monkeypatch):
    credit = History.credit

    def halving(self: History, upload: Contribution, fragment: int) -> object:
        found = credit(self, upload, fragment)
        return found and replace(found, tokens=found.tokens // 2)

    monkeypatch.setattr(History, "credit", halving)
    found = violation(small())
    assert (found.checker, "the honest learner has" in found.sentence) == ("credits", True), found


def test_credits_finds_a_learner_whose_report_differs_from_its_upload(monkeypatch):
    monkeypatch.setattr(
        history, "_as_reported", lambda upload, fragment, shown: upload
    )  # the syncer does not look
    state = TrainerCore.state

    def forgetful(self: TrainerCore, **what: object) -> object:
        found = state(self, **what)
        return replace(found, tokens=[tokens + 1 for tokens in found.tokens])

    monkeypatch.setattr(TrainerCore, "state", forgetful)
    found = violation(small())
    assert (found.checker, "its report not" in found.sentence) == ("credits", True), found
