"""The training side at its edges: times of a step, and what a line shows of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_worker.core.messages import LinkState, Phase
from diloco_worker.core.trainer import (
    AwaitLink,
    CopyModel,
    Send,
    ShowProgress,
    TrainerCore,
)

MODEL = LinkState(phase=Phase.APPLY_MODEL, connected=True, ready=[(0, 1)])


def joined(*, now=0.0, **changes):
    fields = {
        "name": "eu/0", "fragments": 1, "found": None, "checkpoint_every": 10,
        "connect_timeout_seconds": 60.0, **changes,
    }  # fmt: skip
    core = TrainerCore(**fields)
    core.join(MODEL, now=now, terminated=False)
    return core


def test_times_of_a_line_are_rounded_to_microseconds():
    core = joined()
    core.step(1, None, now=1 / 3)
    core.copied([], loss=None)
    line = core.line(now=1.0, queued_seconds=1 / 7)
    assert (line["seconds"], line["syncSeconds"], line["queuedSeconds"]) == (
        0.333333, 0.666667, 0.142857,
    )  # fmt: skip


def test_a_line_states_the_wait_for_the_copy_of_a_checkpoint_only_if_there_was_a_copy():
    core = joined()
    core.step(1, None, now=1.0)
    core.copied([], loss=None)
    assert "copyWaitSeconds" not in core.line(now=1.5, queued_seconds=0.0)
    line = core.line(now=1.5, queued_seconds=0.0, copy_wait_seconds=1 / 7)
    assert line["copyWaitSeconds"] == 0.142857


def test_a_loop_that_does_not_report_when_it_continues_is_not_charged_for_it():
    core = joined()
    core.ended(now=1.0)
    for start in (10.0, 20.0):
        core.step(1, None, now=start)
        core.copied([], loss=None)
        assert core.line(now=start + 0.5, queued_seconds=0.0)["syncSeconds"] == pytest.approx(
            1.5 if start == 10.0 else 0.5
        )


def test_the_time_of_a_step_begins_when_the_loop_continues():
    core = joined(now=3.0)
    core.step(1, None, now=5.0)
    assert core.state().step_seconds == 2.0
    core.ended(now=6.0)
    core.step(1, None, now=6.5)
    assert core.state().step_seconds == 0.5


def test_all_time_in_step_is_summed_for_the_link():
    core = joined()
    for number in (1, 2):
        core.step(1, None, now=10.0 * number)
        core.copied([], loss=None)
        core.line(now=10.0 * number + 0.25, queued_seconds=0.0)
        core.ended(now=10.0 * number + 0.25)
    state = core.state()
    assert (state.sync_seconds, state.total_sync_seconds) == (0.25, 0.5)


def test_progress_counts_from_the_first_call_whatever_the_clock_shows():
    core = TrainerCore(
        name="eu/0", fragments=1, found=None, checkpoint_every=None, connect_timeout_seconds=60.0
    )
    waiting = LinkState(phase=Phase.WAITING, connected=True, text="waiting")
    core.join(waiting, now=1e6, terminated=False)
    shown, _ = core.join(None, now=1e6 + 12.0, terminated=False)
    assert shown == ShowProgress("eu/0: waiting (12 s)")
    assert len(core.join(None, now=1e6 + 16.9, terminated=False)) == 1
    assert len(core.join(None, now=1e6 + 17.0, terminated=False)) == 2


def test_a_learner_that_just_joined_has_made_no_step():
    core = joined()
    state = core.state()
    assert (state.stepped, state.local_step, state.loss, state.offers) == (False, 0, None, ())
    core.step(4, None, now=1.0)
    assert core.state().stepped


def test_a_request_for_the_model_is_answered_while_progress_is_shown():
    core = TrainerCore(
        name="eu/0", fragments=1, found=None, checkpoint_every=None, connect_timeout_seconds=60.0
    )
    waiting = LinkState(phase=Phase.WAITING, connected=True, text="waiting")
    core.join(waiting, now=0.0, terminated=False)
    asked = replace(waiting, initial_requested=1)
    actions = core.join(asked, now=5.0, terminated=False)
    assert [type(a) for a in actions] == [ShowProgress, CopyModel, Send, AwaitLink]
