"""The engine event by event: who is asked, when exactly, and what is remembered of it."""

import pytest

from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import (
    HEARTBEAT_SECONDS,
)
from diloco_syncer.core.rounds import RETRY_SECONDS, Phase
from diloco_syncer.core.upload_limits import START_SECONDS
from diloco_testing.syncers.engine_job import Job, logs, of, pulls, wake

# ---------------------------------------------------------------- quorum and grace


def test_after_the_quorum_a_round_waits_exactly_its_window_for_the_others():
    job = Job(now=5.0)
    job.report("b", 1, offers=frozenset(), at=5.0)
    out = job.report("a", 1, at=5.5)
    assert pulls(out) == []
    assert wake(out) == 6.5, "a cap of one step of a second"
    assert pulls(job(ev.Tick(), at=6.4)) == []
    assert pulls(job(ev.Tick(), at=6.5)) == [(1, 1, ("a",))]
    job.contribute("a")
    [line] = logs("merge", job.merged(at=7.0))
    assert (line["quorumSeconds"], line["graceSeconds"], line["syncSeconds"]) == (0.5, 1.0, 0.5)
    assert job.engine.scheduler.last_window_seconds == 1.0


def test_a_round_does_not_wait_when_all_learners_are_ready():
    job = Job(now=5.0, overlap=1).meet()
    job.report("a", 1, at=5.0)
    assert pulls(job.report("b", 1, at=5.25)) == [(1, 1, ("a", "b"))]
    for name in "ba":
        job.contribute(name)
    [line] = logs("merge", job.merged(at=5.5))
    assert line["graceSeconds"] == 0.25
    assert line["bytesDown"] == 10, "to each that is connected"


def test_a_round_that_falls_below_the_quorum_in_its_window_begins_to_collect_again():
    job = Job("abc", quorum=2)
    job.report("c", 1, offers=frozenset())
    job.report("a", 1)
    job.report("b", 1)
    assert job.rounds[0].phase is Phase.GRACE
    job.left("b", at=0.5)
    assert (job.rounds[0].phase, job.rounds[0].deadline) == (Phase.COLLECTING, None)
    assert pulls(job.report("c", 2, at=2.0)) == [(1, 1, ("a", "c"))]
    assert job.rounds[0].quorum_at == 2.0, "not of the first time"


@pytest.mark.parametrize("offers", [frozenset(), frozenset({0, 2, 3})])
def test_a_learner_that_does_not_offer_the_fragment_is_not_ready(offers):
    job = Job("a")
    assert pulls(job.report("a", 1, offers=offers)) == []
    assert pulls(job.report("a", 2)) == [(1, 1, ("a",))]


def test_a_report_that_a_round_has_pulled_is_not_ready_for_the_next_round():
    job = Job("ab").meet()
    assert pulls(job.report_all(1)) == [(1, 1, ("a", "b"))]
    job.report("b", 2)
    assert [r.step for r in job.rounds] == [1, 2]
    assert job.rounds[1].phase is Phase.GRACE, "a has nothing new: b alone is ready"
    assert pulls(job(ev.Tick(), at=1.0)) == [(2, 1, ("b",))]


def test_the_window_shrinks_by_what_quorum_and_sync_took():
    job = Job("ab", grace_max_steps=5.0, overlap=1, now=1.0).meet()
    job.report_all(1)
    job.merge("a", "b", round=1, local_step=1)
    scheduler = job.engine.scheduler
    job.report("a", 2, at=2.0)
    assert (scheduler.grace.quorum_seconds, scheduler.grace.sync_seconds) == (0.5, 0.0)
    assert scheduler.last_window_seconds == pytest.approx(0.8 * (1.0 - 0.5))
    job.report("b", 2, at=2.2)
    for name in "ab":
        job.contribute(name, round=2, local_step=2)
    job.merged(round=2, at=2.6)
    job.engine.learners.confirm({"a": True, "b": True})  # else ξ_step is that of the slower of two
    job.report("a", 3, at=3.0)
    assert scheduler.grace.sync_seconds == pytest.approx(0.2)
    assert scheduler.last_window_seconds == pytest.approx(0.8 * (1.0 - 0.45 - 0.2))


# ---------------------------------------------------------------- members


def test_what_is_credited_is_bounded_by_h_the_rounds_in_flight_and_the_pace():
    job = Job("a", interval=4, overlap=2)
    job.report("a", 1, steps=(1000,) * 4, tokens=(10_000,) * 4)
    [begin] = of(ev.BeginMerge, job.contribute("a", steps=1000, tokens=10_000))
    assert [(c.steps, c.tokens) for c in begin.contributions] == [(4 + 2 * 2 + 2, 100)]


