"""The real Trainer of transformers with a scripted learner: what the callback changes, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from diloco.errors import ConfigError
from diloco_testing.learners import data_parallel
from diloco_testing.learners.rejoined import Rejoined
from diloco_worker.identities import Identity

transformers = pytest.importorskip("transformers")
from diloco_worker.integrations.huggingface import (  # noqa: E402 - needs the library
    DiLoCoCallback,
    tokens_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CONTEXT, BATCH = 8, 4


@pytest.fixture
def model():
    torch.manual_seed(0)
    size = {"vocab_size": 16, "n_positions": CONTEXT, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))


class Rates(transformers.TrainerCallback):
    """The learning rate of each optimizer step."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.seen.append(optimizer.param_groups[0]["lr"])


class Items(torch.utils.data.IterableDataset):
    """Without a length, and not endless."""

    def __init__(self, items):
        self.items, self.passes = items, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.items)


@pytest.fixture
def train(model, tmp_path):
    """Trains with these arguments; returns the Trainer and the rates."""

    def run(
        callback,
        *,
        optimizers=(None, None),
        train_dataset=None,
        kind="Trainer",
        model=model,
        **changes,
    ):
        options = {
            "output_dir": str(tmp_path), "per_device_train_batch_size": BATCH, "learning_rate": 1.0,
            "lr_scheduler_type": "linear", "save_strategy": "no", "report_to": "none", "use_cpu": True,
            "max_steps": 3, "logging_steps": 1, "disable_tqdm": True, **changes,
        }  # fmt: skip
        ids = torch.arange(CONTEXT)
        data = [{"input_ids": ids, "labels": ids} for _ in range(10)]
        rates = Rates()
        arguments = getattr(transformers, kind.replace("Trainer", "TrainingArguments"))
        trainer = getattr(transformers, kind)(
            model,
            arguments(**options),
            train_dataset=data if train_dataset is None else train_dataset,
            eval_dataset=data[:3],
            callbacks=[callback, rates],
            optimizers=optimizers,
        )
        trainer.train()
        return trainer, rates.seen

    return run


def test_the_job_ends_training_and_not_max_steps_or_epochs(train, monkeypatch):
    job = Rejoined(steps=12).join(monkeypatch)
    trainer, _ = train(DiLoCoCallback(), max_steps=3)
    assert (job.local_step, trainer.state.global_step, job.closed) == (12, 12, True)
    assert trainer.state.max_steps == 100, "what a progress bar shows as the end"


def test_a_trainer_of_sequences_to_sequences_generates_at_its_evaluations(train, monkeypatch):
    size = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**size, decoder_start_token_id=0)
    )
    job = Rejoined(at=40, steps=4).join(monkeypatch)
    options = {"eval_strategy": "steps", "eval_steps": 2, "predict_with_generate": True}
    trainer, rates = train(DiLoCoCallback(), kind="Seq2SeqTrainer", model=model, **options)
    assert (job.local_step, job.closed) == (4, True)
    assert set(job.tokens) <= {BATCH * CONTEXT, 2 * CONTEXT}, "those that are trained on"
    assert rates == pytest.approx([(100 - t) / 100 for t in range(40, 44)])
    scored = [line["step"] for line in trainer.state.log_history if "eval_loss" in line]
    assert scored == [2, 4]


@pytest.mark.timeout(200)
def test_a_dataset_without_length_is_read_again(train, monkeypatch):
    ids = torch.arange(CONTEXT)
    items = Items([{"input_ids": ids, "labels": ids}] * 10)
    job = Rejoined(steps=5).join(monkeypatch)
    train(DiLoCoCallback(), train_dataset=Identity().shard(items))
    assert (job.local_step, items.passes) == (5, 2)


def test_a_search_for_the_batch_size_is_refused(train, monkeypatch):
    Rejoined().join(monkeypatch)
    with pytest.raises(ConfigError, match="auto_find_batch_size=True trains several times"):
        train(DiLoCoCallback(), auto_find_batch_size=True)


@pytest.mark.parametrize(
    ("seeds", "warned"), [({}, True), ({"seed": 7}, False), ({"data_seed": 7}, False)]
)
def test_data_that_each_life_reads_in_the_same_order_are_warned_about(
    train, monkeypatch, caplog, seeds, warned
):
    Rejoined(steps=1).join(monkeypatch)
    train(DiLoCoCallback(), **seeds)
    assert ("seed is 42, its default, and data_seed is not set" in caplog.text) is warned


def test_a_learner_slower_than_the_job_ends_with_it(train, monkeypatch):
    job = Rejoined(steps=2, total=50).join(monkeypatch)
    train(DiLoCoCallback(), max_steps=40)
    assert job.local_step == 2


def test_the_learning_rate_follows_the_global_step_after_a_restart(train, monkeypatch):
    Rejoined(at=121, total=150, steps=4, rate=2).join(monkeypatch)
    _, rates = train(DiLoCoCallback(), warmup_steps=50)
    assert rates == pytest.approx([(150 - t) / 100 for t in (121, 123, 125, 127)])


@pytest.mark.parametrize("kind", ["cosine_with_min_lr", "cosine_warmup_with_min_lr"])
def test_a_schedule_may_be_computed_from_the_defaults_of_the_optimizer(train, monkeypatch, kind):
    Rejoined(at=99, steps=1).join(monkeypatch)
    _, rates = train(DiLoCoCallback(), lr_scheduler_type=kind, lr_scheduler_kwargs={"min_lr": 0.25})
    assert rates == pytest.approx([0.25], abs=1e-3)


