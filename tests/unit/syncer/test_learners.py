"""What the syncer remembers of learners: sessions, incarnations, counters."""

from dataclasses import replace

import pytest

from diloco_syncer.core.events import Hello, Reported
from diloco_syncer.core.history import ABSENT_STEPS, ABSENT_TOKENS
from diloco_syncer.core.learners import (
    HANGS_SECONDS,
    HANGS_STEPS,
    Ejection,
    LearnerRecords,
    Waits,
)


def hello(name="eu/0", *, session=1, incarnation=1, fresh=True, **changes):
    values = {
        "session": session, "learner": name, "region": "eu", "incarnation": incarnation,
        "fresh": fresh, "local_step": 0, "checkpoint_step": 0, **changes,
    }  # fmt: skip
    return Hello(**values)


def reported(name="eu/0", *, session=1, local_step=1, **changes):
    values = {
        "session": session, "learner": name, "local_step": local_step, "steps": (), "tokens": (),
        "offers": frozenset(), "total_tokens": 0, "global_step": 0, "step_seconds": 1.0,
        "sync_seconds": 0.0, "loss": None, **changes,
    }  # fmt: skip
    return Reported(**values)


def joined(*names):
    learners = LearnerRecords()
    for session, name in enumerate(names or ("eu/0",), start=1):
        learners.admit(hello(name, session=session), now=5.0)
    return learners


def names(records):
    return [record.name for record in records]


def test_learners_are_in_the_order_of_names_whatever_the_order_of_joins():
    learners = joined("eu/2", "eu/0", "eu/1")
    assert names(learners) == names(learners.connected()) == ["eu/0", "eu/1", "eu/2"]


def test_at_first_there_are_no_learners():
    learners = LearnerRecords()
    assert (learners.connected(), learners.training(), learners.ejected()) == ([], [], [])


def test_a_learner_is_training_from_its_first_report_until_it_leaves():
    learners = joined("a", "b")
    assert names(learners.training()) == []
    learners.report(reported("b", session=2), now=6.0)
    assert names(learners.training()) == ["b"]
    assert [record.state for record in learners] == ["Joining", "Training"]
    learners.by_name["b"].ejection = Ejection(reason="", probe_at=0.0, failed_at=0.0)
    learners.changed()
    assert (names(learners.training()), names(learners.ejected())) == ([], ["b"])
    assert learners.by_name["b"].state == "Ejected"
    assert learners.leave("b", 2) is learners.by_name["b"]
    assert learners.by_name["b"].state == "Gone"
    assert (names(learners.ejected()), names(learners.connected())) == ([], ["a"])
    record = learners.by_name["b"]
    assert (record.session, record.report, record.step_seconds) == (None, None, None)


def test_only_the_current_session_may_leave_or_report():
    learners = joined()
    assert learners.leave("eu/0", 7) is None
    assert learners.leave("never seen", 1) is None
    assert learners.report(reported(session=7), now=9.0) is None
    record = learners.by_name["eu/0"]
    assert (record.session, record.report, record.last_seen) == (1, None, 5.0)


def test_a_new_incarnation_begins_without_the_reports_that_rounds_have_used():
    learners = joined()
    learners.by_name["eu/0"].used_reports.add(9)
    record, replaced = learners.admit(hello(session=2, incarnation=2), now=7.0)
    assert (replaced, record.incarnation, record.session, record.last_seen) == (1, 2, 2, 7.0)
    assert record.used_reports.newest == -1


def test_a_session_of_the_same_process_keeps_the_reports_that_rounds_have_used():
    learners = joined()
    learners.by_name["eu/0"].used_reports.add(9)
    record, _ = learners.admit(hello(session=2, fresh=False), now=7.0)
    assert record.used_reports.newest == 9


def test_an_older_incarnation_changes_nothing():
    learners = joined()
    learners.admit(hello(session=2, incarnation=5), now=7.0)
    assert learners.admit(hello(session=3, incarnation=4), now=8.0) is None
    record = learners.by_name["eu/0"]
    assert (record.session, record.incarnation, record.last_seen) == (2, 5, 7.0)


