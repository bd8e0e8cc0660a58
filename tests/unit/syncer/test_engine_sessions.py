"""The engine event by event: sessions, its own pauses, what it waits for, the end of the job."""

import pytest

from diloco.spec import Checkpoint, RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.durability import RETRY_SECONDS
from diloco_syncer.core.engine import (
    HEARTBEAT_SECONDS,
    OWN_PAUSE_SECONDS,
    STUCK_SECONDS,
    STUCK_STEPS,
    Engine,
)
from diloco_syncer.core.initialisation import STALL_SECONDS
from diloco_syncer.core.learners import Ejection
from diloco_syncer.core.upload_limits import START_SECONDS
from diloco_testing.syncers.engine_job import Job, logs, of, wake

# ---------------------------------------------------------------- sessions


def test_a_hello_is_answered_with_its_identity_and_written_down():
    job = Job("a")
    job.report("a", 5)
    out = job.hello("a", session=9, incarnation=4)
    assert of(ev.Admit, out) == [
        ev.Admit(
            session=9, learner="a", incarnation=4, local_step=5, use_checkpoint=False,
            total_tokens=50,
        )
    ]  # fmt: skip
    assert logs("join", out) == [
        {
            "learner": "a",
            "incarnation": 4,
            "step": 0,
            "fresh": True,
            "localStep": 5,
            "peer": "",
            "certificate": "",
        }
    ]
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (1, "StaleIncarnation")
    assert of(ev.AnnounceReady, out) == [ev.AnnounceReady(learner="a")]
    assert of(ev.AnnounceComplete, out) == []


def test_a_replaced_member_is_lost_to_its_rounds():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job.contribute("a")
    out = job.hello("b", session=9, incarnation=9)
    assert [[c.learner for c in d.contributions] for d in of(ev.BeginMerge, out)] == [["a"]]


def test_a_refused_incarnation_is_written_down():
    job = Job("a")
    job.hello("a", session=9, incarnation=9)
    out = job.hello("a", session=10, incarnation=3)
    [line] = logs("refuse", out)
    assert (line["learner"], line["reason"]) == ("a", "StaleIncarnation")
    assert "incarnation 3 of a was replaced by 9" in line["detail"]
    assert of(ev.Close, out)[0].detail == line["detail"]
    assert of(ev.Admit, out) == []


@pytest.mark.parametrize(
    ("checkpoint", "fresh", "used"),
    [
        (20, True, True), (16, True, True), (15, True, False), (21, True, False),
        (20, False, False),
    ],
)  # fmt: skip
def test_a_checkpoint_is_used_by_a_fresh_process_if_it_is_at_most_h_steps_old(
    checkpoint, fresh, used
):
    job = Job("a")
    job.engine.scheduler.step = 20
    [admit] = of(
        ev.Admit, job.hello("a", session=9, incarnation=1, fresh=fresh, checkpoint=checkpoint)
    )
    assert admit.use_checkpoint is used


def test_no_checkpoint_is_used_before_the_model_exists_nor_one_of_step_0():
    assert not of(ev.Admit, Job("a").hello("a", session=9, checkpoint=0))[0].use_checkpoint
    job = Job("a", initialised=False)
    job.engine.scheduler.step = 20
    assert not of(ev.Admit, job.hello("a", session=9, checkpoint=20))[0].use_checkpoint


def test_a_learner_whose_session_begins_anew_is_asked_again_for_the_initial_model():
    job = Job("ab", initialised=False)
    assert job.engine.initialiser == "a"
    out = job.hello("a", session=9, fresh=False)
    assert [d.learner for d in of(ev.RequestInitial, out)] == ["a"]
    assert wake(out) == HEARTBEAT_SECONDS
    assert of(ev.AnnounceReady, out) == []
    assert of(ev.RequestInitial, job.left("b")) == [], "a is asked already"


