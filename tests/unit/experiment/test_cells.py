"""Single cells of tiny models: what each method trains, and that a cell is a function of its task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from diloco.errors import ConfigError, NotFiniteError
from diloco_experiment import lockstep, models
from diloco_experiment.cells import run
from diloco_experiment.gradients import gradients
from diloco_experiment.models import Recipe, Trained, check
from diloco_experiment.moments import MergedMoments, Values
from diloco_experiment.results import Status, parse, text_of
from diloco_experiment.scenarios import Failures, Scavenging, Scenario
from diloco_experiment.tasks import Checks, Method, Moments
from diloco_experiment.world import Evaluations, TrainingWorld
from diloco_sim.checkers.observations import Committed, Resumed
from diloco_sim.faults import Kind
from diloco_sim.learner import TRAINER
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.events import BeginMerge
from diloco_testing.experiments import task
from diloco_worker.recipes import data, gpt

pytestmark = pytest.mark.slow  # they train; test_pool.py runs a cell in the fast tests


@pytest.mark.slow
@pytest.mark.parametrize("method", Method)
def test_equal_tasks_give_equal_bytes_and_another_seed_others(tmp_path, method):
    first, second = (run(task(tmp_path, method)) for _ in range(2))
    assert first.status is Status.OK, first.detail
    assert text_of(first) == text_of(second)
    assert run(task(tmp_path, method, seed=4)).theta != first.theta


@pytest.mark.slow
@pytest.mark.parametrize("method", Method)
def test_a_result_has_its_curve_and_its_counts(tmp_path, method):
    found = run(task(tmp_path, method))
    assert [step for step, _ in found.curve] == [6, 12]
    assert found.loss == found.curve[-1][1] < 5.6  # ln 256 is the loss of no knowledge
    assert (found.steps, found.tokens) == (12, found.local_steps * 32)
    assert parse(text_of(found).encode()) == found


def test_a_learner_makes_the_steps_of_the_recipe(tmp_path):
    """Bit for bit: its batches, updates and schedule are those of the program that a job runs."""
    of = task(tmp_path)
    of = replace(of, configs=(("alone/0", {**of.configs[0][1], "momentum": 0.8}),))
    recipe = Recipe(of)
    real = gpt.train(recipe.config("alone/0"), seed=3, steps=12)
    trained = Trained(recipe, "alone/0")
    for step in range(12):
        trained.begin(local_step=step, global_step=step)
        trained.step()
    for name, parameter in trained.model.named_parameters():
        assert torch.equal(parameter, real.get_parameter(name)), name


def test_synchronous_training_of_one_learner_is_the_recipe(tmp_path):
    of = task(tmp_path, Method.SYNCHRONOUS, learners=1)
    alone = replace(of, configs=(("alone/0", of.configs[0][1]),))
    real = gpt.train(Recipe(of).config("eu/0"), seed=3, steps=12)
    assert run(alone).loss == Recipe(of).score(real)


def test_synchronous_training_has_the_batches_of_all_learners(tmp_path):
    alone = run(task(tmp_path, Method.SYNCHRONOUS, learners=1))
    together = run(task(tmp_path, Method.SYNCHRONOUS, learners=3))
    assert (alone.tokens, together.tokens) == (12 * 32, 3 * 12 * 32)
    assert alone.theta != together.theta


def test_outer_steps_of_one_without_momentum_are_plain_training(tmp_path):
    of = task(tmp_path, Method.DILOCO, learners=1, merge="Average", outer_learning_rate=1.0,
              outer_momentum=0.0, wire_up="FP32", wire_down="FP32")  # fmt: skip
    plain = run(replace(of, method=Method.SYNCHRONOUS))
    assert run(of).loss == pytest.approx(plain.loss, abs=1e-5)


def test_learners_of_diloco_wait_for_each_merge(tmp_path):
    found = run(task(tmp_path, Method.DILOCO, learners=3))
    assert (found.merges, found.members, found.merged_tokens) == (3, 3.0, found.tokens)
    short = run(
        task(tmp_path, Method.DILOCO, interval=5)
    )  # the last merge has the steps that are left
    assert (short.merges, short.merged_tokens) == (3, short.tokens)


@pytest.mark.parametrize("feedback", [False, True])
def test_rounding_on_the_wire_changes_the_result(tmp_path, feedback):
    fine = run(task(tmp_path, Method.DILOCO, wire_up="FP32"))
    coarse = run(task(tmp_path, Method.DILOCO, wire_up="Int4", error_feedback=feedback))
    assert coarse.status is Status.OK
    assert coarse.theta != fine.theta


def test_feedback_changes_what_is_sent(tmp_path):
    with_it, without = (
        run(task(tmp_path, Method.DILOCO, wire_up="Int4", error_feedback=feedback))
        for feedback in (True, False)
    )
    assert with_it.theta != without.theta


def test_averaged_moments_change_no_first_merge_and_every_later_one(tmp_path):
    """The learners begin with equal parameters; what they have learnt since is in their moments, too."""
    for steps, different in ((4, 1), (8, 2)):
        found = [run(task(tmp_path, Method.DILOCO, steps=steps, moments=m)) for m in Moments]
        assert {f.status for f in found} == {Status.OK}
        # Who waits has no step since its copy.
        assert found[1].theta == found[2].theta
        assert len({f.theta for f in found}) == different


@pytest.mark.parametrize("moments", [Moments.OVERWRITE, Moments.AVERAGE])
@pytest.mark.parametrize("method", [Method.STREAMING, Method.DECOUPLED])
def test_learners_continue_with_the_weighted_mean_of_the_moments(
    tmp_path, method, moments, monkeypatch
):
    """Of the step of which each member's copy was; `Average` keeps what changed since."""
    of = task(tmp_path, method, learners=3, moments=moments, guard=0.0)
    of = replace(of, configs=tuple(
        (name, {**raw, "batch": 2 + index}) for index, (name, raw) in enumerate(of.configs)
    ))  # fmt: skip
    world = TrainingWorld(of)
    copies: dict[tuple[str, int, int], Values] = {}
    merges: dict[tuple[int, int], tuple[Contribution, ...]] = {}
    compared: list[tuple[int, int]] = []
    copied, observe, received = MergedMoments.copied, MergedMoments.observe, Trained.received

    def cloned(values: Values) -> Values:
        return {key: value.clone() for key, value in values.items()}

    def note_copy(
        self: MergedMoments, fragment: int, learner: str, step: int, values: Values
    ) -> None:
        copies[learner, fragment, step] = cloned(values)
        copied(self, fragment, learner, step, values)

    def note_merge(self: MergedMoments, event: BeginMerge | Committed, now: float) -> None:
        if isinstance(event, BeginMerge):
            merges[event.fragment, event.round] = event.contributions
        observe(self, event, now)

    def compare(self: Trained, fragment: int, version: tuple[int, int]) -> None:
        before = cloned(self.moments(fragment))
        received(self, fragment, version)
        if not (members := merges.get((fragment, version[1]), ())):
            return
        mine = {c.learner: copies[c.learner, fragment, c.local_step] for c in members}
        for key, value in self.moments(fragment).items():
            expected = sum(c.weight * mine[c.learner][key] for c in members)
            expected = expected / sum(c.weight for c in members)
            if moments is Moments.AVERAGE and self.name in mine:
                expected = expected + before[key] - mine[self.name][key]
            if key[1] == "exp_avg_sq":
                expected = expected.clamp(min=0)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-9)
        compared.append((len({c.weight for c in members}), version[1]))

    monkeypatch.setattr(MergedMoments, "copied", note_copy)
    monkeypatch.setattr(MergedMoments, "observe", note_merge)
    monkeypatch.setattr(Trained, "received", compare)
    found = world.result()
    assert found.status is Status.OK, found.detail
    assert len(set(compared)) >= 8
    assert max(compared)[0] > 1, "members of different weights"


