"""The engine event by event: members that are refused, slow or lost, and what is written down of them."""

import pytest

from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import HEARTBEAT_SECONDS, STUCK_SECONDS
from diloco_syncer.core.rounds import RETRY_SECONDS, Phase
from diloco_syncer.core.scheduler import UNCHANGED_ROUNDS
from diloco_testing.syncers.engine_job import Job, logs, of, pulls, wake


def test_the_refusal_of_a_used_report_is_written_down_in_full_and_ends_the_attempt_with_its_reason():
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    job["a"].used_reports.add(1)
    out = job.contribute("a")
    detail = "t_m 1 was merged before"
    assert logs("refuse", out) == [
        {"learner": "a", "reason": "ReportUsed", "detail": detail, "step": 1, "fragment": 1}
    ]
    assert of(ev.AbortMerge, out) == [ev.AbortMerge(round=1, attempt=1, reason=detail)]


def test_a_learner_that_uploads_used_reports_is_ejected_for_waits_beyond_tau_steps():
    job = Job("abc", overlap=2).meet()
    job.report_all(1)
    for name in "bc":
        job.contribute(name)  # now they wait for a
    job["a"].used_reports.add(1)
    job["a"].waits.seconds, job["a"].waits.at = 3.0, 3.0  # of a hold of 4 s
    assert job.engine.scheduler.hold_seconds() == 4.0
    out = job.contribute("a", at=2.9)
    assert logs("refuse", out)[0]["reason"] == "ReportUsed"
    assert 3.8 < job["a"].waits.seconds < 4.0, "0.9 s beyond two steps of a second"
    assert logs("eject", out) == []

    job = Job("abc", overlap=2).meet()
    job.report_all(1)
    for name in "bc":
        job.contribute(name)
    job["a"].used_reports.add(1)
    job["a"].waits.seconds, job["a"].waits.at = 3.5, 3.0
    assert logs("eject", job.contribute("a", at=2.9))[0]["reason"] == "ReportUsed"


def test_the_refusal_of_other_counters_is_written_down_in_full():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    [line] = logs("refuse", job.contribute("b", steps=9, tokens=90))
    assert "states 90 tokens in 9 steps" in line.pop("detail")
    assert line == {"learner": "b", "reason": "CountsDiffer", "step": 1, "fragment": 1}


def test_a_member_that_is_dropped_is_written_down_in_full_and_its_reason_ends_the_attempt():
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    out = job.dropped("b", reason="NotFinite")
    assert logs("refuse", out) == [
        {"learner": "b", "reason": "NotFinite", "detail": "x", "step": 1, "fragment": 1}
    ]
    assert of(ev.AbortMerge, out) == [ev.AbortMerge(round=1, attempt=1, reason="NotFinite")]


def test_what_is_dropped_by_a_learner_that_is_not_a_member_changes_nothing():
    job = Job("abc", quorum=2, overlap=1)
    job.report("c", 1, offers=frozenset())
    job.report("a", 1)
    job.report("b", 1)
    job.wait(1.0)
    assert sorted(job.rounds[0].members) == ["a", "b"]
    assert [type(d) for d in job.dropped("c")] == [ev.WakeAt]
    assert [type(d) for d in job.dropped("a", attempt=9)] == [ev.WakeAt]


def test_uploads_that_overtook_their_report_all_count_when_it_arrives():
    job = Job("ab").meet()
    for step in (1, 2):
        job.report_all(step)
    for round_ in (1, 2):
        job.contribute("a", round=round_, local_step=round_)
        early = job.contribute(
            "b", round=round_, local_step=2 + round_, steps=round_, tokens=10 * round_
        )
        assert of(ev.BeginMerge, early) == []
    out = job.report("b", 4, steps=(2,) * 4, tokens=(20,) * 4)
    assert [d.round for d in of(ev.BeginMerge, out)] == [1, 2]


def test_a_merge_that_ends_before_all_headers_are_there_or_for_no_round_is_not_committed():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job.contribute("a")
    assert [type(d) for d in job.merged()] == [ev.WakeAt]
    assert [type(d) for d in job.merged(round=7)] == [ev.WakeAt]


def test_progress_of_a_round_that_is_merged_and_waits_for_its_turn_is_ignored():
    job = Job("ab").meet()
    for step in (1, 2):
        job.report_all(step)
    for name in "ab":
        job.contribute(name, round=2, local_step=2)
    job.merged(round=2)
    job(ev.Progress(learner="b", round=2, attempt=1, received_bytes=99, done=True))
    assert job.rounds[1].members["b"].received_bytes == 0