def test_the_initial_model_is_made_durable_and_announced_to_all_learners_once():
    job = Job("ab", initialised=False)
    out = job(ev.Initialised(learner="a"), at=1.0)
    assert logs("initialised", out) == [{"learner": "a"}]
    assert [d.step for d in of(ev.TakeSnapshot, out)] == [0]
    assert [d.learner for d in of(ev.AnnounceReady, out)] == ["a", "b"]
    assert job.engine.initialiser is None
    again = job(ev.Initialised(learner="b"), at=1.0)
    assert [type(d) for d in again] == [ev.WakeAt]


def test_a_learner_that_was_not_asked_cannot_fail_the_initial_model():
    job = Job("ab", initialised=False)
    out = job(ev.InitialFailed(learner="b", reason="NotFinite", detail="NaN"))
    assert of(ev.Close, out) == logs("refuse", out) == []
    out = job(ev.InitialFailed(learner="a", reason="NotFinite", detail="NaN"))
    assert [(d.session, d.reason, d.detail) for d in of(ev.Close, out)] == [(1, "NotFinite", "NaN")]


def test_the_line_about_an_unusable_initial_model_states_what_is_wrong_with_it():
    job = Job("a", initialised=False)
    out = job(ev.InitialFailed(learner="a", reason="NotFinite", detail="NaN in layer.weight"))
    refused = {"learner": "a", "reason": "NotFinite", "detail": "NaN in layer.weight"}
    assert logs("refuse", out) == [refused]


def test_bytes_of_the_initial_model_are_its_progress():
    job = Job("a", initialised=False)
    job.wait(STALL_SECONDS - 1)
    job(ev.Progress(learner="a", round=0, attempt=0, received_bytes=1 << 24))
    assert job.engine.initialisation.deadline > STALL_SECONDS


def test_a_heartbeat_counts_for_the_current_session_only():
    job = Job("a")
    job(ev.Heartbeat(session=7, learner="a"), at=2.0)
    assert job["a"].last_seen == 0.0
    job(ev.Heartbeat(session=1, learner="a"), at=2.0)
    assert job["a"].last_seen == 2.0
    job(ev.Heartbeat(session=1, learner="never seen"), at=2.0)


def test_a_session_that_is_closed_for_silence_receives_the_reason_and_leaves():
    job = Job("a")
    for now in (2.0, 4.0, 6.0):
        out = job(ev.Tick(), at=now)
    assert of(ev.Close, out) == []
    out = job(ev.Tick(), at=6.5)
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (1, "Unavailable")
    assert "for 6.5 s" in close.detail
    assert [line["reason"] for line in logs("leave", out)] == ["HeartbeatLate"]
    assert not job["a"].training


@pytest.mark.parametrize("kind", ["Admit", "AnnounceReady", "AnnounceComplete", "RequestInitial"])
def test_a_session_that_cannot_be_served_starts_over(kind):
    job = Job("a")
    decision = {
        "Admit": ev.Admit(
            session=1, learner="a", incarnation=1, local_step=0, use_checkpoint=False, total_tokens=0
        ),
        "AnnounceReady": ev.AnnounceReady(learner="a"),
        "AnnounceComplete": ev.AnnounceComplete(learner="a"),
        "RequestInitial": ev.RequestInitial(learner="a"),
    }[kind]  # fmt: skip
    out = job(ev.Failed(decision=decision, reason="boom"))
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (1, "Unavailable")
    assert "boom" in close.detail
    job.left("a")
    assert of(ev.Close, job(ev.Failed(decision=decision, reason="boom"))) == []


def test_a_line_that_cannot_be_written_is_no_reason_for_another_line():
    job = Job("a")
    out = job(ev.Failed(decision=ev.Log(event="join", fields={}), reason="full"))
    assert [type(d) for d in out] == [ev.WakeAt]


# ---------------------------------------------------------------- the syncer's own pause


def test_a_pause_of_the_syncer_begins_above_three_seconds():
    job = Job("a")
    job.heartbeats(at=1.0)
    assert logs("pause", job(ev.Tick(), at=1.0 + OWN_PAUSE_SECONDS)) == []
    out = job(ev.Tick(), at=1.56789 + 2 * OWN_PAUSE_SECONDS)
    assert logs("pause", out) == [{"seconds": 3.568}]
    assert job["a"].last_seen == pytest.approx(1.0 + 3.56789)


