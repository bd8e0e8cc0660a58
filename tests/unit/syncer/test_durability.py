"""Snapshots, the end of the job, and the initial model, event by event."""

from diloco_syncer.core import events as ev
from diloco_syncer.core.durability import MAX_RETRY_SECONDS, RETRY_SECONDS, Durability, Stage
from diloco_syncer.core.initialisation import STALL_SECONDS, Initialisation
from diloco_syncer.core.upload_limits import MIN_BYTES_PER_SECOND


def durability(**changes):
    return Durability(**{"every_steps": 10, "capture": lambda: {"state": 1}, **changes})


def taken(decisions):
    return [d.step for d in decisions if isinstance(d, ev.TakeSnapshot)]


def failed(reason="full"):
    return ev.SnapshotDone(step=None, reason=reason)


def test_a_snapshot_is_due_every_so_many_steps_after_the_last_request():
    it = durability(snapshot_step=5)
    assert it.committed(14) == []
    [snapshot] = it.committed(15)
    assert (snapshot.step, snapshot.engine) == (15, {"state": 1})
    it.snapshot_done(ev.SnapshotDone(step=15), 16, 0.0)
    assert it.committed(24) == []
    assert taken(it.committed(25)) == [25]


def test_only_one_snapshot_is_written_at_a_time_and_a_second_request_follows_the_first():
    it = durability()
    assert taken(it.snapshot(0)) == [0]
    assert it.snapshot(3) == []
    assert it.snapshot_step == 0
    assert taken(it.snapshot_done(ev.SnapshotDone(step=0), 4, 1.0)) == [4], "as of now"
    assert it.snapshot_done(ev.SnapshotDone(step=4), 5, 1.0) == []
    assert it.durable_step == 4


def test_the_durable_step_never_moves_back():
    it = durability(durable_step=7)
    it.snapshot_done(ev.SnapshotDone(step=3), 9, 0.0)
    assert it.durable_step == 7


def test_a_failed_snapshot_is_repeated_after_a_back_off_that_doubles_and_ends_with_a_success():
    it, now = durability(), 0.0
    it.snapshot(0)
    pauses = []
    for _ in range(6):
        assert it.snapshot_done(failed(), 2, now) == []
        assert it.failure == "full"
        pauses.append(it.retry_at - now)
        assert it.tick(2, it.retry_at - 0.01) == []
        now = it.retry_at
        assert taken(it.tick(2, now)) == [2]
        assert it.retry_at is None
    assert pauses == [RETRY_SECONDS * f for f in (1, 2, 4, 8)] + [MAX_RETRY_SECONDS] * 2
    it.snapshot_done(ev.SnapshotDone(step=2), 2, now)
    assert (it.failure, it.durable_step) == ("", 2)
    it.snapshot(3)
    it.snapshot_done(failed(), 3, now)
    assert it.retry_at == now + RETRY_SECONDS


def test_without_a_failure_a_tick_writes_nothing():
    assert durability().tick(50, 1e9) == []


def test_at_the_end_the_last_step_is_written_although_none_was_due():
    it = durability(snapshot_step=100, durable_step=90)
    assert taken(it.reached_end(100)) == [100]
    assert it.stage is Stage.SNAPSHOT
    assert it.waiting_for() == "the last snapshot to become durable"
    [finish] = it.snapshot_done(ev.SnapshotDone(step=100), 100, 0.0)
    assert finish == ev.Finish(step=100)
    assert it.stage is Stage.EXPORT
    assert it.waiting_for() == "the model to be exported"
    assert it.exported() == []
    assert (it.stage, it.waiting_for()) == (Stage.COMPLETE, "")


def test_at_the_end_an_older_snapshot_that_is_being_written_is_not_enough():
    it = durability()
    it.snapshot(95)
    assert it.reached_end(100) == []
    assert taken(it.snapshot_done(ev.SnapshotDone(step=95), 100, 0.0)) == [100]


def test_a_last_step_that_is_durable_already_is_exported_at_once():
    it = durability(durable_step=100)
    assert it.reached_end(100) == [ev.Finish(step=100)]
    assert it.stage is Stage.EXPORT


def test_a_snapshot_that_fails_at_the_end_waits_for_its_back_off():
    it = durability()
    it.reached_end(100)
    assert it.snapshot_done(failed(), 100, 0.0) == []
    assert it.waiting_for() == "the last snapshot to become durable; last failure: full"
    assert it.tick(100, RETRY_SECONDS - 0.1) == []
    assert taken(it.tick(100, RETRY_SECONDS)) == [100]