def slow_member(*, quorum=1):
    """Round 1 of a, b and c, in which all but c have delivered at second 0; a step takes 2 s."""
    job = Job("abc", quorum=quorum, overlap=2)
    for name in "abc":
        job.report(name, 0, offers=frozenset(), step_seconds=2.0)
    for name in "abc":
        job.report(name, 1, step_seconds=2.0)
    for name in "abc":
        job.contribute(name)
    for name in "ab":
        job(ev.Progress(learner=name, round=1, attempt=1, received_bytes=9, done=True))
    assert job.engine.scheduler.hold_seconds() == 8.0
    return job, {"learner": "c", "round": 1, "attempt": 1}


@pytest.mark.parametrize(
    ("before", "own", "after"),
    [
        (9.7, 5.0, 9.7),  # 1.25 times two steps of 2 s
        (8.0, 5.5, 9.5),
        (8.5, 5.5, 0.0),  # 2.5 times two steps
    ],
)
def test_a_member_is_slow_when_what_it_needs_beyond_a_quarter_more_than_the_overlap_has_added_up(
    before, own, after
):
    job, mine = slow_member()
    job["c"].late.seconds, job["c"].late.at = before, own
    job.wait(own - 0.1)
    assert logs("eject", job(ev.Progress(**mine, received_bytes=5), at=own - 0.1)) == []
    done = ev.Progress(**mine, received_bytes=9, awaited_seconds=own, done=True)
    for _ in range(2):  # it delivers once
        job(done, at=own)
    ejected = logs("eject", job.merged())
    assert [(x["learner"], x["reason"]) for x in ejected] == ([] if after else [("c", "Slow")])
    assert job["c"].late.seconds == pytest.approx(after)


def test_what_the_syncer_itself_takes_is_charged_to_no_member():
    job, mine = slow_member()
    job.wait(7.5)
    job(ev.Progress(**mine, received_bytes=9, awaited_seconds=1.0, done=True))
    assert logs("merge", job.merged())
    assert job["c"].late.seconds == 0.0


def test_a_learner_that_is_gone_is_not_dropped_from_a_round_that_its_end_has_committed():
    job = Job("abcdef", quorum=2, overlap=2).meet()
    for step in (1, 2):
        for name in "abcdef":
            job.report(name, step, tokens=(0,) * 4, total_tokens=0)
    for name in "bcdef":
        job.contribute(name, round=1, local_step=1, tokens=0)
    for name in "cdef":
        job.contribute(name, round=2, local_step=2, tokens=0)
    job.wait(3.2)
    job.contribute("a", round=2, local_step=2, tokens=0)
    job["a"].late.seconds, job["a"].late.at = 4.9, job.now
    out = job.left("b")
    assert [commit.round for commit in of(ev.Commit, out)] == [1, 2]
    assert (pulls(out), job.rounds) == ([], [])


def test_a_learner_that_is_gone_is_not_dropped_from_a_round_that_has_begun_again():
    job = Job("abcd", quorum=2, overlap=2).meet()
    job.report_all(1)
    for name in "abcd":
        job.report(name, 2, tokens=(0,) * 4, total_tokens=10)
    for name in "cd":
        job.dropped(name, round=1, reason="StreamBroken")
        job.contribute(name, round=2, local_step=2, tokens=0)
    job.wait(3.2)
    job.contribute("a", round=2, local_step=2, tokens=0)
    job["a"].late.seconds, job["a"].late.at = 4.9, job.now
    out = job.left("b")
    assert [line["learner"] for line in logs("eject", out)] == ["a"]


def test_a_member_that_fits_into_the_overlap_is_not_charged_for_the_pause_of_another():
    job = Job("abcde", quorum=1, overlap=2)
    for name in "abcde":
        job.report(name, 0, offers=frozenset(), step_seconds=2.0)
    for name in "abcde":
        job.report(name, 1, step_seconds=2.0)
    for name in "abc":
        job.contribute(name)
    job.wait(3.9)
    for name in "de":
        job.contribute(name)
    job.wait(10.0)
    for name in "abcde":
        own = 6.0 if name == "a" else 0.0
        done = ev.Progress(
            learner=name, round=1, attempt=1, received_bytes=9, awaited_seconds=own, done=True
        )
        job(done)
    job.merged()
    assert {name: job[name].late.seconds for name in "abcde"} == {
        "a": 2.0, "b": 0.0, "c": 0.0, "d": 0.0, "e": 0.0,
    }  # fmt: skip