def test_a_session_begins_without_report_speed_and_lag_and_with_what_the_hello_states():
    learners = joined()
    learners.report(reported(local_step=4), now=6.0)
    learners.by_name["eu/0"].lag = 3.0
    again = hello(session=2, fresh=False, restarts=6, region="us")
    record, _ = learners.admit(again, now=7.0)
    assert (record.report, record.step_seconds, record.lag) == (None, None, 0.0)
    assert (record.restarts, record.region) == (6, "us")
    assert names(learners.training()) == []


@pytest.mark.parametrize(("stated", "kept"), [(3, 8), (12, 12)])
def test_the_data_position_never_moves_back(stated, kept):
    learners = joined()
    learners.report(reported(local_step=8), now=6.0)
    record, _ = learners.admit(hello(session=2, incarnation=2, local_step=stated), now=7.0)
    assert record.local_step == kept
    learners.report(reported(session=2, local_step=2), now=8.0)
    assert record.local_step == kept


def test_a_report_advances_by_its_steps_and_the_first_counts_as_one():
    learners = joined()
    assert learners.report(reported(local_step=40), now=6.0) == 1
    assert learners.report(reported(local_step=43), now=7.0) == 3
    assert learners.report(reported(local_step=43), now=8.0) == 0
    assert learners.report(reported(local_step=42), now=9.0) == 0
    record = learners.by_name["eu/0"]
    assert (record.report.local_step, record.last_seen) == (43, 9.0)


def test_the_tokens_of_a_step_are_those_since_the_report_before():
    learners = joined()
    learners.report(reported(local_step=1, total_tokens=100), now=6.0)
    record = learners.by_name["eu/0"]
    assert record.step_tokens == 100.0, "of the first: as if it were of one step"
    learners.report(reported(local_step=3, total_tokens=160), now=7.0)
    assert (record.step_tokens, record.total_tokens) == (30.0, 160)
    learners.report(reported(local_step=4, total_tokens=150), now=8.0)
    assert (record.step_tokens, record.total_tokens) == (30.0, 160), "a total never falls"


def test_the_time_of_a_step_includes_the_time_in_step_and_is_a_moving_average():
    learners = joined()
    learners.report(reported(local_step=1, step_seconds=2.0, sync_seconds=0.5), now=6.0)
    record = learners.by_name["eu/0"]
    assert record.step_seconds == 2.5
    learners.report(reported(local_step=2, step_seconds=1.0, sync_seconds=0.5), now=7.0)
    assert record.step_seconds == 2.0
    learners.report(reported(local_step=3, step_seconds=0.0, sync_seconds=9.0), now=8.0)
    assert record.step_seconds == 2.0, "0: it was not measured"


def test_the_fastest_is_that_of_the_learners_that_train():
    learners = joined("a", "b", "c")
    assert learners.fastest_step_seconds() is None
    for session, (name, seconds) in enumerate((("a", 3.0), ("b", 2.0), ("c", 1.0)), start=1):
        learners.report(reported(name, session=session, step_seconds=seconds), now=6.0)
    assert learners.fastest_step_seconds() == 2.0, "the median: no upload confirms a speed yet"
    learners.confirm({"c": True})
    assert learners.fastest_step_seconds() == 1.0
    learners.leave("c", 3)
    assert learners.fastest_step_seconds() == 3.0, "of two, the slower"


@pytest.mark.parametrize(
    ("confirmed", "usual"),
    [
        ({}, 2.0),  # the median of all
        ({"a": True}, 4.0),
        ({"a": True, "b": True}, 4.0),  # of two, the slower
        ({"b": True, "c": True}, 2.0),
        ({"a": True, "b": True, "c": True}, 2.0),
    ],
)
def test_without_a_proof_a_learner_paces_as_fast_as_the_median_of_those_that_have_one(
    confirmed, usual
):
    learners = joined("a", "b", "c", "d")
    for session, (name, seconds) in enumerate(
        (("a", 4.0), ("b", 2.0), ("c", 1.0), ("d", 0.1)), start=1
    ):
        learners.report(reported(name, session=session, step_seconds=seconds), now=6.0)
    learners.confirm(confirmed)
    assert learners.least_step_seconds(learners.by_name["d"]) == usual
    assert all(learners.least_step_seconds(learners.by_name[name]) == 0.0 for name in confirmed)


