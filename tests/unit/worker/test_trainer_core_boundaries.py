"""The training side at its edges: times of a step, and what a line shows of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_worker.core.messages import LinkState, Phase
from diloco_worker.core.recovery import LocalCheckpoint
from diloco_worker.core.step_checks import CALLS
from diloco_worker.core.trainer import (
    ApplyModel,
    AwaitLink,
    CopyModel,
    LoadCheckpoint,
    LoadOptimizers,
    SaveCheckpoint,
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


FOUND = LocalCheckpoint(local_step=7, global_step=20, run="a")


def rejoined(*, found=FOUND, **changes):
    """A core with an old checkpoint that was sent the job's parameters, and what it does then."""
    core = TrainerCore(
        name="eu/0", fragments=1, found=found, checkpoint_every=10, connect_timeout_seconds=60.0
    )
    model = replace(MODEL, **{"local_step": 30, "run": "a", "step": 90, **changes})
    return core, core.join(model, now=0.0, terminated=False)


@pytest.mark.parametrize("step", [90, 19])
def test_the_optimizers_continue_with_a_checkpoint_that_is_too_old_or_newer_than_the_job(step):
    core, actions = rejoined(step=step)
    assert [type(action) for action in actions] == [ApplyModel, LoadOptimizers, Send]
    assert core.joined
    assert not core.resumed
    assert core.optimizers_loaded() == [
        ShowProgress(
            f"eu/0: the parameters are those of global step {step}; the optimizers continue with the local "
            "checkpoint of local step 7, global step 20"
        )
    ]
    assert core.resumed


def reason_of_new_state(actions) -> str:
    """Why the optimizers start with new state, as it is shown."""
    [shown] = [action for action in actions if isinstance(action, ShowProgress)]
    prefix = (
        "eu/0: the parameters are those of global step 90; the optimizers start with new state: "
    )
    assert shown.text.startswith(prefix)
    return shown.text.removeprefix(prefix)


@pytest.mark.parametrize(
    ("of", "job", "why"),
    [
        ("a", "b", "belongs to another run"),
        ("", "b", "may belong to"),
        ("a", "", "may belong to"),
        ("", "", "may belong to"),
    ],
)
def test_optimizers_of_another_run_are_not_loaded(of, job, why):
    core, actions = rejoined(found=replace(FOUND, run=of), run=job)
    assert [type(action) for action in actions] == [ApplyModel, ShowProgress, Send]
    assert reason_of_new_state(actions).startswith(f"the local checkpoint of local step 7 {why}")
    assert core.joined
    assert not core.resumed


def test_a_whole_checkpoint_of_another_run_is_not_loaded_either():
    asked = LinkState(phase=Phase.LOAD_CHECKPOINT, connected=True, run="b", local_step=30, step=90)
    for found, loads in ((FOUND, False), (replace(FOUND, run="b"), True), (replace(FOUND, run=""), True)):  # fmt: skip
        core = TrainerCore(
            name="eu/0", fragments=1, found=found, checkpoint_every=10, connect_timeout_seconds=60.0
        )
        actions = core.join(asked, now=0.0, terminated=False)
        assert (actions == [LoadCheckpoint()]) == loads
        if not loads:
            assert actions[0].state.checkpoint_step == 0, "the link downloads the model"
            model = replace(MODEL, local_step=30, run="b", step=90)
            assert "belongs to another run" in reason_of_new_state(
                core.join(model, now=0.0, terminated=False)
            )


def test_why_a_checkpoint_is_not_used_is_shown_with_the_downloaded_model():
    core, _ = rejoined()
    assert (
        reason_of_new_state(core.optimizers_unusable("it has 2 optimizers"))
        == "it has 2 optimizers"
    )
    assert not core.resumed
    core = TrainerCore(
        name="eu/0", fragments=1, found=FOUND, checkpoint_every=10, connect_timeout_seconds=60.0
    )
    core.checkpoint_unusable("it is damaged")
    model = replace(MODEL, local_step=30, step=90)
    assert reason_of_new_state(core.join(model, now=0.0, terminated=False)) == "it is damaged"


def test_only_a_restarted_learner_states_that_its_optimizers_start_anew():
    _, actions = rejoined(found=None)
    assert reason_of_new_state(actions) == "there is no local checkpoint"
    _, actions = rejoined(found=None, local_step=0)
    assert [type(action) for action in actions] == [ApplyModel, Send]


def test_a_checkpoint_has_the_name_of_the_run_also_while_the_link_starts_again():
    core, _ = rejoined(found=None)
    core.checkpoint_started(20)
    core.step(1, LinkState(text="a new link"), now=1.0)
    [save] = [a for a in core.copied([], loss=None) if isinstance(a, SaveCheckpoint)]
    assert save.run == "a"


@pytest.mark.parametrize("starts", [("a",), ("a", "b"), ("a", "b", "c")])
def test_a_checkpoint_states_the_last_start_of_the_syncer_that_its_versions_are_of(starts):
    core = joined()
    core.step(1, replace(MODEL, phase=Phase.TRAINING, starts=starts), now=1.0)
    facts = core.facts()
    assert facts["start"] == starts[-1]
    assert facts["versions"] == core.ledger.to_json()["versions"]


def test_a_checkpoint_without_a_known_start_states_neither_a_start_nor_versions():
    facts = joined(fragments=2).facts()
    assert ("start" in facts, facts["versions"]) == (False, [None, None])


def test_a_checkpoint_that_is_skipped_is_due_again_in_its_turn():
    core = joined(checkpoint_every=2)
    due = []
    for step in range(1, 7):
        core.step(1, None, now=float(step))
        for action in core.copied([], loss=None):
            if isinstance(action, SaveCheckpoint):
                due.append(action.local_step)
                core.checkpoint_skipped(action.local_step)
    assert due == [2, 4, 6]


def test_a_loaded_checkpoint_is_shown_with_its_local_step():
    core = joined(found=LocalCheckpoint(local_step=6, global_step=5, run="r"))
    facts = {"local_step": 6, "total_tokens": 60, "steps": [2], "tokens": [20], "versions": [None]}
    shown, _ = core.checkpoint_loaded(facts, now=1.0)
    assert shown.text == (
        "eu/0: parameters and optimizers are those of the local checkpoint of local step 6"
    )
    assert (core.resumed, core.ledger.steps, core.ledger.total_tokens) == (True, [2], 60)


def test_without_a_checkpoint_none_is_stated():
    state = joined().state()
    assert (state.checkpoint_local_step, state.checkpoint_step, state.checkpoint_start) == (
        0,
        0,
        "",
    )


def test_the_steps_of_the_optimizers_reach_the_checks():
    core = joined()
    for step in range(2 * CALLS):
        core.step(1, None, now=float(step), optimizer_steps=step % 2)
        core.copied([], loss=1.0)
    assert core.state().problem == "RepeatedSteps"