def test_a_slow_member_is_left_out_of_all_rounds_to_which_it_has_not_delivered():
    job = Job("abc", overlap=3, quorum=1)
    for name in "abc":
        job.report(name, 0, offers=frozenset(), step_seconds=1.0)
    for step in (1, 2, 3):
        job.now = step - 1.0
        job.report_all(step)
    assert [r.step for r in job.rounds] == [1, 2, 3]
    for round_ in (1, 2, 3):
        for name in "abc":
            job.contribute(name, round=round_, local_step=round_)
    for name in "ab":
        job(ev.Progress(learner=name, round=1, attempt=1, received_bytes=9, done=True))
    job.wait(6.0)
    job["c"].late.seconds, job["c"].late.at = 26.0, 6.0
    job(
        ev.Progress(
            learner="c", round=1, attempt=1, received_bytes=9, awaited_seconds=6.0, done=True
        )
    )
    out = job.merged(round=1)
    assert [line["reason"] for line in logs("eject", out)] == ["Slow"]
    assert of(ev.AbortMerge, out) == [
        ev.AbortMerge(round=round_, attempt=1, reason="Slow") for round_ in (2, 3)
    ]
    assert pulls(out) == [(2, 2, ("a", "b")), (3, 2, ("a", "b"))]


@pytest.mark.parametrize("how", ["both streams break", "a stream breaks, then its session"])
def test_a_short_wait_of_a_newer_round_hides_no_long_one_of_an_older_round(how):
    job = Job("abc", overlap=2).meet()
    job.report_all(1)
    for name in "bc":
        job.contribute(name)  # now they wait for a
    job.wait(3.5)
    job.report_all(2)
    for name in "abc":
        job.contribute(name, round=2, local_step=2)
    job.now = 3.6
    assert logs("eject", job.dropped("a", round=2, reason=ev.STREAM_BROKEN)) == []
    job.now = 3.61
    out = job.left("a") if how != "both streams break" else job.dropped("a", reason="StreamBroken")
    assert logs("eject", out) == []
    assert job["a"].waits.seconds == pytest.approx(3.61, abs=0.01)


def not_received(job, name):
    begun = ev.BeginMerge(round=1, attempt=1, fragment=1, contributions=())
    return job(ev.Failed(decision=begun, reason="MemoryError()", learner=name))


def test_the_round_continues_without_a_member_whose_upload_the_syncer_cannot_receive():
    job = Job("abc", quorum=2).meet()
    job.report_all(1)
    for name in "ab":
        job.contribute(name)
    out = not_received(job, "c")
    assert logs("error", out) == [{"decision": "BeginMerge", "reason": "MemoryError()"}]
    [refused] = logs("refuse", out)
    assert (refused["learner"], refused["reason"]) == ("c", "StreamBroken")
    assert "the syncer could not receive the upload: MemoryError()" in refused["detail"]
    assert [[c.learner for c in d.contributions] for d in of(ev.BeginMerge, out)] == [["a", "b"]]
    assert logs("eject", out) == []


@pytest.mark.parametrize(("earlier", "ejected"), [(0.0, []), (1.5, ["c"])])
def test_a_member_whose_upload_the_syncer_can_never_receive_stops_no_merge_for_ever(
    earlier, ejected
):
    """The time that it costs the others adds up, although the syncer is at fault."""
    job = Job("abc", quorum=2).meet()
    job.report_all(1)
    job.wait(3.0)
    for name in "abc":
        job.contribute(name)
    job["c"].waits.seconds, job["c"].waits.at = earlier, 0.0
    out = not_received(job, "c")
    assert pulls(out) == [(1, 2, ("a", "b"))]
    assert [line["learner"] for line in logs("eject", out)] == ejected
    assert job["c"].waits.seconds == (0.0 if ejected else 3.0)


