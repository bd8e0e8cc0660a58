"""Pace and grace window, number by number (docs/algorithm.md, "Pacing" and "Grace window")."""

import pytest

from diloco_syncer.core.pacing import PACE_LAG_STEPS, Grace, Pace, ema


def grace(**changes):
    values = {"overlap": 2, "max_steps": 1.0, "safety": 0.8, **changes}
    return Grace(**values)


def test_the_first_measurement_stands_for_itself_and_later_ones_count_half():
    assert ema(None, 3.0) == 3.0
    assert ema(3.0, 5.0) == 4.0
    assert ema(4.0, 0.0) == 2.0


def test_the_window_is_the_safe_part_of_what_quorum_and_sync_leave_of_tau_steps():
    window = grace(max_steps=10.0)
    window.reached_quorum(0.5)
    window.synced(0.25)
    assert window.window(1.0) == pytest.approx(0.8 * (2 * 1.0 - 0.5 - 0.25))


def test_the_window_is_never_longer_than_its_cap():
    window = grace(max_steps=0.5)
    window.reached_quorum(0.1)
    window.synced(0.1)
    assert window.window(3.0) == 1.5


def test_the_window_is_never_negative():
    window = grace()
    window.reached_quorum(9.0)
    window.synced(9.0)
    assert window.window(1.0) == 0.0


def test_measurements_of_the_window_are_moving_averages():
    window = grace()
    for seconds in (1.0, 3.0):
        window.reached_quorum(seconds)
        window.synced(seconds + 1.0)
    assert (window.quorum_seconds, window.sync_seconds) == (2.0, 3.0)


@pytest.mark.parametrize("known", ["neither", "quorum", "sync"])
def test_until_all_times_are_known_the_window_is_its_cap(known):
    window = grace(max_steps=2.0)
    if known == "quorum":
        window.reached_quorum(1.0)
    if known == "sync":
        window.synced(1.0)
    assert window.window(None) == 2.0, "one second for each of maxSteps"
    assert window.window(0.25) == 0.5


def test_an_unknown_step_time_gives_the_cap_even_when_quorum_and_sync_are_known():
    window = grace(max_steps=2.0)
    window.reached_quorum(1.0)
    window.synced(1.0)
    assert window.window(None) == 2.0


def test_a_window_that_is_turned_off_is_zero_whatever_is_known():
    window = grace(max_steps=0.0)
    assert window.window(None) == window.window(5.0) == 0.0
    assert grace(max_steps=1.0).window(None) == 1.0


# ---------------------------------------------------------------- pace


def pace(**positions):
    return Pace(step=10, positions=positions)


def test_a_learner_joins_at_the_current_step_and_its_first_step_may_start_the_next():
    it = Pace(step=10)
    assert not it.may_start()
    it.join("a")
    assert it.positions == {"a": 10}
    assert not it.may_start(), "it has not stepped yet"
    it.stepped("a", 1)
    assert it.may_start()
    assert it.start() == it.step == 11
    assert not it.may_start()


def test_a_position_is_never_more_than_one_ahead():
    it = pace(a=10)
    it.stepped("a", 5)
    assert it.positions["a"] == 11


def test_a_position_that_fell_far_behind_is_moved_up_before_it_advances():
    it = pace(a=0, b=9)
    it.stepped("a", 1)
    it.stepped("b", 1)
    assert it.positions == {"a": 10 - PACE_LAG_STEPS + 1, "b": 10}


def test_several_steps_in_one_report_all_count():
    it = pace(a=8)
    it.stepped("a", 2)
    assert it.positions["a"] == 10


def test_one_learner_that_is_ahead_is_enough_to_start():
    assert pace(a=3, b=11).may_start()
    assert not pace(a=10, b=10).may_start()


def test_a_learner_that_left_neither_counts_nor_comes_back_by_stepping():
    it = pace(a=11)
    it.leave("a")
    it.leave("never seen")
    assert not it.may_start()
    it.stepped("a", 3)
    assert it.positions == {}


def test_a_learner_that_joins_again_in_its_place_has_no_step_in_advance():
    pace = Pace(step=3)
    for name in "ab":
        pace.join(name)
    pace.stepped("a", 1)
    assert pace.may_start()
    pace.join("a")  # another session, without a leave between
    assert not pace.may_start()
    pace.stepped("b", 1)
    assert pace.may_start()
