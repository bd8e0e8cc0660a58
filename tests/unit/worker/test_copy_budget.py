"""How long copies for a checkpoint may stop a step, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_worker.core.copy_budget import ATTEMPTS, SHARE, STEPS, CopyBudget


def after(*seconds: float) -> CopyBudget:
    budget = CopyBudget()
    for each in seconds:
        budget = budget.after_step(each)
    return budget


def test_the_optimizer_may_wait_for_five_percent_of_a_step_less_what_the_copy_took_before():
    budget = after(2.0)
    assert budget.wait_seconds(spent_seconds=0.0) == pytest.approx(0.1)
    assert budget.wait_seconds(spent_seconds=0.03) == pytest.approx(0.07)
    assert budget.wait_seconds(spent_seconds=0.1) == 0.0
    assert budget.wait_seconds(spent_seconds=9.0) == 0.0


def test_before_the_first_step_is_timed_nothing_is_waited_for():
    assert CopyBudget().wait_seconds(spent_seconds=0.0) == 0.0


def test_a_usual_step_is_the_median_of_the_newest():
    assert after(60.0, 1.0, 1.0, 2.0).step_seconds == 1.0 * 1.5
    slower = after(*[1.0] * 50, *[3.0] * (STEPS // 2 + 1))
    assert slower.step_seconds == 3.0
    assert len(slower.steps) == STEPS
    assert after(*[1.0] * 50, *[3.0] * (STEPS // 2)).step_seconds == 1.0


def test_after_so_many_abandoned_attempts_the_next_is_waited_for_as_long_as_it_takes():
    budget = after(1.0)
    for _ in range(ATTEMPTS):
        assert budget.wait_seconds(spent_seconds=0.0) == pytest.approx(SHARE)
        budget = budget.after_abandoned()
    assert budget.wait_seconds(spent_seconds=0.0) is None
    assert budget.wait_seconds(spent_seconds=9.0) is None


def test_a_copy_within_the_share_gives_the_next_checkpoint_all_attempts():
    budget = after(1.0).after_abandoned().after_copied(spent_seconds=0.05)
    assert budget.abandoned == 0


def test_a_copy_that_needed_more_leaves_the_next_checkpoint_one_attempt():
    budget = after(1.0).after_copied(spent_seconds=0.051)
    assert budget.wait_seconds(spent_seconds=0.0) == pytest.approx(SHARE)
    assert budget.after_abandoned().wait_seconds(spent_seconds=0.0) is None
    assert budget.after_copied(spent_seconds=0.01).abandoned == 0, "and all once it fits again"


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.0, 50)), min_size=1, max_size=60))
def test_whatever_copies_take_few_steps_are_stopped_for_long_and_checkpoints_are_made(history):
    """`history`: of each step its seconds, and how long after the pass its copy would be ready."""
    budget, attempts, long_waits, made = CopyBudget(), 0, 0, 0
    for seconds, missing in history:
        budget = budget.after_step(seconds)
        wait = budget.wait_seconds(spent_seconds=0.0)
        attempts += 1
        if wait is None or missing <= wait:
            long_waits += missing > SHARE * budget.step_seconds
            budget = budget.after_copied(spent_seconds=missing)
            attempts, made = 0, made + 1
        else:
            budget = budget.after_abandoned()
        assert attempts <= ATTEMPTS
    assert long_waits <= -(-len(history) // 2)
    assert made >= len(history) // (ATTEMPTS + 1)