def test_of_two_late_members_of_a_merge_the_second_has_the_next_attempt_to_deliver():
    job = Job("abcd").meet()
    job.report_all(1)
    for name in "abcd":
        job.contribute(name)
    for name in "ab":
        job(ev.Progress(learner=name, round=1, attempt=1, received_bytes=9, done=True))
    out = job.wait(4.0)
    assert [line["learner"] for line in logs("refuse", out)] == ["c"]
    assert [line["step"] for line in logs("refuse", out)] == [1]
    assert of(ev.AbortMerge, out) == [ev.AbortMerge(round=1, attempt=1, reason="Stalled")]
    assert pulls(out) == [(1, 2, ("a", "b", "d"))]
    assert job["c"].long_waits == 1, "the whole attempt was in vain"


def test_the_engine_does_not_wake_for_a_pause_that_is_over():
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    out = job.dropped("b")
    assert wake(out) == pytest.approx(RETRY_SECONDS)
    out = job(ev.Tick(), at=wake(out))
    assert wake(out) == job.now + HEARTBEAT_SECONDS, "b has nothing new"


def test_a_round_without_weight_ends_its_own_attempt():
    job = Job("ab", overlap=1).meet()
    for name in "ab":
        job.report(name, 1, steps=(0,) * 4, tokens=(0,) * 4)
    job.contribute("a", steps=0, tokens=0)
    out = job.contribute("b", steps=0, tokens=0)
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [(1, 1)]
    [commit] = of(ev.Commit, out)
    assert (commit.round, commit.attempt, commit.fragment) == (1, 1, 1)


def test_a_learner_that_leaves_when_no_round_waits_for_it_adds_no_wait():
    job = Job("ab", overlap=1).meet()
    job.left("b")
    assert job["b"].waits.seconds == 0.0


def test_every_merge_of_a_learner_counts():
    job = Job("a", overlap=1)
    for step in (1, 2, 3):
        job.report("a", step)
        job.merge("a", round=step, local_step=step)
    scheduler = job.engine.scheduler
    assert (job["a"].merges, scheduler.merges, scheduler.commits) == (3, 3, 3)


def test_a_halt_is_written_down_in_full_and_ends_every_attempt():
    job = Job("ab").meet()
    for step in (1, 2):
        job.report_all(step)
    for name in "ba":
        job.contribute(name)
    grown = ev.Merged(
        round=1, attempt=1, delta_norm=1.0, bytes_up=0, bytes_result=0, sizes=(1.0, 1e6)
    )
    out = job(grown)
    [line] = logs("halt", out)
    reason = line.pop("reason")
    assert reason.startswith("fragment 1 of Θ would grow")
    assert line == {"step": 1, "fragment": 1, "learners": "a, b"}
    assert of(ev.AbortMerge, out) == [
        ev.AbortMerge(round=round_, attempt=1, reason=reason) for round_ in (1, 2)
    ]
    assert job["a"].fresh, "its reports were not merged"
    assert job.rounds == []


def test_the_line_of_rounds_that_change_nothing_shows_which_and_how_many():
    job = Job("ba", overlap=1, interval=4).meet()
    out = []
    for step in range(1, UNCHANGED_ROUNDS + 2):
        for name in "ba":
            job.report(name, step, tokens=(0,) * 4, at=float(step))
        for name in "ba":
            out += job.contribute(name, round=step, local_step=step, tokens=0)
    assert logs("unchanged", out) == [
        {"step": UNCHANGED_ROUNDS, "rounds": UNCHANGED_ROUNDS, "learners": "a, b"}
    ]
    assert job.engine.scheduler.last_merge_at is None, "the time since the last merge is shown"


def test_the_steps_of_a_learner_count_for_the_pace_until_no_merge_has_confirmed_it_for_long():
    job = Job("ab", interval=4, overlap=1)
    job.report_all(1)
    job.engine.learners.confirm({"a": True})
    for step in range(2, 34):
        job.report("a", step)
    assert job["a"].confirmed, "32 steps after the one that was confirmed"
    job.report("a", 34)
    assert not job["a"].confirmed


