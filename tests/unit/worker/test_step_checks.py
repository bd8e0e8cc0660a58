"""Steps that show that a program does not train, and what the trainer does about them."""

from __future__ import annotations

import pytest

from diloco_worker.core.messages import LinkState, Phase
from diloco_worker.core.step_checks import CALLS, STEPS_IN_ROW, StepChecks
from diloco_worker.core.trainer import SaveCheckpoint, Send, TrainerCore

TRAINING = LinkState(phase=Phase.TRAINING, connected=True, epoch=1, incarnation=2, step=5, steps=99)


def trained(checks, *, steps=1, tokens=8, optimizer_steps=1, finite=True):
    for _ in range(steps):
        checks.stepped(tokens=tokens, optimizer_steps=optimizer_steps)
        checks.loss_read(finite=finite)
    return checks.problem()


def test_ordinary_steps_show_no_problem():
    assert trained(StepChecks(), steps=500) is None


def test_a_loss_that_stays_nan_is_a_problem_until_it_is_finite():
    checks = StepChecks()
    assert trained(checks, steps=STEPS_IN_ROW - 1, finite=False) is None
    problem = trained(checks, finite=False)
    assert problem.kind == "NotFinite"
    assert f"the last {STEPS_IN_ROW} losses were NaN or Inf" in problem.text
    assert trained(checks) is None


def test_a_step_with_a_finite_loss_starts_the_count_anew():
    checks = StepChecks()
    for _ in range(10):
        assert trained(checks, steps=STEPS_IN_ROW - 1, finite=False) is None
        trained(checks)


def test_steps_without_tokens_are_a_problem_until_one_has_some():
    checks = StepChecks()
    assert trained(checks, steps=STEPS_IN_ROW - 1, tokens=0) is None
    problem = trained(checks, tokens=0)
    assert (problem.kind, "any other unit of work" in problem.text) == ("NoTokens", True)
    assert trained(checks) is None


def test_two_calls_per_optimizer_step_are_a_problem_until_they_end():
    checks = StepChecks()
    found = [trained(checks, optimizer_steps=call % 2) for call in range(CALLS)]
    assert [problem is None for problem in found] == [True] * (CALLS - 1) + [False]
    assert found[-1].kind == "RepeatedSteps"
    assert f"before {CALLS // 2} of the last {CALLS} calls" in found[-1].text
    assert trained(checks, steps=CALLS) is None


@pytest.mark.parametrize("optimizer_steps", [None, 0])
def test_loops_whose_optimizers_have_no_hooks_show_no_problem(optimizer_steps):
    assert trained(StepChecks(), steps=3 * CALLS, optimizer_steps=optimizer_steps) is None


@pytest.mark.parametrize("before", [0, 2 * CALLS])
@pytest.mark.parametrize("warm_up", [1, 3, 11])
def test_replays_of_a_cuda_graph_after_its_warm_up_show_no_problem(before, warm_up):
    checks = StepChecks()
    steps = [0] * before + [1] * warm_up + [0] * 2 * CALLS
    assert not any(trained(checks, optimizer_steps=count) for count in steps)


def test_steps_that_a_loss_scaler_skips_show_no_problem():
    checks = StepChecks()
    trained(checks, steps=CALLS)
    trained(checks, steps=16, optimizer_steps=0)
    assert not any(trained(checks) for _ in range(CALLS)), "while they are between others"


# ---------------------------------------------------------------------------------- the trainer


def core(**changes):
    made = TrainerCore(
        name="eu/0", fragments=1, found=None, connect_timeout_seconds=60.0,
        **{"checkpoint_every": None, **changes},
    )  # fmt: skip
    model = LinkState(phase=Phase.APPLY_MODEL, connected=True, incarnation=2, ready=[(0, 1)])
    made.join(model, now=0.0, terminated=False)
    return made


def stepped(made, *, tokens=8, finite=True, optimizer_steps=1):
    actions = made.step(tokens, TRAINING, now=1.0, optimizer_steps=optimizer_steps)
    return [*actions, *made.copied([], loss=1.0 if finite else None, finite=finite)]


@pytest.mark.parametrize(
    ("kind", "changes"), [("NotFinite", {"finite": False}), ("NoTokens", {"tokens": 0})]
)
def test_the_state_for_the_link_has_the_problem(kind, changes):
    made = core()
    for _ in range(STEPS_IN_ROW):
        state = next(a.state for a in stepped(made, **changes) if isinstance(a, Send))
    assert (state.problem, state.problem_text != "") == (kind, True)
    state = next(a.state for a in stepped(made) if isinstance(a, Send))
    assert (state.problem, state.problem_text) == ("", "")


def test_one_loss_of_a_device_that_delivers_late_counts_once():
    """It is NaN, and no other arrives for longer than the number of steps that are a problem."""
    made = core(checkpoint_every=2)
    stepped(made, finite=False)
    actions = [a for _ in range(2 * STEPS_IN_ROW) for a in stepped(made, finite=None)]
    assert {a.state.problem for a in actions if isinstance(a, Send)} == {""}
    assert not any(isinstance(a, SaveCheckpoint) for a in actions), "what has diverged is not saved"


def test_a_model_whose_loss_is_not_finite_is_saved_neither_in_time_nor_at_the_end():
    made = core(checkpoint_every=2)
    saves = [
        any(isinstance(action, SaveCheckpoint) for action in stepped(made, finite=finite))
        for finite in (True, False, False, True)
    ]
    assert saves == [False, False, False, True]
    stepped(made, finite=False)
    ending = made.check(None, terminated=True)
    assert not any(isinstance(action, SaveCheckpoint) for action in ending)
    assert made.closed


def test_the_problem_of_repeated_steps_names_the_calls_without_an_optimizer_step():
    checks = StepChecks()
    for call in range(CALLS):
        checks.stepped(tokens=8, optimizer_steps=int(call % 3 == 0))
    without = CALLS - len(range(0, CALLS, 3))
    assert f"before {without} of the last {CALLS} calls" in checks.problem().text


def test_a_model_that_is_not_the_jobs_is_a_problem_after_what_is_worse():
    checks = StepChecks()
    checks.other_model = "a mask was added"
    assert (checks.problem().kind, checks.problem().text) == ("OtherModel", "a mask was added")
    for _ in range(STEPS_IN_ROW):
        checks.stepped(tokens=0, optimizer_steps=1)
    assert checks.problem().kind == "NoTokens"


def test_twenty_steps_without_tokens_in_a_row_are_a_problem_and_no_fewer():
    checks = StepChecks()
    trained(checks)
    assert trained(checks, steps=STEPS_IN_ROW - 1, tokens=0) is None
    assert trained(checks, tokens=0).kind == "NoTokens"
    assert trained(checks) is None
    assert trained(checks, steps=STEPS_IN_ROW - 1, tokens=0) is None


def test_steps_that_are_repeated_stay_a_problem_and_are_forgotten_after_as_many_good_ones():
    checks = StepChecks()
    for _ in range(2 * CALLS):
        trained(checks, optimizer_steps=1)
        trained(checks, optimizer_steps=0)
    assert trained(checks).kind == "RepeatedSteps"
    assert trained(checks, steps=CALLS) is None
