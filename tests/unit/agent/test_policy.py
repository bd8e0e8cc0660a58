"""When the agent starts its process, and when it exits. No clock, no processes."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_agent.policy import (
    Died,
    ExitContainer,
    Exited,
    Kill,
    Limits,
    Policy,
    Ready,
    Role,
    Start,
    State,
    StopRequested,
    Terminate,
    Tick,
)


def made(role=Role.LEARNER, **limits):
    name = "eu/0" if role is Role.LEARNER else role.value
    return Policy(role=role, name=name, limits=Limits(leave_seconds=55, **limits))


def started(role=Role.LEARNER, **limits):
    policy = made(role, **limits)
    assert policy.handle(Tick(), 0.0) == [Start(restarts=0)]
    return policy


def exits(policy, now, code=-9, last_line=""):
    """The process exits at `now`; the delay until it restarts, or how the container exits."""
    decisions = policy.handle(Exited(code=code, last_line=last_line), now)
    if decisions:
        return decisions[0]
    delay = policy.start_at - now
    if delay > 0:
        assert policy.handle(Tick(), policy.start_at - 0.001) == []
    assert policy.wake_at() == policy.start_at
    assert policy.handle(Tick(), policy.start_at) == [Start(restarts=policy.starts - 1)]
    return delay


def test_the_process_is_started_immediately_and_once():
    policy = started()
    assert policy.handle(Tick(), 1.0) == []
    assert policy.wake_at() is None


def test_exits_in_a_row_lead_to_growing_delays():
    policy, now, delays = started(), 0.0, []
    for _ in range(12):
        delays.append(exits(policy, now))
        now = policy.started_at
    assert delays == [0, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_healthy_run_resets_the_back_off():
    policy = started()
    for _ in range(3):
        exits(policy, policy.started_at)
    assert exits(policy, policy.started_at + 59.9) == 1
    assert exits(policy, policy.started_at + 60) == 0
    assert exits(policy, policy.started_at) == 0.25


def test_a_process_that_was_ready_and_is_killed_restarts_immediately_each_time():
    policy = started()
    for _ in range(5):
        policy.handle(Ready(), policy.started_at + 1)
        assert exits(policy, policy.started_at + 2) == 0
    policy.handle(Ready(), policy.started_at + 1)
    assert [exits(policy, policy.started_at + 2, code=1) for _ in range(3)] == [0.25, 0.5, 1]


def test_restarts_include_those_of_earlier_containers():
    policy = Policy(role=Role.LEARNER, name="eu/0", limits=Limits(leave_seconds=1), starts=3)
    assert policy.handle(Tick(), 0.0) == [Start(restarts=3)]
    exits(policy, 1.0)
    assert policy.starts == 5


@pytest.mark.parametrize("role", Role)
def test_a_refused_process_exits_the_container_with_its_last_line(role):
    policy = started(role)
    assert exits(policy, 1.0, code=78, last_line="diloco: eu/0: other shape") == ExitContainer(
        code=78,
        reason="Refused",
        message="other shape" if role is Role.LEARNER else "eu/0: other shape",
    )
    assert policy.handle(Tick(), 2.0) == []


def test_the_limit_counts_crashes_and_not_kills_from_outside():
    policy = started(learner_restarts=2)
    for code in (-9, 1, -15, 75, 75, 75, 1, -9):
        assert isinstance(exits(policy, policy.started_at, code=code), float | int)
    end = exits(policy, policy.started_at, code=-signal.SIGSEGV, last_line="boom")
    assert (end.code, end.reason) == (1, "RestartLimit")
    assert end.message == (
        "learner eu/0 crashed 3 times, spec.runPolicy.learnerRestartLimit is 2 "
        "(signal 11 (SIGSEGV): boom)"
    )


def test_crashes_of_earlier_containers_count():
    limits = Limits(leave_seconds=1, learner_restarts=1)
    policy = Policy(role=Role.LEARNER, name="eu/0", limits=limits, starts=1, crashes=1)
    policy.handle(Tick(), 0.0)
    assert exits(policy, 1.0, code=1).reason == "RestartLimit"


def test_a_container_that_was_killed_counts_as_a_crash_of_its_learner():
    limits = Limits(leave_seconds=1, learner_restarts=1)
    policy = Policy(role=Role.LEARNER, name="eu/0", limits=limits)
    assert policy.handle(Died(), 0.0) == []
    assert policy.handle(Tick(), 0.0) == [Start(restarts=0)]
    policy = Policy(role=Role.LEARNER, name="eu/0", limits=limits, crashes=1)
    (end,) = policy.handle(Died(), 0.0)
    assert (end.code, end.reason) == (1, "RestartLimit")
    assert "crashed 2 times" in end.message
    assert "killed" in end.message
    assert policy.handle(Tick(), 0.0) == []


@pytest.mark.parametrize("role", [Role.SYNCER, Role.EVALUATOR])
def test_a_killed_container_of_another_role_has_no_limit(role):
    assert made(role, learner_restarts=0).handle(Died(), 0.0) == []


def test_a_limit_of_zero_allows_no_crash():
    assert exits(started(learner_restarts=0), 1.0, code=1).reason == "RestartLimit"


@pytest.mark.parametrize("role", [Role.LEARNER, Role.EVALUATOR])
def test_a_process_whose_work_is_done_restarts_only_after_minutes(role):
    policy = started(role, learner_restarts=0)
    assert policy.handle(Exited(code=0, left="Complete"), 10.0) == []
    assert (policy.state, policy.message) == (State.BACK_OFF, "done")
    assert policy.handle(Tick(), 309.0) == []
    assert policy.handle(Tick(), 310.0) == [Start(restarts=1)]  # steps may have been raised


def test_a_syncer_that_exits_with_0_restarts_immediately():
    assert exits(started(Role.SYNCER), 5.0, code=0) == 0


@pytest.mark.parametrize("role", [Role.SYNCER, Role.EVALUATOR])
def test_ten_exits_in_a_row_without_readiness_are_a_crash_loop(role):
    policy = started(role)
    for _ in range(9):
        exits(policy, policy.started_at, code=1)
    end = exits(policy, policy.started_at, code=1, last_line="no such disk")
    assert (end.code, end.reason) == (1, "CrashLoop")
    assert end.message.endswith("10 times in a row and was never ready (exit code 1: no such disk)")


@pytest.mark.parametrize("how", ["ready", "long run"])
def test_a_syncer_that_was_healthy_once_always_restarts(how):
    policy = started(Role.SYNCER)
    if how == "ready":
        policy.handle(Ready(), 1.0)
    else:
        exits(policy, 100.0, code=1)
    for _ in range(30):
        assert not isinstance(exits(policy, policy.started_at, code=1), ExitContainer)


def test_a_learner_without_limit_that_joined_once_always_restarts():
    policy = started()
    policy.handle(Ready(), 1.0)
    for _ in range(30):
        assert not isinstance(exits(policy, policy.started_at, code=1), ExitContainer)


def test_a_learner_that_exits_with_0_before_the_job_is_complete_restarts_with_a_back_off():
    policy = started()
    policy.handle(Ready(), 1.0)
    policy.handle(Exited(code=0), 2.0)
    assert policy.start_at == 2.0
    policy.handle(Tick(), 2.0)
    policy.handle(Exited(code=0, left="Closed"), 3.0)
    assert policy.start_at == 3.25
    assert "the job is not complete: its loop must be `while not learner.done`" in policy.message


@pytest.mark.parametrize("code", [0, 1, 127])
def test_a_learner_that_never_joins_fails_after_ten_ends_with_the_cause(code):
    policy = started(never_joined_seconds=0)
    for _ in range(9):
        assert isinstance(exits(policy, policy.started_at, code=code), float | int)
    end = exits(policy, policy.started_at, code=code, last_line="No module named 'nothing'")
    assert (end.code, end.reason) == (1, "NeverJoined")
    cause = (
        "exit code 0: the job is not complete: its loop must be `while not learner.done`"
        if code == 0
        else f"exit code {code}: No module named 'nothing'"
    )
    assert end.message == f"learner eu/0 ended 10 times and never joined the job ({cause})"


def test_a_learner_that_never_joined_outlives_an_outage_of_minutes():
    policy, end = started(), None
    while not isinstance(end, ExitContainer):
        assert policy.started_at < 2000
        at = policy.started_at
        end = exits(policy, at, code=1, last_line="no such disk")
    assert at >= 1800
    assert end.reason == "NeverJoined"


def test_a_learner_that_joined_in_an_earlier_container_never_fails_for_not_joining():
    limits = Limits(leave_seconds=1, never_joined_seconds=0)
    policy = Policy(role=Role.LEARNER, name="eu/0", limits=limits, joined=True)
    policy.handle(Tick(), 0.0)
    for _ in range(30):
        assert not isinstance(exits(policy, policy.started_at, code=1), ExitContainer)


def test_neither_kills_nor_an_unavailable_syncer_fail_a_learner_that_never_joined():
    policy = started()
    for code in [-9, -15, 75] * 10:
        assert isinstance(exits(policy, policy.started_at, code=code), float | int)


def test_stop_terminates_the_process_and_exits_with_0():
    policy = started()
    assert policy.handle(StopRequested(), 5.0) == [Terminate()]
    assert policy.handle(StopRequested(), 6.0) == []
    assert policy.wake_at() == 60.0
    assert policy.handle(Exited(code=78), 7.0) == [ExitContainer(code=0)]


def test_a_process_that_does_not_exit_is_killed_once():
    policy = started()
    policy.handle(StopRequested(), 5.0)
    assert policy.handle(Tick(), 59.9) == []
    assert policy.handle(Tick(), 60.0) == [Kill()]
    assert policy.handle(Tick(), 61.0) == []
    assert policy.handle(Exited(code=-9), 61.0) == [ExitContainer(code=0)]


@pytest.mark.parametrize("code", [0, 1])
def test_stop_during_back_off_exits_immediately(code):
    policy = started()
    policy.handle(Exited(code=code), 1.0)
    assert policy.handle(StopRequested(), 1.0) == [ExitContainer(code=0)]


events = st.one_of(
    st.builds(Tick), st.builds(StopRequested), st.builds(Ready),
    st.builds(Exited, code=st.sampled_from([0, 1, 75, 78, -9, -11, -15])),
)  # fmt: skip


@given(st.sampled_from(list(Role)), st.lists(st.tuples(events, st.floats(0, 200)), max_size=60))
def test_any_history_has_at_most_one_process_and_one_exit(role, story):
    policy, now, running, ended = made(role, learner_restarts=3), 0.0, False, False
    for event, later in story:
        now += later
        if isinstance(event, Exited):
            if not running:
                continue
            running = False
        for decision in policy.handle(event, now):
            assert not ended
            if isinstance(decision, Start):
                assert not running
                running = True
            elif isinstance(decision, Terminate | Kill):
                assert running
            else:
                assert not running
                ended = True