def test_a_pause_is_given_back_to_whom_the_initial_model_was_asked_of_and_to_rounds():
    job = Job("a", initialised=False)
    before = job.engine.initialisation.deadline
    assert of(ev.RequestInitial, job(ev.Tick(), at=50.0)) == []
    assert job.engine.initialisation.deadline == before + 50.0
    job = Job("a")
    job.report("a", 1)
    job(ev.Tick(), at=50.0)
    assert job.rounds[0].members["a"].deadline == 50.0 + START_SECONDS


def test_a_pause_is_given_back_to_probes():
    job = Job("abc", overlap=1).meet()
    job.report_all(1)
    job.dropped("c")
    out = job.wait(5.0)
    [probe] = of(ev.ProbeLearner, out)
    before = job["c"].ejection.probe.upload.deadline
    job(ev.Tick(), at=105.0)
    assert job["c"].ejection.probe.upload.deadline == before + 100.0
    out = job(ev.Failed(decision=probe, reason="boom"))
    assert [(d.round, d.attempt) for d in of(ev.AbortMerge, out)] == [(probe.round, probe.attempt)]
    assert job["c"].ejections == 1, "an error of the syncer"
    assert of(ev.AbortMerge, job(ev.Failed(decision=probe, reason="boom"))) == []


# ---------------------------------------------------------------- what it waits for


def test_waiting_for_names_what_is_missing():
    job = Job("", initialised=False)
    assert job.engine.waiting_for() == "the first learner to upload the initial model"
    job = Job("ab", initialised=False)
    assert job.engine.waiting_for() == "a to upload the initial model"
    job = Job("ab", quorum=2)
    job.report("a", 1)
    assert job.engine.waiting_for() == "a quorum of 2 (learners training: 1)"
    job.report("b", 1)
    assert job.engine.waiting_for() == ""


def test_ejected_learners_are_named_when_the_quorum_is_short():
    job = Job("abc", quorum=2, overlap=1).meet()
    job.report_all(1)
    job.dropped("c")
    job.left("a")
    assert job.engine.waiting_for() == (
        "a quorum of 2 (learners training: 1); ejected: c (Damaged)"
    )


def stuck_after(job, since):
    """The second at which the engine begins to call itself stuck."""
    for second in range(1, 200):
        job.wait(since + second)
        if job.engine.waiting_for():
            return second
    raise AssertionError("never")


def test_a_job_is_stuck_when_a_merge_takes_longer_than_anything_explains():
    job = Job("a", fragments=2, interval=4, overlap=1)
    job.report("a", 1)
    # A round each second step, one in flight: up to three steps between merges, of one second.
    assert stuck_after(job, 0.0) == STUCK_SECONDS + STUCK_STEPS * 3 + 1
    assert "no round began" in job.engine.waiting_for()
    job["a"].history.pause()  # the time until its next report is not that of a step
    job.report("a", 2)
    text = job.engine.waiting_for()
    assert "a merge of fragment 1 (step 2, Pulling)" in text
    assert "last failure" not in text
    job.rounds[0].failure = "a: Damaged"
    assert job.engine.waiting_for().endswith("; last failure: a: Damaged")


def test_being_stuck_is_counted_from_the_last_merge():
    job = Job("a")
    job.report("a", 1)
    job.wait(20.0)
    job.merge("a", round=1, local_step=1)
    assert job.engine.waiting_for() == ""
    assert stuck_after(job, 20.0) == STUCK_SECONDS + STUCK_STEPS * 3 + 1


def test_a_quorum_that_was_missing_for_long_is_not_stuck_when_it_comes_back():
    job = Job("ab", quorum=2)
    job.report("a", 1)
    job.wait(3600.0)
    assert "a quorum of 2" in job.engine.waiting_for()
    job.report("b", 1, at=3600.0)
    job.wait(3600.0 + STUCK_SECONDS)
    assert job.engine.waiting_for() == ""


# ---------------------------------------------------------------- the end, and after it


