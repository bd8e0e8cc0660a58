"""The health file of a learner."""

from __future__ import annotations

import dataclasses

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


def test_what_the_link_reports_while_the_learner_trains_is_in_the_file(reporter):
    reporter.observe(trainer(5), 20.0)
    late = "not offered before it arrives: fragment 0"
    reporter.report(dataclasses.replace(CONNECTED, text=late), 21.0)
    assert (reporter.written().ready, reporter.written().why) == (
        True,
        f"training, local step 5; {late}",
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


def test_the_file_shows_at_once_that_the_learner_joined_and_later_why_it_left(reporter):
    reporter.report(LinkState(text="waiting"), 20.0)
    reporter.observe(trainer(0), 20.1)
    reporter.report(CONNECTED, 20.2)
    assert (reporter.written().joined, reporter.written().at) == (True, 20.2)
    reporter.report(LinkState(text="waiting again"), 22.0)
    assert (reporter.written().joined, reporter.written().left) == (True, "")
    reporter.leave("Complete", 22.1)
    assert (reporter.written().joined, reporter.written().left) == (True, "Complete")


def test_a_problem_of_the_trainer_is_reported_with_its_sentence(reporter):
    state = dataclasses.replace(trainer(5), problem="NotFinite", problem_text="the loss was NaN")
    reporter.observe(state, 20.0)
    reporter.report(CONNECTED, 21.0)
    assert (reporter.written().problem, reporter.written().why) == ("NotFinite", "the loss was NaN")
    reporter.observe(trainer(6), 22.0)
    reporter.report(CONNECTED, 22.0)
    assert (reporter.written().problem, reporter.written().why) == ("", "training, local step 6")


@pytest.mark.parametrize(("step_seconds", "silence"), [(0.0, 120.0), (30.0, 600.0)])
def test_a_learner_that_never_calls_step_is_reported_after_minutes(reporter, step_seconds, silence):
    reporter.observe(dataclasses.replace(trainer(0), step_seconds=step_seconds), 20.0)
    reporter.report(CONNECTED, 20.0 + silence - 1.5)
    assert reporter.written().problem == ""
    reporter.report(CONNECTED, 20.0 + silence)
    assert reporter.written().problem == "NoFirstStep"
    assert f"learner.step() was not called for {silence:.0f} s" in reporter.written().why


def test_a_learner_that_stops_calling_step_differs_from_one_that_has_not_begun(reporter):
    reporter.observe(trainer(5), 20.0)
    reporter.observe(trainer(6), 21.0)
    reporter.report(CONNECTED, 21.0 + 120.0)
    assert reporter.written().problem == "NoSteps"


def test_a_learner_whose_model_never_changes_is_reported_after_what_is_worse(reporter):
    reporter.observe(trainer(5), 20.0)
    reporter.report(CONNECTED, 21.0, unchanged=12)
    found = reporter.written()
    assert (found.ready, found.problem) == (True, "Unchanged")
    assert found.why.startswith("the last 12 deltas were zero, so this learner has no part in the")
    reporter.observe(dataclasses.replace(trainer(6), problem="NoTokens", problem_text="none"), 31.0)
    reporter.report(CONNECTED, 32.0, unchanged=14)
    assert reporter.written().problem == "NoTokens"
    reporter.observe(trainer(7), 42.0)
    reporter.report(CONNECTED, 43.0, unchanged=0)
    assert reporter.written().problem == ""