@pytest.mark.parametrize("why", ["an error of the syncer", "another number of learners", "a crash"])
def test_a_wait_for_a_learner_counts_only_if_it_left_by_itself(why):
    job = Job(["eu/0", "eu/1"], learners={"eu": 2}).meet()
    job.report_all(1)
    for name in job.names:
        job.contribute(name)
    job.wait(2.0)
    if why == "an error of the syncer":
        out = job(ev.Failed(decision=ev.AnnounceReady(learner="eu/1"), reason="boom"))
        assert [d.session for d in of(ev.Close, out)] == [2]
        assert [line["learner"] for line in logs("leave", out)] == ["eu/1"]
        ended = job(ev.Left(session=2, learner="eu/1", reason="StreamEnded"))
        assert logs("leave", ended) == [], "its stream ends after that"
    elif why == "another number of learners":
        job(ev.LimitsChanged(learners={"eu": 1}))
    else:
        job.left("eu/1")
    assert job["eu/1"].session is None
    assert job["eu/1"].waits.seconds == (2.0 if why == "a crash" else 0.0)


# ---------------------------------------------------------------- a pause of the syncer


@pytest.mark.parametrize("since", ["the start", "a merge", "a missing quorum"])
def test_a_pause_of_the_syncer_does_not_make_the_job_stuck(since):
    job = Job("ab", quorum=2 if since == "a missing quorum" else 1)
    if since == "a missing quorum":
        job.report("a", 1)
        job.wait(3600.0)
    job.report("b", 1)
    if since == "a merge":
        job.wait(20.0)
        job.merge("b", round=1, local_step=1)
    assert job.engine.waiting_for() == ""
    merged_at = job.engine.scheduler.last_merge_at
    job(ev.Tick(), at=job.now + 300.0)
    assert job.engine.scheduler.last_merge_at == merged_at, "the status shows when it really was"
    assert job.engine.waiting_for() == "", "it received nothing meanwhile"
    job.wait(job.now + STUCK_SECONDS)
    assert job.engine.waiting_for() == ""
    job.wait(job.now + 10 * STUCK_SECONDS)
    assert "for 330 s" in job.engine.waiting_for(), "without the pause"


@pytest.mark.parametrize("cause", ["the syncer cannot pull", "another member breaks"])
def test_pauses_that_a_member_has_not_caused_are_not_charged_when_it_breaks_once(cause):
    job = Job("abcd", quorum=2, overlap=2)
    for name in "abcd":
        job.report(name, 0, offers=frozenset(), step_seconds=0.1)
    for name in "ab":
        job.report(name, 1, step_seconds=0.1)

    def pulled():
        while job.rounds[0].phase is not Phase.PULLING:
            job.heartbeats(at=job.now + 0.1)
            job(ev.Tick())
        return job.rounds[0]

    out = []
    for _ in range(7):
        round_ = pulled()
        assert "b" in round_.members
        if cause == "another member breaks":
            lost = {"learner": "a", "reason": ev.STREAM_BROKEN, "detail": "x"}
            out += job(ev.Dropped(round=round_.step, attempt=round_.attempt, **lost))
            continue
        pull = ev.Pull(
            round=round_.step, attempt=round_.attempt, fragment=round_.fragment, learners=("a", "b")
        )
        job(ev.Failed(decision=pull, reason="no memory"))
    breaks = cause == "another member breaks"
    assert [line["learner"] for line in logs("eject", out)] == ["a"] * breaks
    job.report("c", 1, step_seconds=0.1)
    round_ = pulled()
    assert "b" in round_.members
    out = job.left("b")
    assert (logs("eject", out), job["b"].long_waits) == ([], 0)


@pytest.mark.parametrize(
    ("names", "leaves", "late"),
    [("abcde", "c", ["d", "e"]), ("abcd", "b", [])],
    ids=["the wait for the others is measured without it", "too few may wait for the rest"],
)
def test_when_a_member_leaves(names, leaves, late):
    """`a` and `b` have delivered."""
    job = Job(names, quorum=2, overlap=1).meet()
    job.report_all(1)
    for name in "ab":
        job.contribute(name)
    job.left(leaves)
    out = job.wait(4.0 if late else 20.0)
    refused = [(line["learner"], line["reason"]) for line in logs("refuse", out)]
    assert refused == [(name, "AnswerLate") for name in late]


@pytest.mark.parametrize("how", ["leaves", "is replaced"])
def test_a_learner_that_is_gone_is_in_no_merge_that_its_end_completes(how):
    job = Job("abc", quorum=2).meet()
    for step in (1, 2):
        for name in "abc":
            job.report(name, step, tokens=(0,) * 4, total_tokens=0, at=float(step))
    for name in "abc":
        job.contribute(name, round=2, local_step=2, tokens=0, at=2.1)
    for name in "ab":
        job.contribute(name, round=1, local_step=1, tokens=0, at=2.2)
    assert [r.phase for r in job.rounds] == [Phase.PULLING, Phase.MERGED]
    job.now = 2.3
    out = job.left("c") if how == "leaves" else job.hello("c", session=9, incarnation=9)
    assert [line["step"] for line in logs("merge", out)] == [1]
    assert pulls(out) == [(2, 2, ("a", "b"))]
    assert [(r.step, r.attempt) for r in job.rounds][:1] == [(2, 2)], (
        "every pull is of a round in flight"
    )