def test_a_second_header_and_one_of_a_non_member_or_another_attempt_change_nothing():
    job = Job("abc", quorum=2)
    job.report("c", 1, offers=frozenset())
    job.report("a", 1)
    job.report("b", 1)
    job.wait(1.0)
    assert sorted(job.rounds[0].members) == ["a", "b"]
    assert of(ev.BeginMerge, job.contribute("c")) == []
    assert "c" not in job.rounds[0].contributions
    job.contribute("a", attempt=2)
    assert job.rounds[0].contributions == {}
    job.contribute("a")
    [begin] = of(ev.BeginMerge, job.contribute("b"))
    assert [c.learner for c in begin.contributions] == ["a", "b"]
    assert of(ev.BeginMerge, job.contribute("a")) == [], "it is merging already"


def test_a_member_that_uploads_a_used_report_is_left_out_and_named():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job["a"].used_reports.add(1)
    out = job.contribute("a")
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"], line["step"], line["fragment"]) == (
        "a", "ReportUsed", 1, 1,
    )  # fmt: skip
    [begin] = of(ev.BeginMerge, job.contribute("b"))
    assert [c.learner for c in begin.contributions] == ["b"]
    assert job["a"].ejection is None, "its report was used, it did nothing wrong"


def test_the_progress_of_an_upload_that_no_round_waits_for_is_ignored():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    out = job(ev.Progress(learner="c", round=1, attempt=1, received_bytes=10, done=True))
    assert [d for d in out if not isinstance(d, ev.WakeAt)] == []


def test_a_member_whose_counters_are_not_those_of_its_report_is_refused_with_the_reason():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    out = job.contribute("b", steps=9, tokens=90)
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"]) == ("b", "CountsDiffer")


def test_a_member_lost_while_pulling_leaves_the_attempt_to_the_others():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    assert of(ev.BeginMerge, job.contribute("a")) == []
    out = job.left("b")
    [begin] = of(ev.BeginMerge, out)
    assert (begin.attempt, [c.learner for c in begin.contributions]) == (1, ["a"])
    assert of(ev.AbortMerge, out) == []


def test_a_member_lost_while_merging_costs_one_attempt():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job.contribute("a")
    job.contribute("b")
    out = job.left("b", at=0.5)
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [(1, 1)]
    assert pulls(out) == [(1, 2, ("a",))]
    assert of(ev.BeginMerge, job.contribute("a", attempt=1)) == []
    [begin] = of(ev.BeginMerge, job.contribute("a", attempt=2))
    assert begin.attempt == 2
    assert of(ev.Commit, job.merged(attempt=1)) == [], "that was the attempt before"
    [commit] = of(ev.Commit, job.merged(attempt=2))
    assert (commit.round, commit.attempt, commit.fragment, commit.changed) == (1, 2, 1, True)


def test_a_member_that_is_lost_after_the_others_waited_long_is_ejected_for_that():
    job = Job("abc", overlap=1).meet()
    job.report_all(1)
    for name in "abc":
        job.contribute(name)
    job.heartbeats(at=2.0)
    out = job.left("b", at=4.0)
    [line] = logs("eject", out)
    assert (line["learner"], line["reason"]) == ("b", "LeftRound")


def test_a_member_that_falls_silent_after_the_others_waited_long_is_ejected_for_that():
    job = Job("abc", overlap=1).meet()
    job.report_all(1)
    for name in "abc":
        job.contribute(name)
    for now in (2.0, 4.0, 6.0):
        for name in "ac":
            job(ev.Heartbeat(session=job.session(name), learner=name), at=now)
        assert logs("leave", job(ev.Tick())) == []
    out = job(ev.Tick(), at=6.5)
    assert [line["reason"] for line in logs("leave", out)] == ["HeartbeatLate"]
    assert [(line["learner"], line["reason"]) for line in logs("eject", out)] == [
        ("b", "LeftRound")
    ]


def test_below_the_quorum_the_others_are_released_and_pulled_again_after_a_pause():
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    out = job.dropped("b")
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [(1, 1)]
    assert job["a"].fresh, "its report was not merged: it counts again"
    assert not job["b"].fresh, "the same report would fail again"
    assert wake(out) == pytest.approx(RETRY_SECONDS)
    assert pulls(job.report("b", 2, at=0.9 * RETRY_SECONDS)) == []
    assert pulls(job(ev.Tick(), at=RETRY_SECONDS)) == [(1, 3, ("a", "b"))]


