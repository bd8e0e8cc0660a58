"""When the first process of a container starts its child, and when it gives up. No clock, no processes."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_operator.pod.policy import (
    End,
    Ended,
    Kill,
    Limits,
    Policy,
    Ready,
    Role,
    Start,
    State,
    Stop,
    Terminate,
    Tick,
)


def policy(role=Role.LEARNER, **limits):
    name = "eu/0" if role is Role.LEARNER else role.value
    return Policy(role=role, name=name, limits=Limits(leave_seconds=55, **limits))


def started(role=Role.LEARNER, **limits):
    made = policy(role, **limits)
    assert made.handle(Tick(), 0.0) == [Start(restarts=0)]
    return made


def die(one, now, code=-9, last_line=""):
    """The child dies at `now`; the pause until it is started again, or how the container ends."""
    said = one.handle(Ended(code=code, last_line=last_line), now)
    if said:
        return said[0]
    pause = one.start_at - now
    if pause > 0:
        assert one.handle(Tick(), one.start_at - 0.001) == []
    assert one.wake_at() == one.start_at
    assert one.handle(Tick(), one.start_at) == [Start(restarts=one.lives - 1)]
    return pause


def test_the_child_is_started_at_once_and_once():
    one = started()
    assert one.handle(Tick(), 1.0) == []
    assert one.wake_at() is None


def test_deaths_in_a_row_are_answered_at_once_then_with_growing_pauses():
    one, now, pauses = started(), 0.0, []
    for _ in range(12):
        pauses.append(die(one, now))
        now = one.started_at
    assert pauses == [0, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_healthy_life_begins_the_pauses_anew():
    one = started()
    for _ in range(3):
        die(one, one.started_at)
    assert die(one, one.started_at + 59.9) == 1
    assert die(one, one.started_at + 60) == 0
    assert die(one, one.started_at) == 0.25


def test_a_kill_from_outside_of_a_life_that_did_its_work_is_answered_at_once_each_time():
    one = started()
    for _ in range(5):
        one.handle(Ready(), one.started_at + 1)
        assert die(one, one.started_at + 2) == 0
    one.handle(Ready(), one.started_at + 1)
    assert [die(one, one.started_at + 2, code=1) for _ in range(3)] == [0.25, 0.5, 1]


def test_restarts_count_on_from_the_lives_of_earlier_containers():
    one = Policy(role=Role.LEARNER, name="eu/0", limits=Limits(leave_seconds=1), lives=3)
    assert one.handle(Tick(), 0.0) == [Start(restarts=3)]
    die(one, 1.0)
    assert one.lives == 5


@pytest.mark.parametrize("role", Role)
def test_a_refused_child_ends_the_container_with_its_last_line(role):
    one = started(role)
    assert die(one, 1.0, code=78, last_line="diloco: eu/0: other shape") == End(
        code=78, reason="Refused", message="diloco: eu/0: other shape"
    )
    assert one.handle(Tick(), 2.0) == []


def test_the_limit_counts_own_faults_and_not_kills_from_outside():
    one = started(learner_restarts=2)
    for code in (-9, 1, -15, 75, -9):
        assert isinstance(die(one, one.started_at, code=code), float | int)
    end = die(one, one.started_at, code=-signal.SIGSEGV, last_line="boom")
    assert (end.code, end.reason) == (1, "RestartLimit")
    assert end.message == (
        "learner eu/0 ended 3 times by its own fault, spec.runPolicy.learnerRestartLimit is 2 "
        "(signal 11 (SIGSEGV): boom)"
    )


def test_faults_count_on_from_earlier_containers():
    limits = Limits(leave_seconds=1, learner_restarts=1)
    one = Policy(role=Role.LEARNER, name="eu/0", limits=limits, lives=1, faults=1)
    one.handle(Tick(), 0.0)
    assert die(one, 1.0, code=1).reason == "RestartLimit"


def test_a_limit_of_zero_allows_no_fault():
    assert die(started(learner_restarts=0), 1.0, code=1).reason == "RestartLimit"


@pytest.mark.parametrize("role", [Role.LEARNER, Role.EVALUATOR])
def test_work_that_is_done_is_not_done_again_soon(role):
    one = started(role, learner_restarts=0)
    assert one.handle(Ended(code=0), 10.0) == []
    assert (one.state, one.why) == (State.RESTING, "done")
    assert one.handle(Tick(), 309.0) == []
    assert one.handle(Tick(), 310.0) == [Start(restarts=1)]  # steps may have been raised


def test_a_syncer_that_ends_by_itself_was_signalled_and_comes_back_at_once():
    assert die(started(Role.SYNCER), 5.0, code=0) == 0


@pytest.mark.parametrize("role", [Role.SYNCER, Role.EVALUATOR])
def test_ten_deaths_in_a_row_without_any_health_are_hopeless(role):
    one = started(role)
    for _ in range(9):
        die(one, one.started_at, code=1)
    end = die(one, one.started_at, code=1, last_line="no such disk")
    assert (end.code, end.reason) == (1, "CrashLoop")
    assert end.message.endswith("10 times in a row and never worked (exit code 1: no such disk)")


@pytest.mark.parametrize("how", ["ready", "long life"])
def test_a_syncer_that_once_worked_is_never_given_up(how):
    one = started(Role.SYNCER)
    if how == "ready":
        one.handle(Ready(), 1.0)
    else:
        die(one, 100.0, code=1)
    for _ in range(30):
        assert not isinstance(die(one, one.started_at, code=1), End)


def test_a_learner_without_limit_is_never_given_up():
    one = started()
    for _ in range(30):
        assert not isinstance(die(one, one.started_at, code=1), End)


def test_stop_asks_the_child_to_leave_and_ends_with_0_when_it_did():
    one = started()
    assert one.handle(Stop(), 5.0) == [Terminate()]
    assert one.handle(Stop(), 6.0) == []
    assert one.wake_at() == 60.0
    assert one.handle(Ended(code=78), 7.0) == [End(code=0)]


def test_a_child_that_does_not_leave_is_killed_once():
    one = started()
    one.handle(Stop(), 5.0)
    assert one.handle(Tick(), 59.9) == []
    assert one.handle(Tick(), 60.0) == [Kill()]
    assert one.handle(Tick(), 61.0) == []
    assert one.handle(Ended(code=-9), 61.0) == [End(code=0)]


@pytest.mark.parametrize("code", [0, 1])
def test_stop_between_two_lives_ends_at_once(code):
    one = started()
    one.handle(Ended(code=code), 1.0)
    assert one.handle(Stop(), 1.0) == [End(code=0)]


events = st.one_of(
    st.builds(Tick), st.builds(Stop), st.builds(Ready),
    st.builds(Ended, code=st.sampled_from([0, 1, 75, 78, -9, -11, -15])),
)  # fmt: skip


@given(st.sampled_from(list(Role)), st.lists(st.tuples(events, st.floats(0, 200)), max_size=60))
def test_whatever_happens_there_is_one_child_at_most_and_one_end(role, story):
    one, now, running, ended = policy(role, learner_restarts=3), 0.0, False, False
    for event, later in story:
        now += later
        if isinstance(event, Ended):
            if not running:
                continue
            running = False
        for said in one.handle(event, now):
            assert not ended
            if isinstance(said, Start):
                assert not running
                running = True
            elif isinstance(said, Terminate | Kill):
                assert running
            else:
                assert not running
                ended = True
