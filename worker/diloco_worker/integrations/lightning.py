"""
`DiLoCoCallback` for the Trainer of Lightning (the package `lightning`, or `pytorch_lightning`).

    trainer = Trainer(callbacks=[DiLoCoCallback(tokens=lambda batch: batch[0].numel())])
    trainer.fit(module, loader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diloco_worker import settings
from diloco_worker.attachment import AttachedLearner, attach, every_rank_of, planned_steps
from diloco_worker.integrations.rates import Rates, depends_on_steps
from diloco_worker.trainer.learning_rate import refuse_second

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise ImportError(
            "diloco_worker.integrations.lightning needs Lightning, which diloco does not install: "
            f"pip install lightning ({error})"
        ) from error


class DiLoCoCallback(Callback):  # type: ignore[misc]
    """
    Makes a Trainer a learner of a job.

    In a job, the syncer decides when training ends, not `max_steps`, `max_epochs` and their minima.
    Schedulers with `interval: step` follow the global step, those with `interval: epoch` the epochs
    of this process. Without a job, nothing changes.

    Args:
        tokens: of each optimizer step of all processes, or a function that returns those of a batch of
            one process.
        connect_timeout_seconds: as for `Learner.connect`.
    """

    def __init__(
        self, *, tokens: int | Callable[[Any], int], connect_timeout_seconds: float = 600,
    ) -> None:  # fmt: skip
        self.learner: AttachedLearner | None = None
        """From the beginning of training on."""
        self._tokens = tokens
        self._timeout_seconds = connect_timeout_seconds
        self._in_job = settings.in_job()
        self._rates: list[tuple[Rates, int]] = []
        """With the steps from one change of the rates to the next."""
        self._counted = 0
        """Tokens of the batches since the last optimizer step."""
        self._steps = 0
        """Of the Trainer, with those that a GradScaler skipped, at the beginning of the last batch."""
        self._loss: Any = None

    # ------------------------------------------------------------ hooks of Lightning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the job's steps be the Trainer's limit, for schedules that are computed from it."""
        if stage == "fit" and self._in_job:
            loop = trainer.fit_loop
            # An epoch has at least one step, so epochs end nothing earlier.
            loop.max_epochs = loop.epoch_loop.max_steps = planned_steps()
            loop.min_epochs = loop.epoch_loop.min_steps = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The module has its schedules: remove the limit before the Trainer's loop reads it."""
        if self._in_job:
            trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the job."""
        self.learner = attach(
            pl_module,
            trainer.optimizers,
            tokens=self._take if callable(self._tokens) else self._tokens,
            loss=lambda: self._loss,
            connect_timeout_seconds=self._timeout_seconds,
            every_rank=every_rank_of(trainer.world_size),
        )
        if self._in_job:
            followed = [
                config
                for config in trainer.lr_scheduler_configs
                if config.interval == "step" and depends_on_steps(config.scheduler)
            ]
            for number, config in enumerate(followed):
                refuse_second(config.scheduler, [other.scheduler for other in followed[:number]])
            self._rates = [(Rates(config.scheduler), config.frequency) for config in followed]
            trainer.should_stop = trainer.should_stop or self.learner.done

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and follow the global step."""
        if pl_module.automatic_optimization and trainer.global_step != self._steps:
            self._counted = 0  # not taken if the step was skipped
        self._steps = trainer.global_step
        if callable(self._tokens):
            self._counted += self._tokens(batch) * trainer.world_size
        if self.learner is not None:
            for rates, frequency in self._rates:
                rates.follow(self.learner.step_index // frequency)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop when the learner is done."""
        if isinstance(outputs, Mapping) and "loss" in outputs:
            # Known after the step, so it is the next one that reports it.
            self._loss = outputs["loss"].detach() * trainer.accumulate_grad_batches
        if self._in_job and self.learner is not None and self.learner.done:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the job."""
        if self.learner is not None:
            self.learner.end_training()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the job if Lightning ends training at SIGTERM, in a validation for example."""
        if self.learner is not None and trainer.received_sigterm and self.learner.done:
            self.learner.close()

    # ------------------------------------------------------------ parts

    def _take(self) -> int:
        counted, self._counted = self._counted, 0
        return counted
