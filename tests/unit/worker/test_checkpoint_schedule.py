"""At which steps the ranks of a learner begin a checkpoint: rank 0 decides."""

import itertools

import pytest

from diloco_worker.core.checkpoint_schedule import CheckpointSchedule, Outcome, of_all


def at(schedule: CheckpointSchedule, step: int, **changes: bool) -> int | None:
    return schedule.at(step, **{"busy": False, "trained": True, "ending": False, **changes})


def test_a_checkpoint_begins_every_so_many_steps_of_this_process():
    schedule = CheckpointSchedule(10, local_step=7)
    assert [step for step in range(8, 40) if at(schedule, step) is not None] == [17, 27, 37]


def test_none_begins_while_one_is_written_or_the_model_is_of_no_use():
    schedule = CheckpointSchedule(10, local_step=0)
    assert at(schedule, 10, busy=True) is None
    assert at(schedule, 11, trained=False) is None
    assert at(schedule, 12) == 0
    assert at(schedule, 21) is None
    assert at(schedule, 22) == 0


def test_a_discarded_one_is_tried_again_at_once_and_its_attempts_are_counted():
    schedule = CheckpointSchedule(10, local_step=0)
    for attempt, step in enumerate((10, 13, 14)):
        assert at(schedule, step) == attempt
        schedule.ended(Outcome.LOST)
    assert at(schedule, 15) == 3
    schedule.ended(Outcome.WRITTEN)
    assert at(schedule, 24) is None
    assert at(schedule, 25) == 0


def test_one_that_cannot_be_written_now_is_due_in_its_turn():
    schedule = CheckpointSchedule(10, local_step=0)
    assert at(schedule, 10) == 0
    schedule.ended(Outcome.FAILED)
    assert at(schedule, 19) is None
    assert at(schedule, 20) == 0


def test_the_last_step_has_one_out_of_turn_even_while_another_is_written_but_only_once():
    schedule = CheckpointSchedule(10, local_step=0)
    assert at(schedule, 3, ending=True, busy=True) == 0
    assert at(schedule, 4, ending=True) is None
    assert at(schedule, 13, ending=True) == 0
    assert at(CheckpointSchedule(10, local_step=0), 3, ending=True, trained=False) is None


def test_a_state_that_can_never_be_saved_ends_them():
    schedule = CheckpointSchedule(10, local_step=0)
    schedule.ended(Outcome.OFF)
    assert at(schedule, 100) is at(schedule, 101, ending=True) is None


@pytest.mark.parametrize("pair", [*itertools.combinations(Outcome, 2)])
def test_the_worst_piece_decides(pair):
    order = ["written", "failed", "lost", "off"]
    worst = max(pair, key=lambda outcome: order.index(outcome.value))
    assert of_all([*pair]) is of_all([*reversed(pair)]) is worst
    assert of_all([pair[0]]) is pair[0]