def test_a_failed_snapshot_of_a_step_that_is_durable_already_does_not_end_the_job():
    it = durability(durable_step=7)
    it.snapshot(7)
    it.snapshot_done(failed(), 7, 0.0)
    assert taken(it.tick(7, RETRY_SECONDS)) == [7]
    assert it.stage is Stage.TRAINING


def test_a_failed_export_is_repeated_and_no_snapshot_with_it():
    it = durability(durable_step=100)
    it.reached_end(100)
    it.export_failed("full", 50.0)
    assert it.waiting_for() == "the model to be exported; last failure: full"
    assert it.tick(100, 49.9 + RETRY_SECONDS) == []
    assert it.tick(100, 50.0 + RETRY_SECONDS) == [ev.Finish(step=100)]
    it.exported()
    assert it.failure == ""


def test_a_request_that_came_during_the_last_snapshot_does_not_follow_the_end():
    it = durability()
    it.snapshot(95)
    it.snapshot(99)
    it.stage = Stage.EXPORT
    assert it.snapshot_done(ev.SnapshotDone(step=95), 100, 0.0) == []


# ---------------------------------------------------------------- the initial model


def asked(decisions):
    return [d.learner for d in decisions]


def test_the_learner_with_the_fewest_failures_is_asked_and_among_equals_the_first_by_name():
    it = Initialisation()
    assert it.request([], 0.0) == []
    assert asked(it.request(["b", "a"], 0.0)) == ["a"]
    assert it.request(["b", "a"], 0.0) == [], "one is asked already"
    [log] = it.fail("a", "NotFinite", "NaN")
    assert (log.event, log.fields) == (
        "refuse", {"learner": "a", "reason": "NotFinite", "detail": "NaN"},
    )  # fmt: skip
    assert asked(it.request(["a", "b"], 0.0)) == ["b"]
    it.fail("b", "NotFinite", "NaN")
    assert asked(it.request(["a", "b"], 0.0)) == ["a"]
    it.fail("a", "NotFinite", "NaN")
    assert asked(it.request(["a", "b"], 0.0)) == ["b"]


def test_only_the_learner_that_was_asked_can_fail_or_withdraw():
    it = Initialisation()
    it.request(["a", "b"], 0.0)
    assert it.fail("b", "NotFinite", "NaN") == []
    it.withdraw("b")
    assert it.learner == "a"
    assert it.failures == {}
    it.withdraw("a")
    assert asked(it.request(["b"], 0.0)) == ["b"]


def test_a_request_without_progress_is_withdrawn_after_a_minute():
    it = Initialisation()
    it.request(["a"], 10.0)
    assert it.tick(9.9 + STALL_SECONDS) == []
    [log] = it.tick(10.0 + STALL_SECONDS)
    assert log.fields["reason"] == "InitialLate"
    assert it.tick(1e9) == [], "no learner is asked"


def test_bytes_earn_time_but_never_more_than_the_limit_ahead():
    it, rate = Initialisation(), MIN_BYTES_PER_SECOND
    it.request(["a"], 0.0)
    it.progressed("b", int(50 * rate), 30.0)
    assert it.deadline == STALL_SECONDS
    it.progressed("a", int(10 * rate), 30.0)
    assert it.deadline == 10.0 + STALL_SECONDS
    it.progressed("a", int(14 * rate), 30.0)
    assert it.deadline == 14.0 + STALL_SECONDS, "only what is new"
    it.progressed("a", int(3 * rate), 30.0)
    assert it.deadline == 17.0 + STALL_SECONDS, "the next part begins at zero"
    it.progressed("a", int(3 * rate), 30.0)
    assert it.deadline == 17.0 + STALL_SECONDS
    it.progressed("a", int(900 * rate), 40.0)
    assert it.deadline == 40.0 + STALL_SECONDS
    it.progressed("a", int(901 * rate), 20.0)
    assert it.deadline == 40.0 + STALL_SECONDS, "never back"


def test_a_new_request_counts_bytes_from_zero():
    it, rate = Initialisation(), MIN_BYTES_PER_SECOND
    it.request(["a", "b"], 0.0)
    it.progressed("a", int(40 * rate), 0.0)
    it.fail("a", "NotFinite", "")
    it.request(["a", "b"], 100.0)
    it.progressed("b", int(50 * rate), 150.0)
    assert it.deadline == 150.0 + STALL_SECONDS


def test_nothing_is_repeated_once_the_model_is_exported():
    it = durability(durable_step=100)
    it.reached_end(100)
    it.export_failed("full", 50.0)
    it.exported()
    assert it.tick(100, 1e9) == []


def test_while_the_job_trains_it_does_not_wait_for_a_snapshot_that_failed():
    it = durability()
    it.snapshot(0)
    it.snapshot_done(failed(), 0, 0.0)
    assert it.waiting_for() == ""