def test_a_job_that_becomes_longer_has_a_longer_schedule(train, monkeypatch):
    job = Rejoined(at=50, total=100, steps=4, rate=0).join(monkeypatch)

    class Extend(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            job.total_steps = 200

    callback = DiLoCoCallback()
    callback.on_substep_end = Extend().on_step_end  # after each micro-batch but the last
    _, rates = train(callback, gradient_accumulation_steps=2)
    assert rates == pytest.approx([0.5, 0.75, 0.75, 0.75])


def test_a_scheduler_of_the_user_is_followed_as_well(train, model, monkeypatch):
    Rejoined(at=20, total=100, steps=3).join(monkeypatch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 21, gamma=0.5)
    _, rates = train(DiLoCoCallback(), optimizers=(optimizer, scheduler))
    assert rates == [1.0, 0.5, 0.5]


def test_a_schedule_of_a_metric_is_left_alone(train, monkeypatch):
    Rejoined(at=20, total=100, steps=3).join(monkeypatch)
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    _, rates = train(DiLoCoCallback(), lr_scheduler_type="reduce_lr_on_plateau", **options)
    assert rates == [1.0, 1.0, 1.0]


def test_tokens_of_all_micro_batches_count_once_and_evaluation_does_not(train, monkeypatch):
    job = Rejoined(steps=3).join(monkeypatch)

    class Score(DiLoCoCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            model.eval()
            model(input_ids=torch.zeros(1, CONTEXT, dtype=torch.long))
            model.train()

    train(
        Score(),
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        dataloader_drop_last=True,
    )
    assert job.tokens == [2 * BATCH * CONTEXT] * 3


def test_micro_batches_that_are_left_at_the_end_of_the_data_are_a_step_with_their_tokens(
    train, monkeypatch
):
    """Ten rows in batches of four, two of which make a step: the last batch has two rows, and is a step alone."""
    job = Rejoined(steps=5).join(monkeypatch)
    train(DiLoCoCallback(), gradient_accumulation_steps=2)
    whole, rest = 2 * BATCH * CONTEXT, 2 * CONTEXT
    assert job.tokens == [whole, rest, whole, rest, whole]


def test_the_loss_is_the_one_that_the_trainer_logs(train, monkeypatch):
    job = Rejoined(steps=3).join(monkeypatch)
    trainer, _ = train(DiLoCoCallback(tokens=7))
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert job.losses == [None, *(float(loss) for loss in logged[:2])]
    assert job.tokens == [7, 7, 7]


def test_a_logged_loss_that_is_not_finite_counts_once():
    callback = DiLoCoCallback()
    for logged, expected in ((float("nan"), [True, False]), (1.0, [False, False])):
        callback.on_log(None, None, None, logs={"loss": logged})
        losses = [callback._newest_loss() for _ in range(2)]
        assert [loss is not None and loss != loss for loss in losses] == expected
    assert losses == [1.0, 1.0]


def test_a_fraction_of_all_steps_is_one_of_the_jobs_steps(train, monkeypatch):
    Rejoined(steps=10, total=20).join(monkeypatch)
    trainer, _ = train(DiLoCoCallback(), logging_steps=0.25)
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [5, 10]


def test_training_that_ends_before_the_job_is_warned_about(train, monkeypatch, caplog):
    job = Rejoined(steps=10).join(monkeypatch)

    class Stop(DiLoCoCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    train(Stop())
    assert job.closed
    assert "something else than the job ended training" in caplog.text


def test_without_a_job_the_trainer_is_as_before(train, monkeypatch):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    callback = DiLoCoCallback()
    trainer, rates = train(callback, max_steps=4)
    assert trainer.state.global_step == callback.learner.local_step == 4
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_a_callback_that_comes_too_late_is_refused(train, monkeypatch):
    Rejoined().join(monkeypatch)
    callback = DiLoCoCallback()
    callback.on_init_end = lambda *_, **__: None  # as after trainer.add_callback
    with pytest.raises(ConfigError, match="Trainer that exists already"):
        train(callback)


def test_inputs_without_a_tensor_need_the_number_of_tokens():
    assert tokens_of({"pixel_values": torch.zeros(3, 5)}) == 3
    assert tokens_of(torch.zeros(2, 5)) == 2
    with pytest.raises(TypeError, match=r"\['text'\] have no tensor to count"):
        tokens_of({"text": "x"})


@pytest.mark.timeout(300)
def test_of_data_parallel_processes_all_tokens_count_and_different_orders_are_warned_about():
    """Those of rank 0 count for the learner: with its own batches alone, the weight would be a quarter."""
    each = data_parallel.ROWS * data_parallel.CONTEXT
    expected = {"tokens": [2 * each] * data_parallel.STEPS, "everyRank": True, "ranks": 2}
    found = data_parallel.learners_of("huggingface", 2)
    assert [{key: seen[key] for key in expected} for seen in found] == [expected] * 2
    assert not set(found[0]["rows"]).isdisjoint(found[1]["rows"]), "each process has another seed"
    assert "2 seeds for the order of the data (1, 2)" in found[0]["warnings"][0]
    assert found[1]["warnings"] == []
