"""Which reports rounds have used: no report is merged twice, none is lost without need."""

import pytest

from diloco_syncer.core.used_reports import MAX_MERGED, UsedReports


def test_nothing_is_used_at_first_so_that_the_report_of_step_0_counts():
    used_reports = UsedReports()
    assert used_reports.newest == -1
    assert used_reports.refused(1, 0) == ""


def test_only_reports_newer_than_the_one_that_a_round_pulled_count_for_a_quorum():
    used_reports = UsedReports()
    used_reports.pull(1, 5)
    assert used_reports.newest == 5
    used_reports.claim(1, 6)  # the copy was taken a step later
    assert used_reports.newest == 6


def test_a_released_round_gives_back_its_own_report_only():
    used_reports = UsedReports()
    used_reports.pull(1, 5)
    used_reports.claim(1, 5)
    used_reports.pull(2, 7)
    used_reports.claim(2, 8)
    used_reports.release(2)
    assert used_reports.newest == 5
    used_reports.release(1)
    used_reports.release(1)
    assert used_reports.newest == -1


def test_a_merged_report_stays_used_although_its_round_is_over():
    used_reports = UsedReports()
    used_reports.pull(1, 5)
    used_reports.claim(1, 6)
    used_reports.merge(1, 6)
    assert used_reports.newest == 6
    assert (used_reports.pulled, used_reports.claimed) == ({}, {})
    used_reports.merge(2, 4)  # of an older report, committed later
    assert used_reports.newest == 6
    assert "merged before" in used_reports.refused(3, 6)
    assert "merged before" in used_reports.refused(3, 4)
    assert used_reports.refused(3, 5) == "", "it was skipped, not merged"


def test_a_report_that_another_round_in_flight_claims_is_refused():
    used_reports = UsedReports()
    used_reports.claim(1, 5)
    assert "round 1" in used_reports.refused(2, 5)
    assert used_reports.refused(1, 5) == "", "its own round may have it"
    assert used_reports.refused(2, 6) == ""


def test_the_floor_itself_counts_as_merged_and_the_next_report_does_not():
    used_reports = UsedReports(floor=4)
    assert used_reports.newest == 4
    assert used_reports.refused(1, 4)
    assert not used_reports.refused(1, 5)


def test_a_report_at_or_below_the_floor_is_not_kept_one_by_one():
    used_reports = UsedReports(floor=4)
    used_reports.add(4)
    assert used_reports.merged == set()
    assert used_reports.newest == 4
    used_reports.add(5)
    assert used_reports.merged == {5}


def test_memory_is_bounded_and_what_was_merged_stays_merged():
    used_reports = UsedReports()
    for step in range(MAX_MERGED):
        used_reports.add(2 * step)
    assert (used_reports.floor, len(used_reports.merged)) == (-1, MAX_MERGED)
    used_reports.add(2 * MAX_MERGED)
    assert used_reports.floor == 2 * (MAX_MERGED // 2 - 1)
    assert len(used_reports.merged) == MAX_MERGED // 2 + 1
    assert used_reports.newest == 2 * MAX_MERGED
    for step in range(MAX_MERGED + 1):
        assert used_reports.refused(1, 2 * step)


@pytest.mark.parametrize("merged", [set(), {7, 9}])
def test_what_outlives_the_syncer_is_what_was_merged_and_nothing_in_flight(merged):
    used_reports = UsedReports(floor=3, merged=set(merged))
    used_reports.pull(1, 20)
    used_reports.claim(1, 21)
    data = used_reports.to_json()
    assert data == {"floor": 3, "merged": sorted(merged)}
    again = UsedReports.from_json(data)
    assert again.newest == max(merged, default=3)
    assert not again.refused(2, 21)


def test_a_round_that_pulled_nothing_uses_no_report():
    used_reports = UsedReports()
    used_reports.spend(1)
    assert used_reports.fresh(0, 4.0)


def test_a_learner_one_step_behind_is_a_far_one():
    used_reports = UsedReports()
    used_reports.pull(1, 10)
    used_reports.claim(1, 11)
    assert used_reports.fresh(11, 1.0), "its upload is of a step later than its report"
    assert not used_reports.fresh(11, 0.99)