def test_a_learner_that_trains_alone_paces_as_it_steps():
    learners = joined("a", "b")
    learners.report(reported("a", step_seconds=1.0), now=6.0)
    assert learners.least_step_seconds(learners.by_name["a"]) == 0.0


def test_a_pause_of_the_others_does_not_slow_a_learner_without_a_proof():
    learners = joined("a", "b")
    for step, now in enumerate((10.0, 11.0, 1000.0), start=1):
        learners.report(reported("a", local_step=step, step_seconds=1.0), now=now)
    learners.report(reported("b", session=2, step_seconds=0.1), now=1000.0)
    learners.confirm({"a": True})
    assert learners.least_step_seconds(learners.by_name["b"]) == 4.0, "not 495 s"


def test_steps_that_come_a_little_early_or_late_all_count_for_the_pace_but_the_first():
    def counted(times):
        learners = joined("a", "b")
        learners.report(reported("a", step_seconds=1.0), now=0.0)
        learners.report(reported("b", session=2, step_seconds=0.01), now=0.0)
        learners.confirm({"a": True})
        record = learners.by_name["b"]
        assert learners.least_step_seconds(record) == 1.0
        return sum(learners.paces(record, now) for now in times)

    jitter = (0.0, -0.2, 0.3, -0.1, 0.1)
    assert counted([i + jitter[i % 5] for i in range(1, 101)]) >= 99
    assert counted([i / 20 for i in range(2000)]) <= 101


def test_only_a_report_newer_than_those_that_rounds_have_used_is_fresh():
    learners = joined()
    record = learners.by_name["eu/0"]
    assert not record.fresh
    learners.report(reported(local_step=4), now=6.0)
    assert record.fresh
    record.used_reports.pull(1, 4)
    assert not record.fresh
    learners.report(reported(local_step=5), now=6.0)
    assert record.fresh


def test_what_outlives_the_syncer_comes_back_and_no_learner_is_connected():
    learners = joined("a", "b")
    learners.report(reported("a", local_step=8, total_tokens=90), now=6.0)
    record = learners.by_name["a"]
    record.used_reports.add(7)
    record.merged_round, record.merges, record.restarts = 6, 5, 4
    again = LearnerRecords.from_json(learners.to_json())
    assert names(again) == ["a", "b"]
    assert again.connected() == []
    found = again.by_name["a"]
    assert (found.local_step, found.total_tokens, found.incarnation) == (8, 90, 1)
    assert (found.merged_round, found.merges, found.restarts, found.region) == (6, 5, 4, "eu")
    assert found.used_reports.newest == 7
    older = learners.to_json()
    del older["a"]["restarts"]
    assert LearnerRecords.from_json(older).by_name["a"].restarts == 0


def test_lines_written_after_the_snapshot_bring_joins_and_merged_reports_back():
    learners = joined("eu/0")
    learners.by_name["eu/0"].used_reports.add(3)
    join = {"event": "join", "learner": "eu/0", "incarnation": 1, "localStep": 4}
    merge = {
        "event": "merge",
        "members": [
            {"learner": "eu/0", "incarnation": 1, "step": 6},
            {"learner": "eu/7", "incarnation": 1, "step": 6},
        ],
    }
    other = {"event": "leave", "learner": "eu/9", "members": [], "incarnation": 9, "localStep": 9}
    learners.replay([join, merge, other])
    record = learners.by_name["eu/0"]
    assert (record.incarnation, record.local_step) == (1, 6)
    assert record.used_reports.refused(1, 3), "the same incarnation: what was used stays used"
    assert record.used_reports.refused(1, 6)
    assert names(learners) == ["eu/0"], "only a join introduces a learner"
    newer = {"event": "join", "learner": "us/1", "incarnation": 5, "localStep": 2}
    learners.replay([newer, {**newer, "learner": "eu/0"}, merge])
    assert learners.by_name["us/1"].region == "us"
    assert (record.incarnation, record.local_step) == (5, 6)
    assert record.used_reports.newest == -1, "a merge of the incarnation before does not count"


