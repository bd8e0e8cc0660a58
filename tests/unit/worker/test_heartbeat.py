"""The health file of a learner."""

from __future__ import annotations

import pytest

from diloco.runtime import health
from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.link.heartbeat import HealthReporter

CONNECTED = LinkState(connected=True)


@pytest.fixture
def reporter(tmp_path):
    made = HealthReporter(health.HealthFile(tmp_path / "health.json"))
    made.written = lambda: health.read(tmp_path / "health.json")
    return made


def trainer(step, *, model_loaded=True):
    return TrainerState(model_loaded=model_loaded, local_step=step)


def test_a_learner_that_waits_for_the_syncer_is_not_ready_and_not_stalled(reporter):
    reporter.report(LinkState(text="waiting for the syncer at a:1"), 10.0)
    assert reporter.written() == health.Health(
        at=10.0, ready=False, why="waiting for the syncer at a:1", progress_at=10.0
    )
    reporter.observe(trainer(0, model_loaded=False), 11.0)
    reporter.report(LinkState(connected=True, text="downloading the model"), 700.0)
    assert (reporter.written().ready, reporter.written().why) == (False, "downloading the model")
    assert reporter.written().progress_at == 700.0


def test_only_a_step_is_progress(reporter):
    reporter.observe(trainer(5), 20.0)
    reporter.report(CONNECTED, 21.0)
    assert (reporter.written().ready, reporter.written().progress_at) == (True, 20.0)
    reporter.observe(trainer(5), 30.0)
    reporter.report(CONNECTED, 31.0)
    assert reporter.written().progress_at == 20.0
    reporter.observe(trainer(6), 40.0)
    reporter.report(CONNECTED, 41.0)
    assert (reporter.written().progress_at, reporter.written().why) == (
        40.0,
        "training, local step 6",
    )


@pytest.mark.parametrize(
    "link",
    [LinkState(text="waiting"), LinkState(connected=True, refused_exit=78, text="other shape")],
)
def test_a_loaded_model_without_a_session_is_not_ready(reporter, link):
    reporter.observe(trainer(5), 20.0)
    reporter.report(link, 21.0)
    assert (reporter.written().ready, reporter.written().why) == (False, link.text)


def test_the_last_report_is_written_even_if_it_is_not_due(reporter):
    reporter.observe(trainer(5), 20.0)
    reporter.report(CONNECTED, 21.0)
    reporter.leave("Complete", 21.1)
    assert (reporter.written().ready, reporter.written().why) == (
        False,
        "has left the job: Complete",
    )
