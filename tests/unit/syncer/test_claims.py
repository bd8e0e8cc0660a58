"""Which reports rounds have used: no report is merged twice, none is lost without need."""

import pytest

from diloco_syncer.core.claims import MOST_MERGED, Claims


def test_nothing_is_used_at_first_so_that_the_report_of_step_0_counts():
    claims = Claims()
    assert claims.newest == -1
    assert claims.refused(1, 0) == ""


def test_only_reports_newer_than_the_one_that_a_round_pulled_count_for_a_quorum():
    claims = Claims()
    claims.pull(1, 5)
    assert claims.newest == 5
    claims.claim(1, 6)  # the copy was taken a step later
    assert claims.newest == 6


def test_a_released_round_gives_back_its_own_report_only():
    claims = Claims()
    claims.pull(1, 5)
    claims.claim(1, 5)
    claims.pull(2, 7)
    claims.claim(2, 8)
    claims.release(2)
    assert claims.newest == 5
    claims.release(1)
    claims.release(1)
    assert claims.newest == -1


def test_a_merged_report_stays_used_although_its_round_is_over():
    claims = Claims()
    claims.pull(1, 5)
    claims.claim(1, 6)
    claims.merge(1, 6)
    assert claims.newest == 6
    assert (claims.pulled, claims.claimed) == ({}, {})
    claims.merge(2, 4)  # of an older report, committed later
    assert claims.newest == 6
    assert "merged before" in claims.refused(3, 6)
    assert "merged before" in claims.refused(3, 4)
    assert claims.refused(3, 5) == "", "it was skipped, not merged"


def test_a_report_that_another_round_in_flight_claims_is_refused():
    claims = Claims()
    claims.claim(1, 5)
    assert "round 1" in claims.refused(2, 5)
    assert claims.refused(1, 5) == "", "its own round may have it"
    assert claims.refused(2, 6) == ""


def test_the_floor_itself_counts_as_merged_and_the_next_report_does_not():
    claims = Claims(floor=4)
    assert claims.newest == 4
    assert claims.refused(1, 4)
    assert not claims.refused(1, 5)


def test_a_report_at_or_below_the_floor_is_not_kept_one_by_one():
    claims = Claims(floor=4)
    claims.add(4)
    assert claims.merged == set()
    assert claims.newest == 4
    claims.add(5)
    assert claims.merged == {5}


def test_raising_the_floor_forgets_what_it_covers_and_never_lowers_it():
    claims = Claims(merged={3, 5, 6})
    claims.raise_floor(5)
    assert (claims.floor, claims.merged) == (5, {6})
    claims.raise_floor(2)
    assert (claims.floor, claims.merged) == (5, {6})


def test_memory_is_bounded_and_what_was_merged_stays_merged():
    claims = Claims()
    for step in range(MOST_MERGED):
        claims.add(2 * step)
    assert (claims.floor, len(claims.merged)) == (-1, MOST_MERGED)
    claims.add(2 * MOST_MERGED)
    assert claims.floor == 2 * (MOST_MERGED // 2 - 1)
    assert len(claims.merged) == MOST_MERGED // 2 + 1
    assert claims.newest == 2 * MOST_MERGED
    for step in range(MOST_MERGED + 1):
        assert claims.refused(1, 2 * step)


@pytest.mark.parametrize("merged", [set(), {7, 9}])
def test_what_outlives_the_syncer_is_what_was_merged_and_nothing_in_flight(merged):
    claims = Claims(floor=3, merged=set(merged))
    claims.pull(1, 20)
    claims.claim(1, 21)
    data = claims.to_json()
    assert data == {"floor": 3, "merged": sorted(merged)}
    again = Claims.from_json(data)
    assert again.newest == max(merged, default=3)
    assert not again.refused(2, 21)