JOIN = {"event": "join", "learner": "eu/0", "incarnation": 2, "localStep": 4}
MERGE = {"event": "merge", "members": [{"learner": "eu/0", "incarnation": 2, "step": 6}]}


@pytest.mark.parametrize(
    "damaged",
    [
        {**JOIN, "learner": None}, {**JOIN, "learner": "eu/p"}, {**JOIN, "learner": "eu"},
        {**JOIN, "incarnation": "9"}, {**JOIN, "incarnation": 10**40},
        {name: field for name, field in JOIN.items() if name != "localStep"},
        {"event": "merge"}, {**MERGE, "members": [7]}, {**MERGE, "members": [{"learner": "eu/0"}]},
    ],
)  # fmt: skip
def test_a_damaged_line_of_the_journal_is_left_out_and_counted_and_the_others_are_replayed(damaged):
    learners = LearnerRecords()
    assert learners.replay([JOIN, damaged, MERGE]) == 1
    assert names(learners) == ["eu/0"]
    record = learners.by_name["eu/0"]
    assert (record.incarnation, record.local_step) == (2, 6)
    assert record.used_reports.refused(1, 6)


def fastest_of(**step_seconds):
    """Learners that have each made a step of so many seconds, at 10 s; their uploads confirm it."""
    learners = joined(*step_seconds)
    for session, (name, seconds) in enumerate(step_seconds.items(), start=1):
        learners.report(reported(name, session=session, step_seconds=seconds), now=10.0)
    learners.confirm(dict.fromkeys(step_seconds, True))
    return learners


def test_a_learner_that_hangs_is_not_the_fastest_until_it_makes_a_step_again():
    learners = fastest_of(a=0.5, b=5.0)
    learners.report(reported("b", session=2, local_step=2, step_seconds=5.0), now=15.0)
    learners.note_hanging(20.0)
    assert learners.fastest_step_seconds() == 0.5
    learners.note_hanging(20.5)
    assert learners.fastest_step_seconds() == 5.0
    learners.report(reported("a", local_step=2, step_seconds=0.5), now=21.0)
    assert not learners.by_name["a"].hangs
    assert learners.by_name["b"].hangs is False


def test_the_quorum_has_patience_for_a_few_steps_of_its_slowest_learner_and_of_no_slower_one():
    learners = fastest_of(a=1.0, b=5.0, c=30.0)
    assert learners.patience_seconds(1) == HANGS_SECONDS
    assert learners.patience_seconds(2) == HANGS_STEPS * 5.0
    assert learners.patience_seconds(3) == HANGS_STEPS * 30.0
    assert joined("a").patience_seconds(1) == HANGS_SECONDS, "nothing is known yet"


def test_if_all_hang_their_last_steps_count():
    learners = fastest_of(a=0.5, b=5.0)
    learners.note_hanging(1000.0)
    assert learners.fastest_step_seconds() == 0.5


def test_an_upload_confirms_a_speed_for_a_number_of_steps_only():
    learners = fastest_of(a=1.0, b=1.0, c=1.0)
    record = learners.by_name["a"]
    for name, session in (("a", 1), ("b", 2), ("c", 3)):
        learners.report(reported(name, session=session, local_step=2), now=11.0)
    assert learners.least_step_seconds(record) == 0.0
    record.unproven_steps = 40
    learners.expire_confirmation(record, 40)
    assert record.confirmed
    record.unproven_steps += 1
    learners.expire_confirmation(record, 40)
    assert not record.confirmed
    assert learners.least_step_seconds(record) == 1.0, "the median of the others"
    learners.admit(hello("a", session=9, fresh=False), now=12.0)
    assert not record.confirmed, "only a merge ends that"
    learners.confirm({"a": True})
    assert learners.least_step_seconds(record) == 0.0


