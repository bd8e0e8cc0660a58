"""Checkers bite: each finds a core that a test has broken, in a world that passes otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_sim import report
from diloco_sim.checkers.liveness import Bounds
from diloco_sim.description import Description, sample
from diloco_sim.disk import SimulatedDisk
from diloco_sim.shrink import shrink
from diloco_sim.world import World
from diloco_testing.sim import breaks
from diloco_testing.sim.worlds import Recorder, small, violation

pytestmark = pytest.mark.slow  # whole worlds


def test_the_world_of_these_tests_passes():
    outcome = World(small("5..6 crash syncer\n 9..11 crash eu/0+trainer")).run()
    assert outcome.ok, outcome.violation


def test_replay_finds_another_weight(monkeypatch):
    breaks.another_weight(monkeypatch)
    assert violation(small()).checker == "replay"


def test_replay_finds_another_momentum(monkeypatch):
    breaks.another_momentum(monkeypatch)
    assert violation(small()).checker == "replay"


def test_durable_finds_a_snapshot_that_was_not_written(monkeypatch):
    breaks.snapshots_that_are_not_written(monkeypatch)
    assert violation(small("8..9 crash syncer")).checker == "durable"


def test_durable_finds_a_restart_from_an_older_snapshot(monkeypatch):
    breaks.oldest_snapshot(monkeypatch)
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
    assert "1 stopped for manual action" in summary
    assert not failures


def test_durable_finds_a_snapshot_with_a_flipped_bit(monkeypatch):
    flips(monkeypatch, ".safetensors")
    breaks.unchecked_snapshots(monkeypatch)
    found = violation(small("8..9 disk-flip syncer\n 8..9 crash syncer"))
    assert (found.checker, "no snapshot was taken of" in found.sentence) == ("durable", True), found


def test_durable_finds_a_start_over_snapshots_that_cannot_be_read(monkeypatch):
    flips(monkeypatch, ".json")
    breaks.unreadable_snapshots_ignored(monkeypatch)
    description = small("3..4 disk-flip syncer\n 3..4 crash syncer")
    spec = replace(
        description.spec, syncer_checkpoint=replace(description.spec.syncer_checkpoint, every_steps=30)
    )  # fmt: skip
    found = violation(replace(description, spec=spec))
    assert (found.checker, "starts over" in found.sentence) == ("durable", True), found


def test_liveness_finds_learners_that_offer_nothing(monkeypatch):
    breaks.nothing_offered(monkeypatch)
    found = violation(small())
    assert found.checker == "liveness"
    assert "no merge for" in found.sentence


def test_liveness_finds_a_quorum_that_waits_for_a_learner_with_a_fault(monkeypatch):
    description = replace(small("5..200 mute us/0"), steps=400)
    assert World(description).run().ok
    breaks.no_member_is_late(monkeypatch)
    found = violation(description)
    assert found.checker == "liveness"
    assert "with a quorum without a fault" in str(found)


def test_liveness_finds_a_quorum_that_is_healthy_again_and_merges_nothing(monkeypatch):
    """Long before all faults are over, which is when each learner is judged."""
    plan = "5..15 cut eu/0 syncer\n 5..15 cut eu/1 syncer\n 1100..1101 pause us/0"
    description = replace(small(plan), steps=2000)
    breaks.no_learner_returns(monkeypatch)
    found = violation(description)
    assert found.checker == "liveness"
    assert "with a quorum without a fault" in found.sentence
    assert found.now < 500.0 < description.quiet_at


def test_liveness_finds_results_that_do_not_arrive(monkeypatch):
    breaks.results_not_fetched(monkeypatch)
    found = violation(replace(small(), steps=400))
    assert found.checker == "liveness"
    assert "was committed more than" in found.sentence


def test_liveness_finds_a_learner_that_takes_no_part(monkeypatch):
    bounds = Bounds(progress=100.0, recovery=100.0, merge=100.0, participation=60.0, result=100.0)
    monkeypatch.setattr(Description, "bounds", property(lambda self: bounds))
    breaks.one_left_out(monkeypatch)
    found = violation(replace(small(), steps=300))
    assert found.checker == "liveness"
    assert "us/0 has been in no merge" in found.sentence


def test_bounds_finds_attempts_that_are_kept(monkeypatch):
    breaks.attempts_kept(monkeypatch)
    found = violation(small())
    assert found.checker == "bounds"
    assert "attempts are open" in found.sentence


def test_bounds_finds_buffers_that_are_not_freed(monkeypatch):
    breaks.buffers_kept(monkeypatch)
    found = violation(small())
    assert (found.checker, "bytes are held by a link" in found.sentence) == ("bounds", True), found


def test_bounds_finds_old_parameters_that_are_kept(monkeypatch):
    breaks.old_parameters_kept(monkeypatch)
    found = violation(small())
    assert (found.checker, "bytes of vectors are held" in found.sentence) == ("bounds", True), found


def test_bounds_finds_a_journal_whose_old_parts_stay(monkeypatch):
    assert World(small(part_bytes=400)).run().ok
    breaks.old_parts_kept(monkeypatch)
    found = violation(small(part_bytes=400))
    assert (found.checker, "bytes are in the journal" in found.sentence) == ("bounds", True), found


def test_reports_finds_a_report_that_is_merged_twice(monkeypatch):
    breaks.reports_that_count_twice(monkeypatch)
    description = (
        small()
    )  # a learner waits for another report, but not for as long as its step takes
    spec = replace(description.spec, quorum=3)
    slow = replace(description, step_seconds=(1.0, 1.1, 3.0), spec=spec)
    assert violation(slow).checker == "reports"


def test_quorum_finds_a_round_that_does_not_wait(monkeypatch):
    breaks.rounds_without_a_quorum(monkeypatch)
    assert violation(small()).checker == "quorum"


@pytest.mark.parametrize(
    ("fragments", "sentence"),
    [(3, "are in flight, at most 1 may be"), (1, "fragment 0 is pulled while round")],
)
def test_rounds_finds_a_round_that_begins_too_early(monkeypatch, fragments, sentence):
    breaks.rounds_that_begin_too_early(monkeypatch)
    description = small("5..20 latency eu/0 syncer 1.5")
    spec = replace(description.spec, fragments=fragments, interval=max(2, fragments))
    found = violation(replace(description, spec=spec))
    assert (found.checker, sentence in found.sentence) == ("rounds", True), found


def test_rounds_finds_a_round_that_does_not_wait_for_its_turn(monkeypatch):
    breaks.commits_out_of_order(monkeypatch)
    description = small("5..20 trickle eu/0 300")
    spec = replace(description.spec, fragments=3, interval=3, overlap=2)
    found = violation(replace(description, spec=spec))
    assert (found.checker, "it is committed before round" in found.sentence) == ("rounds", True), (
        found
    )


def test_incarnations_finds_a_learner_that_is_merged_after_it_left(monkeypatch):
    breaks.members_that_left(monkeypatch)
    found = violation(small("9..20 trickle us/0 250\n 10.5..11 crash eu/0+trainer"))
    assert (found.checker, "of eu/0 is merged" in found.sentence) == (
        "incarnations",
        True,
    ), found


def test_incarnations_finds_a_number_that_is_issued_twice(monkeypatch):
    breaks.incarnation_issued_twice(monkeypatch)
    found = violation(small("9..11 crash eu/0+trainer"))
    assert found.checker == "incarnations"
    assert "has incarnation 1 of its predecessor" in found.sentence


def test_incarnations_finds_an_epoch_that_is_counted_twice(monkeypatch):
    breaks.epoch_counted_twice(monkeypatch)
    found = violation(small("9..11 crash syncer"))
    assert (found.checker, found.sentence) == ("incarnations", "epoch 1 comes after 1")


def test_completion_finds_learners_that_are_notified_before_the_model_is_written(monkeypatch):
    breaks.complete_too_early(monkeypatch)
    found = violation(small())
    assert (found.checker, "newest durable snapshot" in found.sentence) == ("completion", True)


def test_completion_finds_a_model_that_a_power_failure_would_take(monkeypatch):
    breaks.model_not_synced(monkeypatch)
    found = violation(small())
    assert (found.checker, "before the model is durable" in found.sentence) == ("completion", True)


def test_completion_finds_a_job_that_never_ends(monkeypatch):
    """Liveness sees no merge either, unless its bound is longer than the world."""
    breaks.job_without_an_end(monkeypatch)
    found = violation(small())
    assert (found.checker, "the job is not complete" in found.sentence) == ("completion", True)


def test_the_audit_finds_a_weight_that_the_counters_do_not_explain(monkeypatch):
    breaks.doubled_weight_in_the_journal(monkeypatch)
    found = violation(small())
    assert (found.checker, "has weight 20000, expected 10000" in found.sentence) == (
        "audited",
        True,
    ), found


def test_status_finds_a_state_of_training_without_a_quorum(monkeypatch):
    breaks.waits_for_nothing(monkeypatch)
    found = violation(small("5..20 leave eu/0\n 5..20 leave eu/1"))
    assert (found.checker, "with 1 learners, the quorum is 2" in found.sentence) == (
        "status",
        True,
    ), found


def test_status_counts_no_jump_and_no_pause_that_the_silence_does_not_overlap(monkeypatch):
    """The plan's 900 s, most of it later than the silence, would explain it for hours."""
    breaks.never_stuck(monkeypatch)
    found = violation(
        replace(small("1000..1001 jump us/0 300\n 1000..1600 pause us/0"), steps=2000)
    )
    assert (found.checker, "there was no merge for" in found.sentence) == ("status", True), found
    assert found.now < 100.0


