"""Which transfers run, wait and are cancelled."""

from __future__ import annotations

import pytest

from diloco_worker.link.schedule import Schedule


@pytest.fixture
def started():
    return {}


@pytest.fixture
def schedule(started):
    return Schedule(2, started.__setitem__)


def test_only_so_many_run_and_the_others_start_in_order(schedule, started):
    for key in range(4):
        schedule.add(key, key)
    assert list(started) == [0, 1]
    assert schedule.ended(started[1])
    assert list(started) == [0, 1]  # its result is not decided about yet
    schedule.proceed()
    assert list(started) == [0, 1, 2]
    assert schedule.running == 2


def test_another_attempt_cancels_the_running_one_and_its_result(schedule, started):
    schedule.add("a", "attempt 1", round=5)
    schedule.add("a", "attempt 2", round=5)
    assert started["attempt 1"].stopped
    assert not started["attempt 2"].stopped
    assert not schedule.ended(started["attempt 1"])
    assert schedule.ended(started["attempt 2"])


def test_another_round_waits_for_the_running_one_and_replaces_those_that_wait(schedule, started):
    for round_ in (1, 2, 3):
        schedule.add("a", f"round {round_}", round=round_)
    assert list(started) == ["round 1"]
    assert schedule.ended(started["round 1"])
    schedule.proceed()
    assert list(started) == ["round 1", "round 3"]


def test_a_cancelled_transfer_counts_until_it_has_ended(schedule, started):
    for key in range(5):
        schedule.add(key, key)
    schedule.cancel_all()
    assert started[0].stopped
    assert started[1].stopped
    schedule.add("new", "new")
    assert "new" not in started
    assert not schedule.ended(started[0])
    schedule.proceed()
    assert list(started) == [0, 1, "new"]