def test_moments_are_averaged_where_learners_fail_and_return(tmp_path):
    failing = Scenario(failures=Failures(goodput=0.6, outage_steps=3))
    of = task(tmp_path, learners=3, scenario=failing, steps=40, moments=Moments.AVERAGE)
    first, second = run(of), run(of)
    assert first.status is Status.OK, first.detail
    assert first.restarts > 1
    assert text_of(first) == text_of(second)
    assert first.theta != run(replace(of, moments=Moments.LOCAL)).theta


def test_synchronous_training_has_no_moments_to_average(tmp_path):
    tasks = [task(tmp_path, Method.SYNCHRONOUS, moments=moments) for moments in Moments]
    assert tasks[0] == tasks[1] == tasks[2]


def test_streaming_has_all_learners_in_each_merge_and_decoupled_need_not(tmp_path):
    slow = Scenario(step_seconds=(1.0, 3.0))
    streaming = run(task(tmp_path, Method.STREAMING, scenario=slow))
    decoupled = run(task(tmp_path, Method.DECOUPLED, scenario=slow, grace_max_steps=0.0))
    assert streaming.members == 2.0
    assert decoupled.members < 2.0
    assert decoupled.virtual_seconds < streaming.virtual_seconds


@pytest.mark.slow
def test_learners_fail_and_return_by_goodput(tmp_path):
    failing = Scenario(failures=Failures(goodput=0.6, outage_steps=3))
    of = task(tmp_path, learners=3, scenario=failing, steps=60)
    first, second = run(of), run(of)
    assert first.status is Status.OK, first.detail
    assert text_of(first) == text_of(second)
    healthy = run(task(tmp_path, learners=3, steps=60))
    assert first.restarts > 3 > healthy.restarts == 0
    assert 0.3 < first.local_steps / healthy.local_steps < 0.9


