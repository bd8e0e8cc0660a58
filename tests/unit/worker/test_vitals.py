"""A learner's signs of life."""

from __future__ import annotations

import pytest

from diloco import health
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.vitals import Vitals

CONNECTED = LinkState(connected=True)


@pytest.fixture
def vitals(tmp_path):
    made = Vitals(health.HealthFile(tmp_path / "health.json"))
    made.signs = lambda: health.read(tmp_path / "health.json")
    return made


def trainer(step, *, in_place=True):
    return TrainerState(in_place=in_place, local_step=step)


def test_waiting_for_the_syncer_is_unready_and_no_standstill(vitals):
    vitals.tell(LinkState(text="waiting for the syncer at a:1"), 10.0)
    assert vitals.signs() == health.Health(
        at=10.0, ready=False, why="waiting for the syncer at a:1", progress_at=10.0
    )
    vitals.heard(trainer(0, in_place=False), 11.0)
    vitals.tell(LinkState(connected=True, text="downloading the model"), 700.0)
    assert (vitals.signs().ready, vitals.signs().why) == (False, "downloading the model")
    assert vitals.signs().progress_at == 700.0


def test_progress_is_a_step_and_nothing_else(vitals):
    vitals.heard(trainer(5), 20.0)
    vitals.tell(CONNECTED, 21.0)
    assert (vitals.signs().ready, vitals.signs().progress_at) == (True, 20.0)
    vitals.heard(trainer(5), 30.0)
    vitals.tell(CONNECTED, 31.0)
    assert vitals.signs().progress_at == 20.0
    vitals.heard(trainer(6), 40.0)
    vitals.tell(CONNECTED, 41.0)
    assert (vitals.signs().progress_at, vitals.signs().why) == (40.0, "training, local step 6")


@pytest.mark.parametrize(
    "said",
    [LinkState(text="waiting"), LinkState(connected=True, refused_exit=78, text="other shape")],
)
def test_in_place_but_without_a_session_is_unready(vitals, said):
    vitals.heard(trainer(5), 20.0)
    vitals.tell(said, 21.0)
    assert (vitals.signs().ready, vitals.signs().why) == (False, said.text)


def test_the_last_sign_is_left_whatever_the_time(vitals):
    vitals.heard(trainer(5), 20.0)
    vitals.tell(CONNECTED, 21.0)
    vitals.leave("Complete", 21.1)
    assert (vitals.signs().ready, vitals.signs().why) == (False, "has left the job: Complete")