def test_the_speeds_are_measured_again_after_a_sixteenth_of_the_learners_has_reported():
    learners = fastest_of(**{f"n{i:02}": 1.0 for i in range(33)})
    assert learners.fastest_step_seconds() == 1.0
    for i, fastest in ((0, 1.0), (1, 1.0), (2, 0.8)):
        learners.report(
            reported(f"n{i:02}", session=i + 1, local_step=2, step_seconds=0.6), now=10.1
        )
        assert learners.fastest_step_seconds() == fastest, f"after {i + 1} of 33 reports"
    sixteen = fastest_of(**{f"n{i:02}": 1.0 for i in range(16)})
    assert sixteen.fastest_step_seconds() == 1.0
    sixteen.report(reported("n00", local_step=2, step_seconds=0.6), now=10.1)
    assert sixteen.fastest_step_seconds() == 0.8


def test_one_of_many_that_hung_and_makes_a_step_is_the_fastest_again_at_once():
    learners = fastest_of(a=0.5, **{f"n{i:02}": 4.0 for i in range(40)})
    for i in range(40):
        learners.report(
            reported(f"n{i:02}", session=i + 2, local_step=2, step_seconds=4.0), now=14.0
        )
    learners.note_hanging(21.0)
    assert learners.fastest_step_seconds() == 4.0
    learners.report(reported("a", local_step=2, step_seconds=0.5), now=21.0)
    assert learners.fastest_step_seconds() == 4.0, "its step took 11 s"
    assert learners.least_step_seconds(learners.by_name["a"]) == 0.0


def test_a_step_that_comes_exactly_when_the_next_one_counts_does():
    learners = joined("a", "b")
    learners.report(reported("a", step_seconds=2.0), now=0.0)
    learners.report(reported("b", session=2, step_seconds=0.5), now=0.0)
    learners.confirm({"a": True})
    record = learners.by_name["b"]
    record.paced_at = 10.0
    assert not learners.paces(record, 11.9)
    assert learners.paces(record, 12.0)
    assert learners.paces(record, 15.0)
    assert not learners.paces(record, 15.9), "of a late step, one more may come early"
    assert learners.paces(record, 16.0)
    assert record.paced_at == 16.0


def test_learners_without_a_measured_step_pace_as_they_step():
    learners = joined("a", "b")
    learners.report(reported("a", step_seconds=0.0), now=6.0)
    learners.report(reported("b", session=2, step_seconds=0.0), now=6.0)
    assert learners.least_step_seconds(learners.by_name["a"]) == 0.0
    assert learners.fastest_step_seconds() is None


def test_a_report_without_new_tokens_keeps_the_tokens_of_a_step():
    learners = joined()
    learners.report(reported(local_step=1, total_tokens=100), now=6.0)
    learners.report(reported(local_step=2, total_tokens=160), now=7.0)
    learners.report(reported(local_step=3, total_tokens=160), now=8.0)
    assert learners.by_name["eu/0"].step_tokens == 60.0


def test_steps_without_a_merge_are_counted_as_they_are_reported_in_whatever_session():
    learners = joined()
    record = learners.by_name["eu/0"]
    for local_step in (7, 9):
        learners.report(reported(local_step=local_step), now=6.0)
    assert record.unproven_steps == 3, "of the first report of a session, one"
    learners.admit(hello(session=2, fresh=False, local_step=5000), now=7.0)
    assert record.unproven_steps == 3, "what it trained during a cut was not reported"
    learners.report(reported(session=2, local_step=5000), now=8.0)
    learners.report(reported(session=2, local_step=5000), now=8.0)
    assert record.unproven_steps == 4
    learners.admit(hello(session=3, fresh=False), now=9.0)
    learners.report(reported(session=3, local_step=8), now=9.0)
    learners.report(reported(session=3, local_step=9), now=9.0)
    assert record.unproven_steps == 6, "also those that it had reported"
    learners.confirm({"eu/0": False})
    assert record.unproven_steps == 0


