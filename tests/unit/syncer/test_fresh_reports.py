"""Which reports count for a quorum; those of far learners are behind their uploads."""

from diloco_syncer.core.used_reports import UsedReports

NEAR, FAR = 0.9, 4.0


def uploaded(report=10, claimed=14):
    """Round 1 pulled when the newest report was of step 10; the upload is of step 14."""
    used_reports = UsedReports()
    used_reports.pull(1, report)
    used_reports.claim(1, claimed)
    return used_reports


def test_a_near_learner_must_report_a_step_after_its_upload():
    used_reports = uploaded(claimed=11)
    assert not used_reports.fresh(11, NEAR)
    assert used_reports.fresh(12, NEAR)


def test_a_far_learner_counts_with_its_next_report():
    used_reports = uploaded()
    assert not used_reports.fresh(10, FAR)
    assert used_reports.fresh(11, FAR)


def test_a_report_that_the_round_trip_does_not_explain_does_not_count():
    used_reports = uploaded(claimed=15)
    assert not used_reports.fresh(11, FAR)
    assert used_reports.fresh(12, FAR)


def test_before_the_upload_the_pull_alone_uses_the_report():
    used_reports = UsedReports()
    used_reports.pull(1, 10)
    assert not used_reports.fresh(10, FAR)
    assert used_reports.fresh(11, FAR)


def test_a_merged_report_stays_used_and_the_next_one_counts():
    used_reports = uploaded()
    used_reports.merge(1, 14)
    assert not used_reports.fresh(10, FAR)
    assert used_reports.fresh(11, FAR)
    assert not used_reports.fresh(14, NEAR)
    assert used_reports.refused(2, 14)


def test_a_report_counts_again_when_its_round_fails_without_a_fault_of_the_learner():
    used_reports = uploaded()
    used_reports.release(1)
    assert used_reports.fresh(10, FAR)


def test_a_report_whose_upload_was_refused_does_not_count_again():
    used_reports = uploaded()
    used_reports.spend(1)
    used_reports.release(1)
    assert not used_reports.fresh(10, FAR)
    assert used_reports.fresh(11, FAR)


def test_what_was_merged_before_a_restart_does_not_count_again():
    used_reports = UsedReports.from_json({"floor": 3, "merged": [5, 7]})
    assert not used_reports.fresh(7, FAR)
    assert used_reports.fresh(8, FAR)
    used_reports.add(9)
    assert not used_reports.fresh(9, FAR)