def test_a_broken_stream_is_written_down_in_full_and_ends_the_attempt_with_its_reason():
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    out = job.dropped("b", reason=ev.STREAM_BROKEN)
    assert logs("refuse", out) == [
        {"learner": "b", "reason": ev.STREAM_BROKEN, "detail": "x", "step": 1, "fragment": 1}
    ]
    assert of(ev.AbortMerge, out) == [ev.AbortMerge(round=1, attempt=1, reason=ev.STREAM_BROKEN)]


def test_a_probe_may_take_a_quarter_longer_than_tau_steps():
    job = Job("ab", overlap=2)
    for name in "ab":
        job.report(name, 1, step_seconds=4.0)
    assert job.engine.ejections.free_seconds() == 1.25 * 2 * 4.0


def test_a_member_that_is_refused_but_needed_stays_in_the_other_rounds():
    """Without it there would be no quorum, so it is not ejected: only the round that it failed repeats."""
    job = Job("ab", quorum=2).meet()
    job.report_all(1)
    assert pulls(job.report_all(2)) == [(2, 1, ("a", "b"))]
    out = job.dropped("b", round=1)
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [(1, 1)]
    assert job["b"].ejection is None
    assert sorted(job.rounds[1].members) == ["a", "b"]


def test_a_used_report_is_not_charged_with_the_pause_of_a_repeated_round():
    """It is not pulled again, so the pause does not grow because of it."""
    job = Job("ab", quorum=2, overlap=2).meet()
    job.report_all(1)
    job.rounds[0].losses["a"] = 9  # the pause would be the longest
    job["a"].used_reports.add(1)
    job.contribute("b")
    job.contribute("a", at=2.5)
    assert job["a"].waits.seconds == pytest.approx(0.5), "beyond two steps of a second"


def test_before_the_time_of_a_step_is_known_no_part_of_a_wait_is_free():
    job = Job("ab", quorum=2, overlap=2)
    for name in "ab":
        job.report(name, 0, offers=frozenset(), step_seconds=0.0)
    for name in "ab":
        job.report(name, 1, step_seconds=0.0)
    assert job.engine.learners.fastest_step_seconds() is None
    job["a"].used_reports.add(1)
    job.contribute("b")
    job.contribute("a", at=1.0)
    assert job["a"].waits.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("reason", ["Damaged", ev.STREAM_BROKEN])
def test_a_round_remembers_why_it_lost_a_member_for_the_status(reason):
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    job.dropped("b", reason=reason)
    assert job.rounds[0].failure == f"b: {reason}"


def test_a_job_is_stuck_by_the_steps_of_the_learners_that_the_quorum_needs_not_of_a_slow_one():
    job = Job("ab", fragments=2, interval=4, overlap=1, quorum=1)
    job.report("a", 0, offers=frozenset())
    job.report("b", 0, step_seconds=20.0, offers=frozenset())
    stuck = []
    for second in range(1, 70):
        job.report(
            "a", second, offers=frozenset(), at=float(second)
        )  # it steps, and offers nothing
        job(ev.Heartbeat(session=2, learner="b"))
        if job.engine.waiting_for():
            stuck.append(second)
    assert stuck == [*range(int(STUCK_SECONDS) + 10 * 3 + 1, 70)]


def test_the_probe_after_one_that_broke_is_of_the_next_fragment():
    job = Job("abc", overlap=1).meet()
    job.report_all(1)
    job.dropped("c")
    found = []
    for _ in range(3):
        while not (probes := of(ev.ProbeLearner, job.wait(job.now + 1.0))):
            pass
        [probe] = probes
        found.append(probe.fragment)
        job(
            ev.Dropped(
                learner="c", round=probe.round, attempt=probe.attempt, reason=ev.STREAM_BROKEN, detail="x"
            )
        )  # fmt: skip
    assert found == [0, 1, 2]