def test_status_finds_a_state_of_training_while_nothing_is_merged(monkeypatch):
    breaks.never_stuck(monkeypatch)
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
    changes = Recorder("limits")
    outcome = World(small(plan), checkers=[changes]).run()
    assert outcome.ok, outcome.violation
    assert changes.seen


def test_fewer_learners_than_the_quorum_are_not_taken_over():
    changes = Recorder("limits")
    outcome = World(small("6.001..20 scale learners 1"), checkers=[changes]).run()
    assert outcome.ok, outcome.violation
    assert changes.seen == []


def test_limits_finds_a_learner_that_joins_beyond_the_number(monkeypatch):
    breaks.joins_beyond_the_number(monkeypatch)
    assert violation(small("6.001..14 scale learners 2\n 8..9 crash eu/1")).checker == "limits"


def test_limits_finds_a_removed_learner_that_is_still_merged(monkeypatch):
    breaks.removed_learners_stay(monkeypatch)
    assert violation(small("6.001..14 scale learners 2")).checker == "limits"


def test_limits_finds_a_syncer_that_never_learns_of_more_learners(monkeypatch):
    breaks.more_learners_unnoticed(monkeypatch)
    assert violation(small("6.001..14 scale learners 2")).checker == "limits"


def test_an_engine_that_raises_is_found(monkeypatch):
    breaks.engine_that_raises(monkeypatch)
    assert violation(small()).checker == "broken"


def test_a_world_that_fails_is_made_smaller(monkeypatch):
    breaks.snapshots_that_are_not_written(monkeypatch)
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
    breaks.believe_headers(monkeypatch)
    found = violation(description)
    assert (found.checker, "its reports explain at most" in found.sentence) == ("credits", True)


def test_credits_finds_a_core_that_believes_false_steps(monkeypatch):
    description = small("9..30 lie-steps eu/0 3")
    spec = replace(description.spec, interval=8)  # more than two steps count in a round
    description = replace(description, spec=spec)
    assert World(description).run().ok
    breaks.believe_headers(monkeypatch)
    found = violation(description)
    assert (found.checker, "steps" in found.sentence) == ("credits", True), found


def test_credits_finds_a_core_that_halves_what_an_honest_learner_counted(monkeypatch):
    breaks.halved_credits(monkeypatch)
    found = violation(small())
    assert (found.checker, "the honest learner has" in found.sentence) == ("credits", True), found


def test_credits_finds_a_learner_whose_report_differs_from_its_upload(monkeypatch):
    breaks.reports_that_differ(monkeypatch)
    found = violation(small())
    assert (found.checker, "its report not" in found.sentence) == ("credits", True), found
