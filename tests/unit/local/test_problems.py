"""Problems of processes that run, and when they end the run."""

from __future__ import annotations

from diloco.runtime.health import Health
from diloco_local.problems import FATAL_SECONDS, NOTE_SECONDS, Problems

LEARNERS = ("eu/0", "us/0")


def health(problem="", why="training, local step 5"):
    return Health(at=1.0, ready=True, why=why, progress_at=1.0, problem=problem)


def both(problem):
    return {name: health(problem, "the loss was NaN") for name in LEARNERS}


def test_a_problem_is_noted_once_and_stays_until_it_is_over():
    problems = Problems(LEARNERS)
    assert problems.update({"eu/0": health("NotFinite", "the loss was NaN")}, 10.0) == [
        "warning: eu/0: NotFinite: the loss was NaN"
    ]
    assert problems.update({"eu/0": health("NotFinite", "the loss was NaN")}, 11.0) == []
    assert problems.current["eu/0"].since == 10.0
    assert problems.update({"eu/0": health()}, 12.0) == []
    assert problems.current == {}


def test_a_problem_that_comes_and_goes_is_noted_every_ten_minutes():
    problems = Problems(LEARNERS)
    notes = []
    for second in range(0, int(2 * NOTE_SECONDS), 2):
        notes += problems.update({"eu/0": health("RepeatedSteps")}, second)
        problems.update({"eu/0": health()}, second + 1)
    assert len(notes) == 2


def test_the_run_fails_when_no_learner_trains_for_a_minute_and_not_before():
    problems = Problems(LEARNERS)
    problems.update(both("NotFinite"), 10.0)
    assert problems.standstill(10.0 + FATAL_SECONDS["NotFinite"] - 1) == ""
    assert problems.standstill(10.0 + FATAL_SECONDS["NotFinite"]) == (
        "no learner can train: eu/0 (NotFinite: the loss was NaN), us/0 (NotFinite: the loss was NaN)"
    )


def test_one_learner_that_trains_is_enough():
    problems = Problems(LEARNERS)
    problems.update({"eu/0": health("NotFinite"), "us/0": health()}, 10.0)
    assert problems.standstill(1e6) == ""


def test_a_learner_that_restarts_begins_anew():
    problems = Problems(LEARNERS)
    problems.update(both("NotFinite"), 10.0)
    problems.update({"eu/0": health("NotFinite")}, 60.0)
    problems.update(both("NotFinite"), 65.0)
    assert problems.standstill(80.0) == ""


def test_steps_that_repeat_or_a_score_that_is_missing_never_end_a_run():
    problems = Problems(LEARNERS)
    problems.update(both("RepeatedSteps") | {"evaluator": health("NoScore")}, 10.0)
    assert problems.standstill(1e6) == ""


def test_a_step_may_take_longer_than_a_minute():
    problems = Problems(LEARNERS)
    problems.update(both("NoSteps"), 10.0)
    assert problems.standstill(10.0 + 899) == ""
    assert problems.standstill(10.0 + 900) != ""


def test_how_long_all_learners_may_take_no_step_can_be_set():
    problems = Problems(LEARNERS, stuck_seconds=3600)
    problems.update(both("NoSteps"), 10.0)
    assert problems.standstill(10.0 + 3599) == ""
    assert problems.standstill(10.0 + 3600) != ""


def test_a_first_step_that_compiles_for_long_never_ends_a_run():
    problems = Problems(LEARNERS)
    problems.update(both("NoFirstStep"), 10.0)
    assert problems.standstill(1e6) == ""