def test_a_restarted_learner_continues_with_the_optimizers_of_its_checkpoint(tmp_path):
    crash = Scenario(faults=("6.500..7.000 crash eu/1+trainer",))
    world = TrainingWorld(task(tmp_path, scenario=crash, steps=30))
    loaded: list[str] = []
    original = Trained.load_optimizers

    def load_optimizers(self: Trained, saved: object) -> None:
        loaded.append(self.name)
        original(self, saved)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trained, "load_optimizers", load_optimizers)
        found = world.result()
    assert (found.status, found.restarts, loaded) == (Status.OK, 1, ["eu/1"])


def test_failures_last_until_a_cell_ends_and_scavenged_learners_do_not_return(tmp_path):
    scenario = Scenario(failures=Failures(goodput=0.5, outage_steps=5), scavenging=Scavenging())
    of = task(tmp_path, scenario=scenario, steps=100)
    world = TrainingWorld(of)
    ends = world.deadline
    for name in of.names:
        assert max(f.begin for f in world.of.plan if f.target == name + TRAINER) > 0.9 * ends
    left = [f for f in world.of.plan if f.kind is Kind.LEAVE]
    assert len(left) == len(of.added) > 0
    assert min(f.end for f in left) > ends


def test_the_curve_of_a_job_that_does_not_complete_ends_where_it_stood(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingWorld, "deadline", 9.0)
    found = run(task(tmp_path, steps=40))
    assert found.status is Status.HALTED
    assert [step for step, _ in found.curve] == [6]


def test_a_restart_of_the_syncer_takes_the_points_of_lost_merges_from_the_curve(tmp_path):
    of = task(tmp_path)
    recipe = Recipe(of)
    evaluations = Evaluations(of, recipe)
    initial = [values.copy() for values in evaluations.theta.values]
    evaluations._complete(13)
    assert [step for step, _ in evaluations.curve.points] == [6, 12]
    evaluations.theta.flat.add_(1.0)
    evaluations.observe(Resumed(2, 8, None, of.spec, {}), 0.0)
    assert [step for step, _ in evaluations.curve.points] == [6]
    for values, expected in zip(evaluations.theta.values, initial, strict=True):
        assert np.array_equal(values, expected)
    evaluations.complete()
    assert [step for step, _ in evaluations.curve.points] == [6, 12]


def test_a_cell_reads_each_text_once(tmp_path, monkeypatch):
    loads: list[str] = []

    def load(source: str, **options: Any) -> data.Corpus:
        loads.append(source)
        return load_text(source, **options)

    load_text = data.load
    monkeypatch.setattr(data, "load", load)
    sources = [tmp_path / f"{index}.txt" for index in range(6)]
    for source in sources:
        source.write_text("a text of some length. " * 200)
    of = task(tmp_path, learners=6)
    of = replace(of, configs=tuple(
        (name, {**raw, "data": str(source)})
        for (name, raw), source in zip(of.configs, sources, strict=True)
    ))  # fmt: skip
    recipe = Recipe(of)
    for step in range(5):
        for name in of.names:
            recipe.windows(name, step)
    # Once for the digest, and once more where it was not kept.
    assert max(loads.count(str(source)) for source in sources) <= 2


def test_parameters_are_counted_without_a_model(tmp_path):
    recipe = Recipe(task(tmp_path))
    config = recipe.config("eu/0")
    assert models.parameters_of(config) == sum(p.numel() for p in recipe.new_model().parameters())


def test_the_parameters_of_all_learners_of_a_cell_are_limited(tmp_path, monkeypatch):
    scenario = Scenario(scavenging=Scavenging(extra=0.5))
    count = models.parameters_of(Recipe(task(tmp_path)).config("eu/0"))
    monkeypatch.setattr(models, "MAX_CELL_PARAMETERS", 2 * count)
    check(task(tmp_path))
    check(task(tmp_path, Method.SYNCHRONOUS, learners=3))  # it has one model
    expected = f"3 learners of {count:,} parameters each, in all {3 * count:,}, in one process"
    for method in (Method.DILOCO, Method.DECOUPLED):
        with pytest.raises(ConfigError, match=expected):
            check(task(tmp_path, method, learners=3))
    with pytest.raises(ConfigError, match=expected):
        check(task(tmp_path, scenario=scenario))  # with the learner that joins


def test_learners_of_different_models_are_refused(tmp_path):
    of = task(tmp_path)
    (first, second) = of.configs
    other = replace(of, configs=(first, (second[0], {**second[1], "layers": 2})))
    with pytest.raises(ConfigError, match="differ from those of eu/0"):
        check(other)


