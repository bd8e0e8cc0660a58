"""
`DiLoCoTrainer`: the Trainer of torchtitan as a learner of a job. Every rank runs it, under torchrun.

    DiLoCoTrainer(config).train()  # config: a torchtitan.trainer.Trainer.Config
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from diloco.errors import EXIT_REFUSED, ConfigError
from diloco_worker import settings
from diloco_worker.attachment import AttachedLearner, attach, every_rank_of, planned_steps
from diloco_worker.identities import Identity, identity
from diloco_worker.integrations.rates import Rates
from diloco_worker.trainer.layout import local
from diloco_worker.trainer.termination import exit_with

try:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise ImportError(
        "diloco_worker.integrations.torchtitan needs torchtitan, which diloco does not install: "
        f"pip install torchtitan ({error})"
    ) from error


log = logging.getLogger(__name__)


class DiLoCoTrainer(Trainer):  # type: ignore[misc]
    """
    Makes torchtitan's Trainer a learner of a job.

    In a job, the syncer decides when training ends, not `training.steps`. The learning rates are those of the global
    step, in a schedule over the job's steps. The data loader is given the part of this learner, and a folder of its
    own below `dump_folder` is used. What counts steps in the Trainer (logging, validation, its own checkpoints)
    counts those of this process. Without a job, nothing changes.

    Args:
        config: of the Trainer, or of a subclass of it.
        max_learners_per_region: as for `Identity.part`; needed in a cluster.
        connect_timeout_seconds: as for `Learner.connect`.

    Raises:
        SystemExit: 78 if the config cannot be used in a job.
    """

    def __init__(
        self, config: Trainer.Config, *, max_learners_per_region: int | Mapping[str, int] | None = None,
        connect_timeout_seconds: float = 600,
    ) -> None:  # fmt: skip
        self.learner: AttachedLearner | None = None
        """From the beginning of training on."""
        self._timeout_seconds = connect_timeout_seconds
        self._in_job = settings.in_job()
        self._rates: list[Rates] = []
        self._rates_steps: int | None = None
        """T for which `_rates` was made."""
        self._loss: torch.Tensor | None = None
        if self._in_job:
            try:
                config = _of_learner(config, identity(), max_learners_per_region)
            except ConfigError as problem:
                _refuse(str(problem))
        super().__init__(config)

    def train(self) -> None:
        """Train until the job is complete, or this process received SIGTERM."""
        super().train()
        if self.learner is not None:
            self.learner.end_training()

    def should_continue_training(self) -> bool:
        """Join the job after the Trainer has loaded what it begins with; in a job, end with it."""
        if self.learner is None:
            self.learner = self._joined()
        return not self.learner.done if self._in_job else bool(super().should_continue_training())

    def train_step(self, data_iterator: Any) -> None:
        """One optimizer step, at the learning rates of the global step."""
        self._loss = None
        if self._in_job and self.learner is not None:
            self._follow(self.learner)
        super().train_step(data_iterator)

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        """Remember the loss, which the Trainer divides by the tokens of all ranks."""
        loss: torch.Tensor = super().forward_backward_step(**inputs)
        with torch.no_grad():
            held = local(loss.detach())
            self._loss = held.clone() if self._loss is None else self._loss + held
        return loss

    # ------------------------------------------------------------ parts

    def _joined(self) -> AttachedLearner:
        sizes = self.config.training
        replicas = (
            self.parallel_dims.get_mesh("batch").size() if self.parallel_dims.dp_enabled else 1
        )
        rows = sizes.local_batch_size * self.gradient_accumulation_steps * replicas
        learner = attach(
            self.model_parts[0],
            list(self.optimizers),
            tokens=rows * sizes.seq_len,
            loss=self._mean_loss,
            connect_timeout_seconds=self._timeout_seconds,
            every_rank=every_rank_of(self.parallel_dims.world_size),
        )
        learner.keep(dataloader=_Loader(self.dataloader))
        return learner

    def _mean_loss(self) -> torch.Tensor | None:
        """That of this rank's data."""
        if self._loss is None:
            return None
        mesh = self.parallel_dims.get_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        return self._loss * (1 if mesh is None else mesh.size())

    def _follow(self, learner: AttachedLearner) -> None:
        steps = learner.total_steps
        if steps is not None and steps != self._rates_steps:
            config, self._rates_steps = self.config.lr_scheduler, steps
            self._rates = [
                Rates(
                    scheduler,
                    lambda o: config.build(optimizers=[o], training_steps=steps).schedulers[0],
                )
                for scheduler in self.lr_schedulers.schedulers
            ]
        for rates in self._rates:
            rates.follow(learner.step_index)


def _of_learner(
    config: Trainer.Config, own: Identity, most: int | Mapping[str, int] | None
) -> Trainer.Config:
    """
    The config of one learner.

    Raises:
        ConfigError: it cannot be used in a job.
    """
    steps, scheduled = planned_steps(), config.lr_scheduler.total_steps
    if config.parallelism.pipeline_parallel_degree > 1:
        raise ConfigError(
            f"torchtitan: parallelism.pipeline_parallel_degree is {config.parallelism.pipeline_parallel_degree}, "
            "expected 1: every rank must hold a part of every layer"
        )
    if scheduled is not None and scheduled < steps:
        raise ConfigError(
            f"torchtitan: lr_scheduler.total_steps is {scheduled}, expected None, or at least the {steps} steps of the "
            "job: the schedule follows the global step"
        )
    number, parts = own.part(max_learners_per_region=most)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, steps=steps),
        dump_folder=str(Path(config.dump_folder) / own.name.replace("/", "-")),
        dataloader=_PartLoader(whole=config.dataloader, number=number, parts=parts),
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class _PartLoader(BaseDataLoader.Config):  # type: ignore[misc]
    """Builds the data loader of a part: to torchtitan, the ranks of all learners are those of one mesh."""

    whole: BaseDataLoader.Config
    number: int
    parts: int

    def build(self, *, dp_world_size: int, dp_rank: int, **kwargs: Any) -> BaseDataLoader:
        """The loader of a rank among those of all learners; each batch is one that it may continue after."""
        return self.whole.build(
            dp_world_size=self.parts * dp_world_size,
            dp_rank=self.number * dp_world_size + dp_rank,
            **{**kwargs, "snapshot_every_n_steps": 1},
        )


class _Loader:
    """The state of torchtitan's loader in types that a local checkpoint can hold: bytes are a tensor."""

    def __init__(self, loader: BaseDataLoader) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state = self._loader.state_dict()
        return {
            name: torch.frombuffer(bytearray(value), dtype=torch.uint8)
            if isinstance(value, bytes)
            else value
            for name, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = getattr(self._loader, "dp_world_size", None)
        if parts != state.get("world_size"):
            log.warning(
                "the data loader starts over: its data has %s parts, and had %s",
                parts,
                state.get("world_size"),
            )
            return
        self._loader.load_state_dict(
            {
                name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }
        )


def _refuse(text: str) -> NoReturn:
    raise exit_with(EXIT_REFUSED, text)
