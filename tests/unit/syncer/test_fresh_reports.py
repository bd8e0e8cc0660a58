"""Which reports count for a quorum; those of far learners are behind their uploads."""

from diloco_syncer.core.claims import Claims

NEAR, FAR = 0.9, 4.0


def uploaded(report=10, claimed=14):
    """Round 1 pulled when the newest report was of step 10; the upload is of step 14."""
    claims = Claims()
    claims.pull(1, report)
    claims.claim(1, claimed)
    return claims


def test_a_near_learner_must_report_a_step_after_its_upload():
    claims = uploaded(claimed=11)
    assert not claims.fresh(11, NEAR)
    assert claims.fresh(12, NEAR)


def test_a_far_learner_counts_with_its_next_report():
    claims = uploaded()
    assert not claims.fresh(10, FAR)
    assert claims.fresh(11, FAR)


def test_a_report_that_the_round_trip_does_not_explain_does_not_count():
    claims = uploaded(claimed=15)
    assert not claims.fresh(11, FAR)
    assert claims.fresh(12, FAR)


def test_before_the_upload_the_pull_alone_uses_the_report():
    claims = Claims()
    claims.pull(1, 10)
    assert not claims.fresh(10, FAR)
    assert claims.fresh(11, FAR)


def test_a_merged_report_stays_used_and_the_next_one_counts():
    claims = uploaded()
    claims.merge(1, 14)
    assert not claims.fresh(10, FAR)
    assert claims.fresh(11, FAR)
    assert not claims.fresh(14, NEAR)
    assert claims.refused(2, 14)


def test_a_report_counts_again_when_its_round_fails_without_a_fault_of_the_learner():
    claims = uploaded()
    claims.release(1)
    assert claims.fresh(10, FAR)


def test_a_report_whose_upload_was_refused_does_not_count_again():
    claims = uploaded()
    claims.spend(1)
    claims.release(1)
    assert not claims.fresh(10, FAR)
    assert claims.fresh(11, FAR)


def test_what_was_merged_before_a_restart_does_not_count_again():
    claims = Claims.from_json({"floor": 3, "merged": [5, 7]})
    assert not claims.fresh(7, FAR)
    assert claims.fresh(8, FAR)
    claims.add(9)
    assert not claims.fresh(9, FAR)
