"""The real Trainer of Lightning with a scripted learner: what the callback changes."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

from diloco.errors import ConfigError
from diloco_testing.learners import data_parallel
from diloco_testing.learners.rejoined import Rejoined
from diloco_worker import attach
from diloco_worker.trainer.layout import describe
from diloco_worker.trainer.wrappers import tensors_of

lightning = pytest.importorskip("lightning")
pl = pytest.importorskip("lightning.pytorch")
from diloco_worker.integrations.lightning import DiLoCoCallback  # noqa: E402 - needs the library

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

BATCH = 4


class Module(pl.LightningModule):
    """A linear model whose rate falls by one hundredth a step."""

    def __init__(self, interval="step", frequency=1):
        super().__init__()
        self.layer, self.rates, self.losses = nn.Linear(2, 1), [], []
        self.when = {"interval": interval, "frequency": frequency}

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, **self.when},
        }


class TwoSchedules(Module):
    """Both of one optimizer."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _ in range(2)]
        return [optimizer], [{"scheduler": made, "interval": "step"} for made in schedules]


class TwoOptimizers(Module):
    """As a GAN: the second one steps once for two steps of the first."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, last = self.optimizers()
        for optimizer in (first, first, last):
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]


def train(callback, module=None, **options):
    """Train on 5 batches per epoch; returns the Trainer and the module."""
    module = module or Module()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], **{"max_steps": 3, **options},
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.ones(5 * BATCH, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    trainer.fit(module, loader, loader)
    return trainer, module


def rows(batch):
    return len(batch[0])


@pytest.mark.parametrize(
    "limits", [{"max_steps": 3}, {"max_epochs": 1}, {"min_epochs": 9, "max_epochs": 20}]
)
def test_the_job_ends_training_and_not_the_trainers_limits(monkeypatch, limits):
    job = Rejoined(steps=12).join(monkeypatch)
    trainer, _ = train(DiLoCoCallback(tokens=1), **{"max_steps": -1, **limits})
    assert (job.local_step, trainer.global_step, job.closed) == (12, 12, True)


def test_the_learning_rate_follows_the_global_step_after_a_restart(monkeypatch):
    Rejoined(at=60, steps=4, rate=2).join(monkeypatch)
    _, module = train(DiLoCoCallback(tokens=1))
    assert module.rates == pytest.approx([0.0040, 0.0038, 0.0036, 0.0034])


@pytest.mark.parametrize("limits", [{"max_steps": 3}, {"max_steps": -1, "max_epochs": 1}])
def test_a_schedule_of_all_steps_has_the_jobs(monkeypatch, limits):
    class OneCycle(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
            self.estimated = self.trainer.estimated_stepping_batches
            self.epochs = self.trainer.max_epochs
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.01, total_steps=self.estimated
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    job = Rejoined(at=30, steps=7, total=100).join(monkeypatch)
    _, module = train(DiLoCoCallback(tokens=1), OneCycle(), **limits)
    assert (module.estimated, module.epochs, job.local_step) == (100, 100, 7)
    assert max(module.rates) == module.rates[0] == pytest.approx(0.01, rel=0.01), (
        "after 30 of 100 steps"
    )


def test_a_second_scheduler_of_an_optimizer_is_refused(monkeypatch):
    """Each would overwrite the rates of the other."""
    Rejoined(at=60, steps=4).join(monkeypatch)
    with pytest.raises(ConfigError, match="ExponentialLR and ExponentialLR have the same"):
        train(DiLoCoCallback(tokens=1), TwoSchedules())


def test_a_scheduler_that_steps_every_second_time_follows_half_of_the_steps(monkeypatch):
    Rejoined(at=60, steps=4).join(monkeypatch)
    _, module = train(DiLoCoCallback(tokens=1), Module(frequency=2))
    assert module.rates == pytest.approx([0.0070, 0.0070, 0.0069, 0.0069])


def test_a_learner_that_is_terminated_during_validation_leaves_the_job(monkeypatch):
    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            job.terminated = True
            os.kill(os.getpid(), signal.SIGTERM)

    class Terminated(Rejoined):
        terminated = False

        @property
        def done(self):
            return self.terminated or super().done

    job = Terminated().join(monkeypatch)
    with pytest.raises(SystemExit):
        train(DiLoCoCallback(tokens=1), Validated(), val_check_interval=2, num_sanity_val_steps=0)
    assert (job.local_step, job.closed) == (2, True)


def test_tokens_of_a_skipped_step_do_not_count(monkeypatch):
    class Skipping(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()
            if batch_idx != 1:  # a GradScaler skips it
                optimizer.optimizer.step()

    job = Rejoined(steps=3).join(monkeypatch)
    train(DiLoCoCallback(tokens=rows), Skipping())
    assert job.tokens == [BATCH] * 3


def test_a_schedule_of_a_metric_is_left_alone(monkeypatch):
    class Plateau(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
            when = {"interval": "step", "monitor": "loss"}
            return [optimizer], [{"scheduler": scheduler, **when}]

    Rejoined(at=60, steps=3).join(monkeypatch)
    _, module = train(DiLoCoCallback(tokens=1), Plateau())
    assert module.rates == [0.01] * 3


def test_a_scheduler_of_epochs_is_left_alone(monkeypatch):
    Rejoined(at=60, steps=7).join(monkeypatch)
    _, module = train(DiLoCoCallback(tokens=1), Module(interval="epoch"))
    assert module.rates == pytest.approx([0.01] * 5 + [0.0099] * 2)


def test_tokens_of_all_micro_batches_and_the_loss_before_are_counted(monkeypatch):
    job = Rejoined(steps=3).join(monkeypatch)
    _, module = train(DiLoCoCallback(tokens=rows), accumulate_grad_batches=2)
    # The last batch of an epoch is a step of its own.
    assert job.tokens == [2 * BATCH, 2 * BATCH, BATCH]
    assert job.losses == pytest.approx([module.losses[batch] for batch in (0, 2, 3)])


def test_of_several_optimizers_each_step_of_the_last_counts(monkeypatch):
    job = Rejoined(steps=5).join(monkeypatch)
    train(DiLoCoCallback(tokens=rows), TwoOptimizers())
    assert (job.local_step, job.tokens) == (5, [BATCH] * 5)


def test_without_a_job_the_trainer_is_as_before(monkeypatch):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    callback = DiLoCoCallback(tokens=1)
    trainer, module = train(callback, max_steps=7)
    assert trainer.global_step == callback.learner.local_step == 7
    assert module.rates == pytest.approx([0.01 * (1 - step / 100) for step in range(7)])


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_what_fabric_sets_up_has_the_names_and_the_hooks_of_what_it_wraps(monkeypatch, strategy):
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = describe(model)
    environment = dict(os.environ)
    try:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        wrapped, stepped = fabric.setup(model, optimizer)
        assert [n.info for n in describe(wrapped).merged] == [n.info for n in plain.merged]
        assert [n for n, _ in tensors_of(wrapped)] == [n for n, _ in tensors_of(model)]
        learner = attach(wrapped, stepped, tokens=1)
        optimizer.step()
        assert learner.local_step == 1
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name in os.environ.keys() - environment.keys():  # of the launcher
            del os.environ[name]


@pytest.mark.timeout(300)
@pytest.mark.slow_tier
def test_the_tokens_of_data_parallel_processes_are_those_of_all_of_them():
    """Those of rank 0 count for the learner: with its own batches alone, the weight would be a quarter."""
    each = data_parallel.ROWS
    expected = {"tokens": [2 * each] * data_parallel.STEPS, "everyRank": True, "ranks": 2}
    found = data_parallel.learners_of("lightning", 2)
    assert [{key: seen[key] for key in expected} for seen in found] == [expected] * 2