def test_a_learner_that_leaves_while_a_round_collects_costs_no_attempt():
    job = Job("ab", quorum=2)
    job.report("a", 1)
    out = job.left("a")
    assert of(ev.AbortMerge, out) == []
    assert job.rounds[0].attempt == 0
    [line] = logs("leave", out)
    assert line == {"learner": "a", "incarnation": 1, "reason": "Gone"}


def test_a_member_of_a_merged_round_that_waits_for_its_turn_may_still_be_lost():
    job = Job("ab").meet()
    for step in (1, 2):
        job.report_all(step)
    for name in "ab":
        job.contribute(name, round=2, local_step=2)
    assert of(ev.Commit, job.merged(round=2)) == []
    out = job.left("b")
    assert (2, 1) in [(d.round, d.attempt) for d in of(ev.AbortMerge, out)]
    assert (2, 2, ("a",)) in pulls(out)


def test_a_member_that_does_not_deliver_is_ejected_from_every_round_that_waits_for_it():
    job = Job("abc").meet()
    for step in (1, 2):
        job.report_all(step)
    for round_ in (1, 2):
        for name in "ab":
            job.contribute(name, round=round_, local_step=round_)
    out = job.dropped("c", round=1, reason="NotFinite")
    assert logs("eject", out)[0]["learner"] == "c"
    assert [line["reason"] for line in logs("refuse", out)] == ["NotFinite"]
    assert [d.round for d in of(ev.BeginMerge, out)] == [1, 2]
    assert job.rounds[0].failure == "c: NotFinite"


def test_a_round_that_begins_again_without_an_ejected_member_is_aborted_for_the_reason_of_that():
    job = Job("abc").meet()
    for step in (1, 2):
        job.report_all(step)
    for name in "abc":
        job.contribute(name, round=2, local_step=2)
    out = job.dropped("c", round=1, reason="NotFinite")
    assert [(d.round, d.reason) for d in of(ev.AbortMerge, out)] == [(2, "NotFinite")]


def test_a_member_that_is_ejected_stays_in_a_round_to_which_it_has_delivered():
    job = Job("abc").meet()
    for step in (1, 2):
        job.report_all(step)
    job.contribute("c", round=2, local_step=2)
    done = ev.Progress(learner="c", round=2, attempt=1, received_bytes=9, done=True)
    job(done)
    job.dropped("c", round=1)
    assert sorted(job.rounds[1].members) == ["a", "b", "c"]


def test_a_member_without_a_header_is_late_and_one_with_a_header_has_stalled():
    job = Job("ab").meet()
    job.report_all(1)
    job.contribute("a")
    hold = job.engine.scheduler.hold_seconds()
    assert hold == 4.0, "twice τ steps of a second"
    job.wait(3.0)
    out = job.wait(hold)
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"]) == ("b", "AnswerLate")
    assert "delivered 0 bytes of fragment 1 in 4.0 s" in line["detail"]

    job = Job("ab").meet()
    job.report_all(1)
    for name in "ab":
        job.contribute(name)
    job(ev.Progress(learner="a", round=1, attempt=1, received_bytes=10, done=True))
    out = job.wait(hold)
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"]) == ("b", "Stalled")


def test_all_members_that_are_late_at_once_are_written_down():
    job = Job("abcd").meet()
    job.report_all(1)
    for name in "ab":
        job.contribute(name)
    out = job.wait(4.0)
    assert [line["learner"] for line in logs("refuse", out)] == ["c", "d"]
    assert [line["learner"] for line in logs("eject", out)] == ["c", "d"]
    [begin] = of(ev.BeginMerge, out)
    assert [c.learner for c in begin.contributions] == ["a", "b"]


def test_the_engine_wakes_for_the_first_member_that_can_be_late():
    job = Job("a")
    out = job.report("a", 1)
    assert wake(out) == HEARTBEAT_SECONDS
    job.wait(START_SECONDS - 1)
    assert wake(job.heartbeats(at=START_SECONDS - 1.0)) == START_SECONDS


def test_a_commit_is_remembered_with_its_members_and_time():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    for name in "ab":
        job.contribute(name)
    job.merged(at=0.5)
    scheduler = job.engine.scheduler
    assert (scheduler.merges, scheduler.commits, scheduler.last_members) == (1, 1, 2)
    assert (scheduler.last_merge_at, job.engine.step) == (0.5, 1)
    assert (job["a"].merged_round, job["a"].merges, job["a"].delivered_in_row) == (1, 1, 1)
    assert job["a"].used_reports.merged == {1}
    assert job.engine.staleness(job["a"]) == 0