def finished(**changes):
    job = Job("a", steps=1, overlap=1, **changes)
    job.report("a", 1)
    return job, job.merge("a", round=1, local_step=1)


def test_the_last_commit_is_followed_by_snapshot_model_and_the_good_news():
    job, out = finished()
    assert [(d.step, d.engine["step"]) for d in of(ev.TakeSnapshot, out)] == [(1, 1)]
    assert not job.engine.complete
    assert job.engine.durable_step == 0
    job(ev.Exported(step=1))
    assert not job.engine.complete, "nothing was asked to be exported"
    out = job(ev.SnapshotDone(step=1))
    assert of(ev.Finish, out) == [ev.Finish(step=1)]
    out = job(ev.Failed(decision=ev.Finish(step=1), reason="full"))
    assert job.engine.waiting_for().endswith("last failure: full")
    assert wake(out) == HEARTBEAT_SECONDS
    out = job.wait(5.0)
    assert of(ev.Finish, out) == [ev.Finish(step=1)]
    out = job(ev.Exported(step=1))
    [line] = logs("complete", out)
    assert (line["step"], line["tokens"]) == (1, 10)
    assert of(ev.AnnounceComplete, out) == [ev.AnnounceComplete(learner="a")]
    assert job.engine.complete
    assert job.engine.waiting_for() == ""


def test_a_snapshot_that_cannot_begin_is_tried_again_when_its_back_off_is_over():
    job, out = finished()
    [snapshot] = of(ev.TakeSnapshot, out)
    job.now = 1.0
    out = job(ev.Failed(decision=snapshot, reason="full"))
    assert logs("error", out) == [{"decision": "TakeSnapshot", "reason": "full"}]
    assert job.engine.waiting_for().endswith("last failure: full")
    assert of(ev.TakeSnapshot, job.wait(5.0)) == []
    out = job(ev.Heartbeat(session=1, learner="a"), at=5.5)
    assert wake(out) == 6.0
    assert [d.step for d in of(ev.TakeSnapshot, job(ev.Tick(), at=6.0))] == [1]