def test_a_new_process_has_confirmed_nothing_and_the_next_session_of_one_still_has():
    learners = joined()
    learners.confirm({"eu/0": True})
    learners.admit(hello(session=2, fresh=False), now=7.0)
    assert learners.by_name["eu/0"].confirmed
    learners.admit(hello(session=3, incarnation=2), now=7.0)
    assert not learners.by_name["eu/0"].confirmed


def test_a_learner_never_seen_may_have_trained_for_a_month_and_not_longer():
    learners = LearnerRecords()
    assert learners.implausible(hello(local_step=ABSENT_STEPS), 5.0) == ""
    assert learners.implausible(hello(local_step=ABSENT_STEPS + 1), 5.0) != ""
    assert learners.implausible(reported(local_step=1, total_tokens=ABSENT_TOKENS), 5.0) == ""
    assert learners.implausible(reported(local_step=1, total_tokens=ABSENT_TOKENS + 1), 5.0) != ""


@pytest.mark.parametrize("name", ["/0", "eu/\u00b2", "eu/", "/", "eu/x/0"])
def test_a_join_of_a_name_that_no_learner_has_is_damaged(name):
    learners = LearnerRecords()
    assert learners.replay([{**JOIN, "learner": name}, {**JOIN, "learner": name}]) == 2
    assert names(learners) == []


def test_a_position_in_an_older_line_does_not_move_a_learner_back():
    learners = LearnerRecords()
    learners.replay([{**JOIN, "localStep": 9}, MERGE, {**JOIN, "localStep": 3}])
    record = learners.by_name["eu/0"]
    assert record.local_step == 9
    assert record.used_reports.refused(1, 6)


def test_a_pause_of_the_syncer_forgives_no_wait_and_hides_none():
    waits = Waits()
    assert waits.add(10.0, 100.0, most=60.0)
    waits.shift(50.0)
    assert waits.left(150.0) == 10.0
    assert not waits.add(10.0, 150.0, most=60.0), "the same wait"
    assert waits.add(20.0, 150.0, most=60.0), "half of it was not counted yet"
    assert waits.left(150.0) == 20.0


def test_a_wait_that_begins_when_the_one_before_ended_is_counted_with_it_as_one():
    waits = Waits()
    assert waits.add(2.0, 2.0, most=60.0)
    assert waits.add(2.0, 4.0, most=60.0)
    before = waits.left(5.0)
    assert waits.add(4.0, 5.0, most=60.0), "from 1 to 5, of which one second is new"
    assert waits.left(5.0) == pytest.approx(before + 1.0)


def test_the_time_between_two_waits_may_still_be_counted():
    waits = Waits()
    assert waits.add(2.0, 2.0, most=60.0)
    assert waits.add(2.0, 12.0, most=60.0)
    before = waits.left(12.0)
    assert waits.add(7.0, 12.0, most=60.0), "from 5 to 12, of which two seconds were counted"
    assert waits.left(12.0) == pytest.approx(before + 5.0)


def test_a_step_that_was_reported_before_a_cut_is_credited_once():
    """The same process reports again from its last step on: what it was credited stays."""
    learners = LearnerRecords()
    learners.admit(hello(), now=0.0)
    report = Reported(
        session=1, learner="eu/0", local_step=5, steps=(5,), tokens=(50,), offers=frozenset(), total_tokens=50,
        global_step=0, step_seconds=1.0, sync_seconds=0.0, loss=None,
    )  # fmt: skip
    assert learners.report(report, now=1.0) == 1
    learners.leave("eu/0", 1)
    learners.admit(hello(session=2, fresh=False, local_step=5), now=2.0)
    assert learners.report(replace(report, session=2), now=3.0) == 0
    assert len(learners.by_name["eu/0"].history.reports) == 1
