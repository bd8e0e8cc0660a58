"""The answers to the kubelet's probes."""

from __future__ import annotations

import pytest

from diloco.runtime.health import Health
from diloco_agent.policy import Role, State
from diloco_agent.probes import ProcessFacts, alive, ready, started

NOW = 10_000.0


def health(*, age=0.5, is_ready=True, progress_age=0.5, why="training, local step 7"):
    return Health(at=NOW - age, ready=is_ready, why=why, progress_at=NOW - progress_age)


def facts(**changes):
    usual = {
        "role": Role.LEARNER, "rank": 0, "state": State.RUNNING, "message": "", "exited": False, "started_at": NOW - 10,
        "health": health(), "looped_at": NOW - 0.5, "stuck_seconds": 900.0,
    }  # fmt: skip
    return ProcessFacts(**{**usual, **changes})


def test_a_training_learner_passes_all_three():
    for probe in (started, ready, alive):
        assert probe(facts(), NOW).ok
    assert ready(facts(), NOW).message == "training, local step 7"


def test_a_learner_without_its_syncer_is_unready_and_alive():
    cut_off = facts(health=health(is_ready=False, why="waiting for the syncer at a:1"))
    assert (ready(cut_off, NOW).ok, ready(cut_off, NOW).message) == (
        False,
        "waiting for the syncer at a:1",
    )
    assert started(cut_off, NOW).ok
    assert alive(cut_off, NOW).ok


@pytest.mark.parametrize("role", [Role.LEARNER, Role.SYNCER])
def test_before_the_first_health_report_it_has_not_started(role):
    silent = facts(role=role, health=None)
    assert not started(silent, NOW).ok
    assert not ready(silent, NOW).ok
    assert alive(silent, NOW).ok


def test_a_pod_that_waits_for_the_others_of_its_learner_is_unready_and_nothing_restarts_it():
    waiting = facts(
        state=State.WAITING,
        health=None,
        waits=True,
        message="waiting for the other pods of its learner: rank 1 …",
    )
    assert started(waiting, NOW).ok
    assert alive(waiting, NOW).ok
    assert not ready(waiting, NOW).ok
    assert ready(waiting, NOW).message == "waiting for the other pods of its learner: rank 1 …"


def test_a_slow_loader_is_not_killed_by_the_startup_probe():
    assert started(facts(health=None, started_at=NOW - 300), NOW).ok
    assert not started(facts(health=None, started_at=NOW - 299), NOW).ok


@pytest.mark.parametrize("who", [{"role": Role.EVALUATOR}, {"rank": 1}])
def test_an_evaluator_and_the_other_pods_of_a_learner_need_no_health_report(who):
    silent = facts(**who, health=None)
    assert started(silent, NOW).ok
    assert (ready(silent, NOW).ok, ready(silent, NOW).message) == (True, "running")
    assert alive(silent, NOW).ok
    assert not ready(facts(**who, state=State.BACK_OFF), NOW).ok


def test_another_pod_of_a_learner_that_reported_progress_and_then_hangs_is_not_alive():
    hung = facts(rank=1, health=health(age=901, progress_age=901, why="step 7 of this process"))
    assert not alive(hung, NOW).ok
    assert alive(hung, NOW).message == "no progress for 901 s: step 7 of this process"
    slow = facts(rank=1, health=health(age=899, progress_age=899))
    assert alive(slow, NOW).ok
    assert ready(slow, NOW).ok, "a step may take minutes"


@pytest.mark.parametrize("state", [State.BACK_OFF, State.TERMINATING, State.FINISHED])
def test_without_a_running_process_it_is_unready_with_the_policys_message_and_alive(state):
    stopped = facts(state=state, message="done", exited=True, health=None)
    assert (ready(stopped, NOW).ok, ready(stopped, NOW).message) == (False, "done")
    assert started(stopped, NOW).ok
    assert alive(stopped, NOW).ok


def test_a_process_without_recent_reports_is_unready():
    assert ready(facts(health=health(age=15)), NOW).ok
    assert not ready(facts(health=health(age=16)), NOW).ok


@pytest.mark.parametrize("stuck", [{"age": 901}, {"progress_age": 901}])
def test_a_process_without_progress_for_too_long_is_not_alive(stuck):
    answer = alive(facts(health=health(**stuck)), NOW)
    assert not answer.ok
    assert "no progress for 901 s" in answer.message
    assert alive(facts(health=health(**dict.fromkeys(stuck, 899))), NOW).ok


def test_a_stalled_loop_is_not_alive():
    assert alive(facts(looped_at=NOW - 60), NOW).ok
    assert not alive(facts(looped_at=NOW - 61), NOW).ok