def test_a_snapshot_is_considered_once_per_commit():
    job = Job("a", syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    job.report("a", 1)
    assert len(of(ev.TakeSnapshot, job.merge("a", round=1, local_step=1))) == 1
    job(ev.SnapshotDone(step=1))
    assert of(ev.TakeSnapshot, job(ev.Tick())) == []


def test_a_resumed_engine_knows_its_step_merges_tokens_and_what_is_durable():
    job, _ = finished()
    state = job.engine.to_json()
    again = Engine.resume(job.engine.spec, epoch=2, state=state)
    assert (again.step, again.epoch, again.durable_step, again.tokens) == (1, 2, 1, 10)
    assert again.scheduler.merges == 1
    assert again.scheduler.pace.step == 1
    assert not again.complete
    assert of(ev.Finish, again.handle(ev.Tick(), 0.0)) == [ev.Finish(step=1)]


def test_a_resumed_engine_counts_to_its_next_snapshot_from_the_one_that_it_resumed_from():
    checkpoint = Checkpoint(every_steps=3, keep=2)
    job = Job("a", overlap=1, syncer_checkpoint=checkpoint)
    state = {**job.engine.to_json(), "step": 10}
    job.engine = Engine.resume(job.engine.spec, epoch=2, state=state)
    job.hello("a")
    found = []
    for step in (11, 12, 13):
        job.report("a", step)
        found += of(ev.TakeSnapshot, job.merge("a", round=step, local_step=step))
    assert [d.step for d in found] == [13]


def test_a_job_that_was_exported_before_is_complete_from_the_start():
    job, _ = finished()
    spec, state = job.engine.spec, job.engine.to_json()
    assert Engine.resume(spec, epoch=2, state=state, exported=True).complete
    longer = RunSpec(**{**{f: getattr(spec, f) for f in spec.__dataclass_fields__}, "steps": 5})
    assert not Engine.resume(longer, epoch=2, state=state, exported=True).complete


def test_staleness_is_the_steps_since_the_last_merge_of_a_learner():
    job = Job("ab", overlap=1).meet()
    job.report_all(1)
    job.merge("a", "b", round=1, local_step=1)
    job.report_all(2)
    job.contribute("a", round=2, local_step=2)
    job.dropped("b", round=2)
    job.merged(round=2)
    assert job.engine.step == 2
    assert (job.engine.staleness(job["a"]), job.engine.staleness(job["b"])) == (0, 1)


def test_a_learner_that_was_never_merged_is_as_stale_as_the_job_is_old():
    job = Job("a", fragments=1, overlap=1)
    for step in (1, 2, 3):
        job.report("a", step)
    assert job.engine.staleness(job["a"]) == 3


def test_the_growth_is_counted_anew_whatever_a_durable_snapshot_was_taken_for():
    """On a slow disk each follows the one before, and a failed one is repeated by the clock."""
    job = Job("a", overlap=1, syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    growth = job.engine.scheduler.growth

    def merge(step):
        job.report("a", step)
        job.contribute("a", round=step, local_step=step)
        merged = ev.Merged(
            round=step, attempt=1, delta_norm=1.0, bytes_up=0, bytes_result=0, sizes=(1.0, 1.0)
        )
        return of(ev.TakeSnapshot, job(merged))

    assert [taken.step for taken in merge(1)] == [1]
    assert merge(2) == []
    assert [taken.step for taken in of(ev.TakeSnapshot, job(ev.SnapshotDone(step=1)))] == [2]
    assert merge(3) == []
    failed = ev.SnapshotDone(step=None, reason="full")
    assert [taken.step for taken in of(ev.TakeSnapshot, job(failed))] == [3]
    assert of(ev.TakeSnapshot, job(failed)) == []
    assert set(growth.sizes) == {2, 3}, "fragments of the merges after the durable one"
    assert growth.written is None
    [taken] = of(ev.TakeSnapshot, job.wait(2 * RETRY_SECONDS + 1.0))
    job(ev.SnapshotDone(step=taken.step))
    assert growth.sizes == {}


# ---------------------------------------------------------------- at the edges


def test_a_checkpoint_of_step_1_is_used():
    job = Job("a")
    job.engine.scheduler.step = 1
    assert of(ev.Admit, job.hello("a", session=9, checkpoint=1))[0].use_checkpoint


def test_a_replaced_session_receives_the_reason_and_its_attempt_is_aborted_for_it():
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    out = job.hello("b", session=9, incarnation=9)
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (2, "StaleIncarnation")
    assert close.detail == "b joined again as incarnation 9"
    assert [d.reason for d in of(ev.AbortMerge, out)] == ["Replaced"]


def test_an_attempt_is_aborted_for_the_reason_for_which_a_member_left():
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    assert [d.reason for d in of(ev.AbortMerge, job.left("b"))] == ["Gone"]
    job = Job("ab", quorum=2, overlap=1).meet()
    job.report_all(1)
    out = job.report("b", 1 << 40)
    assert [d.reason for d in of(ev.AbortMerge, out)] == ["Protocol"]


def test_a_pause_of_the_syncer_makes_no_learner_hang():
    job = Job("ab", overlap=1).meet()
    job.report("a", 1, step_seconds=0.5, at=1.0)
    job.report("b", 1, step_seconds=3.0)
    job.engine.learners.confirm({"a": True, "b": True})
    job(ev.Tick(), at=101.0)
    job.wait(103.0)
    assert not job["a"].hangs
    assert job["a"].reported_at == 101.0


def test_the_status_names_eight_learners_of_many():
    names = [f"eu/{i:02}" for i in range(10)]
    job = Job("a", initialised=False)
    for name in names[:8]:
        job.engine.waits(name)
    assert job.engine.waiting_for().endswith(f"; with another model: {', '.join(names[:8])}")
    for name in names[8:]:
        job.engine.waits(name)
    assert job.engine.waiting_for().endswith(
        f"; with another model: {', '.join(names[:8])} and 2 more"
    )


def test_the_status_names_eight_of_the_members_without_tokens():
    names = tuple(f"eu/{i:02}" for i in range(10))
    job = Job("a")
    job.report("a", 1)
    scheduler = job.engine.scheduler
    scheduler.unchanged, scheduler.without_tokens = 7, names
    assert job.engine.waiting_for() == ""
    scheduler.unchanged = 8
    assert f"and {', '.join(names[:8])} and 2 more reported none" in job.engine.waiting_for()
    scheduler.without_tokens = names[:8]
    assert f"and {', '.join(names[:8])} reported none" in job.engine.waiting_for()
    scheduler.without_tokens = ()
    assert "and their members reported none" in job.engine.waiting_for()


def test_the_status_names_eight_ejected_learners_when_the_quorum_is_short():
    job = Job("abcdefghi", quorum=1, overlap=1, learners={"eu": 9}).meet()
    for name in "abcdefghi":
        job[name].ejection = Ejection(reason="Late", probe_at=1e9, failed_at=0.0)
    job.engine.learners.changed()
    named = ", ".join(f"{name} (Late)" for name in "abcdefgh")
    assert job.engine.waiting_for() == f"a quorum of 1 (learners training: 0); ejected: {named}"


def test_being_stuck_is_counted_from_the_initial_model():
    job = Job("a", initialised=False)
    for second in range(1, 100):
        job.heartbeats(at=float(second))
    job(ev.Initialised(learner="a"))
    job(ev.SnapshotDone(step=0))
    job.report("a", 0, offers=frozenset(), step_seconds=0.0)
    assert stuck_after(job, job.now) == STUCK_SECONDS + 1, "no step has a measured time"


def test_a_snapshot_that_could_not_begin_is_not_the_one_that_the_growth_is_counted_from():
    job = Job("a", overlap=1, syncer_checkpoint=Checkpoint(every_steps=1, keep=2))
    job.report("a", 1)
    job.contribute("a")
    merged = ev.Merged(
        round=1, attempt=1, delta_norm=1.0, bytes_up=0, bytes_result=0, sizes=(1.0, 1.0)
    )
    [snapshot] = of(ev.TakeSnapshot, job(merged))
    sizes = dict(job.engine.scheduler.growth.sizes)
    assert sizes == {1: 1.0}
    job(ev.Failed(decision=snapshot, reason="full"))
    assert job.engine.scheduler.growth.sizes == sizes


def test_a_snapshot_of_a_commit_is_taken_beside_what_else_is_decided():
    job = Job("abc", overlap=1, syncer_checkpoint=Checkpoint(every_steps=1, keep=2)).meet()
    job.report_all(1)
    job["c"].ejection = Ejection(reason="Late", probe_at=1.0, failed_at=0.0)
    job.engine.learners.changed()
    for name in "abc":
        job.contribute(name)
    for name in "ab":
        job.report(name, 2, at=0.5)
    out = job.merged(at=1.0)
    assert [d.step for d in of(ev.TakeSnapshot, out)] == [1]
    assert [d.learner for d in of(ev.ProbeLearner, out)] == ["c"]
    assert [(d.round, d.learners) for d in of(ev.Pull, out)] == [(2, ("a", "b"))]


def test_a_job_is_at_its_end_only_when_no_round_is_in_flight():
    job = Job("a", steps=2, overlap=2)
    job.report("a", 1)
    job.report("a", 2)
    assert [r.step for r in job.rounds] == [1, 2]
    assert of(ev.TakeSnapshot, job.merge("a", round=1, local_step=1)) == []
    out = job.merge("a", round=2, local_step=2)
    assert [d.step for d in of(ev.TakeSnapshot, out)] == [2]


def test_a_refused_hello_is_written_down_with_the_reason_and_the_detail():
    job = Job("")
    out = job(
        ev.Hello(
            session=5, learner="eu/0", region="eu", incarnation=1, fresh=True, local_step=1 << 40,
            checkpoint_step=0,
        )
    )  # fmt: skip
    [close] = of(ev.Close, out)
    assert (close.session, close.reason) == (5, "Protocol")
    assert logs("refuse", out) == [
        {"learner": "eu/0", "reason": "Protocol", "detail": close.detail}
    ]
