"""Which transfer waits for which: keys, rounds and order."""

from __future__ import annotations

import pytest

from diloco_worker.link.schedule import Schedule


@pytest.fixture
def started():
    return {}


def schedule_of(most, started):
    return Schedule(most, started.__setitem__)


def test_two_transfers_of_one_key_never_run_beside_each_other_unless_one_was_cancelled(started):
    schedule = schedule_of(3, started)
    schedule.add("a", "first", round=1)
    schedule.add("a", "second", round=2)
    assert list(started) == ["first"], "there is room, but the key is busy"
    started["first"].stop()
    schedule.proceed()
    assert list(started) == ["first", "second"]
    assert schedule.running == 2


def test_another_key_of_the_same_round_cancels_nothing(started):
    schedule = schedule_of(3, started)
    schedule.add("a", "of a", round=1)
    schedule.add("b", "of b", round=1)
    assert list(started) == ["of a", "of b"]
    assert not started["of a"].stopped


def test_without_a_round_the_same_key_is_the_same_attempt(started):
    schedule = schedule_of(2, started)
    schedule.add("a", "first")
    schedule.add("a", "second")
    assert started["first"].stopped
    assert list(started) == ["first", "second"]


def test_a_transfer_without_a_round_is_of_no_round(started):
    schedule = schedule_of(2, started)
    schedule.add("a", "of round 1", round=1)
    schedule.add("a", "of none")
    assert not started["of round 1"].stopped


def test_what_replaces_a_waiting_transfer_waits_from_now_on(started):
    schedule = schedule_of(1, started)
    for key, job in (("x", "x"), ("a", "old"), ("b", "b"), ("a", "new")):
        schedule.add(key, job, round=1)
    for job in ("x", "b"):
        schedule.ended(started[job])
        schedule.proceed()
    assert list(started) == ["x", "b", "new"]


def test_a_busy_key_does_not_keep_others_from_their_turn(started):
    schedule = schedule_of(2, started)
    schedule.add("a", "a 1", round=1)
    schedule.add("a", "a 2", round=2)
    schedule.add("b", "b")
    assert list(started) == ["a 1", "b"]


def test_what_waited_when_everything_was_cancelled_never_starts(started):
    schedule = schedule_of(1, started)
    schedule.add("a", "a")
    schedule.add("b", "b")
    schedule.cancel_all()
    assert not schedule.ended(started["a"])
    schedule.proceed()
    assert list(started) == ["a"]
    assert schedule.running == 0


def test_several_that_wait_start_at_once_when_there_is_room(started):
    schedule = schedule_of(2, started)
    for key in "abcd":
        schedule.add(key, key)
    for job in "ab":
        assert schedule.ended(started[job])
    schedule.proceed()
    assert list(started) == ["a", "b", "c", "d"]
