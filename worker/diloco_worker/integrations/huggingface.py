"""
`DiLoCoCallback` for the Trainer of transformers, and for the trainers of TRL, which are subclasses of it.

    trainer = Trainer(model, args, train_dataset=identity().shard(data), callbacks=[DiLoCoCallback()])
    trainer.train()
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import ConfigError
from diloco_worker import settings
from diloco_worker.attachment import AttachedLearner, attach, every_rank_of, planned_steps
from diloco_worker.integrations.rates import Rates, depends_on_steps

try:
    from accelerate.utils import gather_object
    from transformers import TrainerCallback, TrainingArguments, get_scheduler
except ImportError as error:
    raise ImportError(
        "diloco_worker.integrations.huggingface needs transformers and accelerate, which diloco does "
        f"not install: pip install 'transformers[torch]' ({error})"
    ) from error

log = logging.getLogger(__name__)

DEFAULT_SEED = next(f.default for f in dataclasses.fields(TrainingArguments) if f.name == "seed")

NO_LIMIT = 10**9
"""Steps that progress bars show as the end of a job without one."""

LEAST_LIMIT = 10**6
"""
Steps from which the Trainer computes its epochs.

A dataset without a length has one epoch of so many: Trainer counts on to it when the dataset ends
earlier, which takes a second or two for each million.
"""

MOST_SEEDS = 8
"""Named in a line about them."""


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]
    """
    Makes a Trainer a learner of a job. Give it to the Trainer when that is created.

    In a job, the syncer decides when training ends, not `max_steps` or `num_train_epochs`. The
    schedule of `lr_scheduler_type` is that of the global step over the job's steps; of a scheduler
    that was given to the Trainer, the rates are those at the global step. What counts steps in the
    Trainer (logging, evaluation, saving, epochs) counts those of this process. Without a job,
    nothing changes.

    Args:
        tokens: of each optimizer step of all processes, or a function that returns those since its
            last call; None: the elements of `input_ids` in all forward passes of the step, or else the
            rows of the batch, times the number of processes.
        connect_timeout_seconds: as for `Learner.connect`.
    """

    def __init__(
        self, *, tokens: int | Callable[[], int] | None = None, connect_timeout_seconds: float = 600,
    ) -> None:  # fmt: skip
        self.learner: AttachedLearner | None = None
        """From the beginning of training on."""
        self._tokens = tokens
        self._timeout_seconds = connect_timeout_seconds
        self._processes = 1
        """Of the Trainer: each has a batch of its own."""
        self._in_job = settings.in_job()
        self._created = self._own_scheduler = False
        self._rates: Rates | None = None
        self._rates_steps: int | None = None
        """T for which `_rates` was made."""
        self._counted = 0
        """Tokens of the forward passes since the last optimizer step."""
        self._loss: float | None = None

    # ------------------------------------------------------------ events of the Trainer

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer is created: remove its own limit, from which it computes the epochs."""
        self._created = True
        self._own_scheduler = kwargs.get("lr_scheduler") is not None
        if self._in_job:
            if args.auto_find_batch_size:
                raise ConfigError(
                    "auto_find_batch_size=True trains several times in one process, and a learner "
                    "joins once; expected False, with a fixed per_device_train_batch_size"
                )
            if args.data_seed is None and args.seed == DEFAULT_SEED and args.process_index == 0:
                log.warning(
                    "seed is %d, its default, and data_seed is not set: after each restart, the Trainer reads the data "
                    "in the same order from the beginning; set data_seed=identity().seed(), or the same other number "
                    "in all processes of a Trainer of several",
                    DEFAULT_SEED,
                )
            # A fast learner makes more steps than the job.
            args.max_steps = max(LEAST_LIMIT, 4 * planned_steps())

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Optimizer,
        lr_scheduler: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Join the job."""
        if self._in_job and not self._created:
            raise ConfigError(
                "DiLoCoCallback was added to a Trainer that exists already, expected "
                "Trainer(..., callbacks=[DiLoCoCallback()])"
            )
        self._processes = args.world_size
        tokens = self._tokens
        if tokens is None:
            model.register_forward_pre_hook(self._count, with_kwargs=True)
            tokens = self._take
        self.learner = attach(
            model,
            optimizer,
            tokens=tokens,
            loss=self._newest_loss,
            connect_timeout_seconds=self._timeout_seconds,
            every_rank=every_rank_of(self._processes),
        )
        if self._in_job:
            self._scheduler = getattr(
                lr_scheduler, "scheduler", lr_scheduler
            )  # Accelerate's wrapper
            self._compare_seeds(args)
            # Intervals that are given as a fraction of all steps.
            state.compute_steps(args, self.learner.total_steps)
            self._prepare_step(self.learner, args, state)
            control.should_training_stop = self.learner.done
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins, perhaps of several micro-batches."""
        self._counted = 0
        if self._in_job and self.learner is not None:
            self._prepare_step(self.learner, args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Stop when the learner is done."""
        if self._in_job and self.learner is not None and self.learner.done:
            control.should_training_stop = True
        return control

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember the loss: the mean of the steps since the Trainer logged before."""
        loss = (logs or {}).get("loss")
        try:
            self._loss = self._loss if loss is None else float(loss)
        except ValueError:  # some versions log text
            self._loss = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the job."""
        if self.learner is not None:
            self.learner.end_training()

    # ------------------------------------------------------------ parts

    def _compare_seeds(self, args: Any) -> None:
        """Processes that shuffle differently read some items several times, and others not at all."""
        seeds = gather_object([args.seed if args.data_seed is None else args.data_seed])
        if len({*seeds}) > 1 and args.process_index == 0:
            log.warning(
                "the processes have %d seeds for the order of the data (%s), so that they read some items several "
                "times and others not at all; set data_seed to the same number in all, such as identity().local_step",
                len({*seeds}), ", ".join(map(str, seeds[:MOST_SEEDS])),
            )  # fmt: skip

    def _prepare_step(self, learner: AttachedLearner, args: Any, state: Any) -> None:
        """Follow the global step: the learning rate, and what progress bars show as the end."""
        step, steps = learner.step_index, learner.total_steps or NO_LIMIT
        # Trainer stops at it, and this learner may make more steps than the job.
        state.max_steps = state.global_step + max(2, steps - step)
        if not depends_on_steps(self._scheduler):
            return
        if self._rates is None or self._rates_steps not in (steps, None):
            self._rates = self._rates_over(args, steps)
        self._rates.follow(step)

    def _rates_over(self, args: Any, steps: int) -> Rates:
        if self._own_scheduler:
            return Rates(self._scheduler)
        self._rates_steps = steps
        return Rates(
            self._scheduler,
            lambda optimizer: get_scheduler(
                args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=args.get_warmup_steps(steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,
            ),
        )

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training:
            self._counted += tokens_of(kwargs or (args[0] if args else None))

    def _newest_loss(self) -> float | None:
        loss = self._loss
        if loss is not None and not math.isfinite(loss):
            self._loss = None  # one logged mean, not one for each step until the next
        return loss

    def _take(self) -> int:
        counted, self._counted = self._counted, 0
        return counted * self._processes


def tokens_of(inputs: Any) -> int:
    """
    The elements of `input_ids`, or else the rows of the first tensor.

    Raises:
        TypeError: there is no tensor.
    """
    values = dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}
    if isinstance(ids := values.get("input_ids"), torch.Tensor):
        return ids.numel()
    for value in values.values():
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    raise TypeError(
        f"the model's inputs {sorted(values)} have no tensor to count; pass DiLoCoCallback(tokens=...)"
    )