@pytest.mark.slow
def test_scavenging_adds_learners_for_a_while(tmp_path):
    extra = Scenario(scavenging=Scavenging(extra=1.0, begin=0.2, end=0.7))
    with_them = run(task(tmp_path, scenario=extra, steps=40))
    without = run(task(tmp_path, steps=40))
    assert with_them.status is Status.OK, with_them.detail
    assert without.members <= 2.0 < with_them.members
    assert without.tokens < with_them.tokens < 2 * without.tokens


def test_a_loss_that_is_not_finite_ends_the_cell_as_diverged(tmp_path):
    for method in Method:
        found = run(task(tmp_path, method, config={"learningRate": 1e30}))
        assert found.status is Status.DIVERGED, method
        assert found.detail.startswith("the loss of"), method
        assert np.isnan(found.loss)


@pytest.mark.parametrize("method", Method)
def test_without_a_loss_of_the_final_parameters_a_cell_has_diverged(tmp_path, method, monkeypatch):
    """The loss of an earlier Θ must not be shown in its place."""
    scores = iter((5.0, float("inf")))
    monkeypatch.setattr(Recipe, "score", lambda self, model: next(scores))
    found = run(task(tmp_path, method))
    assert found.curve == ((6, 5.0),)
    assert found.status is Status.DIVERGED
    assert found.detail == "the validation loss after global step 12 is not finite"
    assert np.isnan(found.loss)


def test_a_delta_that_cannot_be_encoded_ends_the_cell_with_its_curve(tmp_path, monkeypatch):
    merge = lockstep._Outer.merge

    def fail(self: lockstep._Outer, step: int, steps: int) -> None:
        if step > 8:
            raise NotFiniteError("the delta")
        merge(self, step, steps)

    monkeypatch.setattr(lockstep._Outer, "merge", fail)
    found = run(task(tmp_path, Method.DILOCO))
    assert (found.status, found.detail) == (Status.DIVERGED, "the delta")
    assert (found.steps, found.merges, len(found.curve)) == (12, 2, 1)


def test_the_checkers_of_the_simulator_replay_the_merges_of_real_models(tmp_path):
    world = TrainingWorld(task(tmp_path, checks=Checks.ALL))
    found = world.result()
    assert (found.status, found.merges) == (Status.OK, 12)


def test_a_broken_merge_is_found(tmp_path, monkeypatch):
    world = TrainingWorld(task(tmp_path, checks=Checks.ALL))
    monkeypatch.setattr("diloco_syncer.core.outer.OuterOptimizer.factors",
                        property(lambda self: (np.float32(0.1),) * 4))  # fmt: skip
    found = world.result()
    assert found.status is Status.FAILED
    assert "replay" in found.detail


def test_gradients_of_several_models_are_those_of_each(tmp_path):
    recipe = Recipe(task(tmp_path, learners=3))
    models = [Trained(recipe, f"eu/{index}").model for index in range(3)]
    for number, model in enumerate(models):
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    windows = [recipe.windows(f"eu/{index}", 5) for index in range(3)]
    config = recipe.config("eu/0")
    together = gradients(models, windows, config)
    found = [[p.grad.clone() for p in model.parameters()] for model in models]
    for index, model in enumerate(models):
        model.zero_grad()
        alone = gradients([model], [windows[index]], config)
        assert together[index] == pytest.approx(alone[0], rel=1e-5)
        for own, parameter in zip(found[index], model.parameters(), strict=True):
            torch.testing.assert_close(own, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_tiny_steps_of_many_learners_are_computed_in_one_call(tmp_path, monkeypatch):
    sizes: list[int] = []

    def counted(members, windows, config):
        sizes.append(len(members))
        return gradients(members, windows, config)

    monkeypatch.setattr(models, "gradients", counted)
    of = task(tmp_path, learners=models.BATCHED_LEARNERS, steps=6)
    together = run(of)
    # At the end, the learner that has left may have been without another step.
    assert sizes.count(models.BATCHED_LEARNERS) >= 6
    sizes.clear()
    monkeypatch.setattr(models, "BATCHED_TOKENS", 0)
    assert run(of).loss == pytest.approx(together.loss, rel=1e-3)
    assert set(sizes) == {1}


@pytest.mark.parametrize(
    ("config", "expected"),
    [({"layer": 2}, "did you mean layers"), ({"device": "cuda"}, "train on CPUs"), ({"slowdown": 2}, "stepSeconds")],
)  # fmt: skip
def test_a_config_that_cannot_run_is_refused(tmp_path, config, expected):
    with pytest.raises(ConfigError, match=expected):
        check(task(tmp_path, config=config))


def test_more_fragments_than_tensors_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="8 "):
        check(task(tmp_path, fragments=20, interval=20))
