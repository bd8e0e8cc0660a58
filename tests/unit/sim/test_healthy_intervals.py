"""Who is healthy when, and what explains that nothing is merged, by a plan of faults."""

from __future__ import annotations

import pytest

from diloco_sim.faults import Plan
from diloco_sim.healthy_intervals import BELIEVED_SECONDS, ExplainedGap, Health

LEARNERS = ("eu/0", "us/0", "eu/1")


def health(*lines: str, quorum: int = 2) -> Health:
    return Health(
        Plan.parse("\n".join(lines)), syncer="syncer", learners=LEARNERS, all_learners=LEARNERS,
        quorum=quorum, trainer="+trainer",
    )  # fmt: skip


def test_without_a_fault_all_are_healthy_from_the_beginning():
    assert health().since(100.0) == 0.0


def test_a_learner_with_a_fault_does_not_count_unless_there_are_enough_others():
    assert health("5..10 mute eu/0").since(7.0) == 0.0
    assert health("5..10 mute eu/0", quorum=3).since(7.0) is None
    assert health("5..10 mute eu/0", "6..8 cut syncer us/0").since(7.0) is None
    assert health("5..10 mute eu/0", "6..8 pause us/0+trainer").since(7.0) is None


def test_a_quorum_is_healthy_again_when_enough_of_its_faults_are_over():
    found = health("5..10 mute eu/0", "6..8 cut syncer us/0", "7..20 trickle us/0 100")
    assert found.since(10.0) == 10.0
    assert found.since(19.0) == 10.0
    assert found.since(30.0) == 10.0
    assert health("5..10 mute eu/0", "6..8 cut syncer us/0", quorum=3).since(30.0) == 10.0


def test_a_fault_of_the_syncer_counts_until_it_is_over():
    found = health("5..10 pause syncer", "20..21 wall-jump syncer 5")
    assert [found.since(now) for now in (4.0, 7.0, 12.0, 20.5, 30.0)] == [
        0.0,
        None,
        10.0,
        None,
        21.0,
    ]


def test_a_disk_delays_nothing_but_a_start_of_the_syncer():
    assert health("12..100 disk-hang syncer").since(50.0) == 0.0
    found = health("20..100 disk-hang syncer", "30..31 crash syncer", "95..120 disk-fail syncer 1")
    assert [found.since(now) for now in (25.0, 30.5, 110.0, 130.0)] == [0.0, None, None, 120.0]
    assert health("0..60 disk-hang syncer").since(50.0) is None


def test_learners_beyond_the_number_are_absent():
    found = health("5..10 scale learners 1", quorum=2)
    assert [found.since(now) for now in (4.0, 7.0, 12.0)] == [0.0, None, 10.0]


def explained_gap(*lines: str) -> ExplainedGap:
    return ExplainedGap(Plan.parse("\n".join(lines)), between=2.0, longest_step=1.0)


def test_only_what_overlaps_a_silence_or_was_measured_just_before_explains_it():
    plain = explained_gap().seconds(100.0, 200.0)
    assert plain == 35.0 + 10 * 2.0 * 1.0
    found = explained_gap(
        "50..50.1 jump eu/0 300", "150..170 pause us/0", "900..900.1 jump eu/0 60"
    )
    assert found.seconds(100.0, 120.0) == plain
    assert found.seconds(100.0, 160.0) == plain + 10 * 2.0 * 20.0
    assert found.seconds(60.0, 120.0) == plain + 10 * 2.0 * 300.0
    assert found.seconds(180.0, 300.0) == plain + 10 * 2.0 * 20.0
    assert found.seconds(200.0, 300.0) == plain


@pytest.mark.parametrize("amount", [1000.0, 0.01])
def test_a_learner_that_lies_about_its_durations_explains_what_is_believed_of_it(amount):
    found = explained_gap(f"50..60 lie-seconds eu/0 {amount}")
    assert found.seconds(70.0, 80.0) == 35.0 + 10 * 2.0 * BELIEVED_SECONDS
    assert found.seconds(90.0, 95.0) == explained_gap().seconds(90.0, 95.0)
