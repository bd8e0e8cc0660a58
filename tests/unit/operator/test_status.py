"""When a status is worth a write."""

from datetime import timedelta

from diloco_operator.state.observation import Unreachable
from diloco_operator.state.previous_status import PreviousStatus, time_of, time_text
from diloco_testing.kubernetes.operated_job import (
    START,
    OperatedJob,
    certificate,
    is_idle,
    training,
)


def test_progress_alone_is_written_every_30_s():
    world = training()
    written = []
    for second in range(1, 91):
        world.answers(step=100 + second, tokens=second)
        if world.reconcile(1).status is not None:
            written.append(second)
    assert written == [30, 60, 90]
    assert world.status["step"] == 190


def test_progress_alone_makes_no_event():
    world = training()
    previous = list(world.events)
    world.answers(step=500)
    world.reconcile(60)
    assert world.status["step"] == 500
    assert world.events == previous


def test_a_change_that_is_not_progress_is_written_at_once():
    world = training()
    world.answers(step=101, gone=("us/1",))
    world.reconcile(1)
    assert world.status["step"] == 101
    assert world.status["learners"]["summary"] == "3/4"


def test_a_new_answer_alone_causes_no_write():
    world = training()
    for _ in range(20):
        world.answers(seconds_since_merge=1.0 + (world.now - START).total_seconds())
        assert is_idle(world.reconcile(30))


def test_another_reason_of_the_same_status_keeps_the_time_of_the_turn():
    world = training()
    world.answers(gone=("us/1",))
    world.reconcile(60)
    since = world.condition("LearnersReady")["lastTransitionTime"]
    world.certificate = certificate("a", "eu")
    world.reconcile(60)
    assert world.reason("LearnersReady") == ("False", "CertificateOfOtherRegion")
    assert world.condition("LearnersReady")["lastTransitionTime"] == since


def test_learners_that_are_no_longer_wanted_are_not_counted():
    world = training()
    world.change(regions=[{"name": "eu", "learners": 1}, {"name": "us", "learners": 2}])
    learners = world.syncer.learners
    world.answers(learners=learners)
    world.settle()
    assert world.status["learners"] == {"desired": 3, "ready": 3, "training": 3, "summary": "3/3"}


def test_each_change_of_a_condition_has_one_event():
    world = training()
    for _ in range(3):
        world.answers(gone=("us/1",))
        world.reconcile(1)
        world.reconcile(1)
        world.answers()
        world.reconcile(1)
    assert world.events.count(("Warning", "SomeNotTraining")) == 3


def test_a_corrupted_status_is_written_again():
    world = OperatedJob()
    world.settle()
    for spoiled in ({}, {"conditions": "x", "regions": 4, "step": "y", "syncer": []}, None, []):
        world.job["status"] = spoiled
        assert world.reconcile().status is not None
        assert is_idle(world.reconcile())


def test_lists_in_another_order_are_the_same_status():
    world = training()
    world.job["status"]["conditions"].reverse()
    world.job["status"]["regions"].reverse()
    assert is_idle(world.reconcile())


def test_the_status_has_no_empty_field():
    def holes(value):
        if isinstance(value, dict):
            return any(map(holes, value.values()))
        if isinstance(value, list):
            return any(map(holes, value))
        return value is None

    world = OperatedJob()
    world.reconcile()
    assert not holes(world.status)


def test_times_are_read_back_as_they_were_written():
    when = START + timedelta(seconds=1)
    assert time_of(time_text(when)) == when
    assert time_of("2026-03-01T12:00:01") == when
    for odd in (None, 7, "", "yesterday", {}):
        assert time_of(odd) is None


def test_a_job_without_a_status_was_never_seen():
    previous = PreviousStatus.of({"metadata": {}})
    assert not previous.is_true("Complete")
    assert previous.reason("Complete") == ""
    assert previous.number("step") == 0
    assert previous.time("startTime") is None
    assert previous.region("eu") == {}


def ahead(world):
    """The leader until now had a clock that is five minutes ahead, and the new one has just started."""
    future = time_text(world.now + timedelta(minutes=5))
    world.job["status"] = {**world.status, "lastSyncTime": future}
    world.last_answer = None


def test_progress_continues_at_once_after_a_leader_whose_clock_was_ahead():
    world = training()
    ahead(world)
    written = []
    for second in range(1, 62):
        world.answers(step=100 + second)
        if world.reconcile(1).status is not None:
            written.append(second)
    assert written == [1, 31, 61]


def test_a_dead_syncer_is_unreachable_although_a_leader_whose_clock_was_ahead_saw_it_last():
    world = training()
    ahead(world)
    world.syncer = Unreachable(reason="NoAnswer", message="no answer")
    world.reconcile(31)
    assert world.condition("SyncerReachable")["status"] == "False"
    assert "lastSyncTime" not in world.status
    for _ in range(40):  # until after the time that the former leader wrote
        assert is_idle(world.reconcile(10))
    assert world.condition("SyncerReachable")["status"] == "False"


def test_a_last_answer_in_the_future_is_written_once_where_nothing_else_changes():
    world = training()
    world.syncer = Unreachable(reason="NoAnswer", message="no answer")
    world.reconcile(31)
    ahead(world)
    world.reconcile(1)
    assert world.condition("SyncerReachable")["status"] == "False"
    assert "lastSyncTime" not in world.status
    assert is_idle(world.reconcile(1))


def test_a_job_that_is_not_accepted_keeps_a_last_answer_in_the_future_without_further_writes():
    world = training()
    world.change(steps=-1)
    world.reconcile()
    ahead(world)
    assert is_idle(world.reconcile(1))