def test_a_round_without_weight_commits_without_a_change_and_its_reports_are_used():
    job = Job("a")
    job.report("a", 1, steps=(0,) * 4, tokens=(0,) * 4)
    out = job.contribute("a", steps=0, tokens=0)
    assert [d.reason for d in of(ev.AbortMerge, out)] == ["all weights are zero"]
    [commit] = of(ev.Commit, out)
    assert not commit.changed
    [line] = logs("merge", out)
    assert (line["deltaNorm"], line["bytesUp"], line["bytesDown"]) == (0.0, 0, 0)
    assert not job["a"].fresh


def test_a_pull_that_cannot_be_carried_out_is_repeated_after_a_pause_and_its_reason_logged():
    job = Job("a")
    [pull] = of(ev.Pull, job.report("a", 1))
    out = job(ev.Failed(decision=pull, reason="boom"))
    assert logs("error", out) == [{"decision": "Pull", "reason": "boom"}]
    assert [(d.attempt, d.reason) for d in of(ev.AbortMerge, out)] == [(1, "boom")]
    assert job.rounds[0].failure == "boom"
    assert pulls(job(ev.Tick(), at=2 * RETRY_SECONDS)) == [(1, 3, ("a",))]
    assert of(ev.AbortMerge, job(ev.Failed(decision=pull, reason="late"))) == []


# ---------------------------------------------------------------- pace and announcements


def test_the_global_step_follows_the_steps_of_a_report():
    job = Job("a", fragments=1, interval=4, overlap=1)
    for step in (1, 2, 3):
        job.report("a", step)
    assert job.engine.step == 3, "no fragment is due before step 4"
    job.report("a", 4)
    assert (job.engine.step, [r.step for r in job.rounds]) == (3, [4])


def test_no_round_begins_after_the_last_step():
    job = Job("a", steps=2, overlap=1)
    for step in (1, 2):
        job.report("a", step)
        job.merge("a", round=step, local_step=step)
    job.report("a", 3)
    assert (job.engine.step, job.rounds) == (2, [])


def test_the_lag_of_a_learner_is_measured_against_the_steps_that_were_started():
    job = Job("a")
    job.report("a", 1)
    job.report("a", 2)
    assert job.engine.scheduler.pace.step == 2
    job.report("a", 3, global_step=0)
    assert job["a"].lag == 2.0


def test_the_length_of_a_cut_is_not_taken_for_the_round_trip():
    """The first report after a cut is the last one from before, with the step that was known then."""
    job = Job("a", overlap=1)
    for step in range(1, 9):
        job.report("a", step, global_step=step - 1)
        job.merge("a", round=step, local_step=step)
    assert job.engine.step == 8
    job.hello("a", session=9, fresh=False)
    out = job.report("a", 9, session=9, global_step=1)
    assert job["a"].lag == 0.0
    assert all(len(d.fragments) == 2 for d in of(ev.AnnounceFragments, out))
    job.report("a", 10, session=9, global_step=8)
    assert job["a"].lag == 1.0, "a round began since"


def test_a_new_session_is_announced_everything_again():
    job = Job("a")
    out = job.hello("a", session=8, fresh=False)
    assert [d.learners for d in of(ev.AnnounceFragments, out)] == [("a",)]
    assert of(ev.AnnounceFragments, job(ev.Tick())) == []
    [announced] = [ev.AnnounceFragments(learners=("a",), step=0, fragments=(1, 2, 3))]
    out = job(ev.Failed(decision=announced, reason="boom"))
    assert of(ev.AnnounceFragments, out) == [announced]
    assert of(ev.Close, out) == []


def test_a_learner_whose_round_trip_turns_out_longer_is_announced_more_although_no_round_began():
    job = Job("ab", quorum=2, overlap=1)
    for step in range(1, 9):
        for name in "ab":
            job.report(name, step, global_step=step - 1, at=float(step))
        job.merge("a", "b", round=step, local_step=step)
    job.report("a", 9, global_step=8, at=9.0)
    before = [round_.step for round_ in job.rounds]
    assert before == [9], "it waits for b"
    out = job.report("a", 10, global_step=1, at=10.0)
    assert [round_.step for round_ in job.rounds] == before
    [announced] = of(ev.AnnounceFragments, out)
    assert (announced.learners, sorted(announced.fragments)) == (("a",), [0, 1, 2, 3])
