"""
`attach`: adds a training loop that one does not own to a job.

    with attach(model, optimizer, tokens=n_tokens):
        their_fit(model, optimizer)

Each step of the optimizer is a step of the learner, counted by a hook of torch after it. Micro-batches of gradient
accumulation and steps that a GradScaler skips do not call the optimizer, so they are not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import EXIT_REFUSED, ConfigError
from diloco_worker import settings
from diloco_worker.learner import Learner
from diloco_worker.trainer.termination import exit_with
from diloco_worker.trainer.wrappers import optimizers_of

log = logging.getLogger(__name__)

Loss = float | torch.Tensor | None


class StopTraining(BaseException):
    """
    Raised by the optimizer's step inside of `with attach(...)` when the loop is to end.

    Not an Exception: a loop might catch those to continue with its next batch.
    """


class AttachedLearner(Learner):
    """
    A learner whose steps are counted by its optimizer; do not call `step` yourself.

    Args:
        learner: connected.
        optimizer: each of its steps counts.
        tokens: see `attach`.
        loss: see `attach`.
    """

    def __init__(
        self, learner: Learner, optimizer: Optimizer, *, tokens: int | Callable[[], int],
        loss: Callable[[], Loss] | None,
    ) -> None:  # fmt: skip
        super().__init__(learner._trainer, identity=learner.identity, optimizers=learner._unchecked)
        self._tokens, self._loss = tokens, loss
        self._raises = self._warned = self._left = False
        optimizer.register_step_post_hook(self._stepped)

    def __enter__(self) -> AttachedLearner:
        """Return this learner, for `with`: the block ends when the learner is done."""
        self._raises = True
        return self

    def __exit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        """Leave the job; suppress StopTraining."""
        self._raises = False
        super().__exit__(kind, error, trace)
        return isinstance(error, StopTraining)

    def end_training(self) -> None:
        """
        Leave the job, because the trainer of another library has ended training.

        A job that is not complete is logged: the learner restarts, and the same would end it again.
        """
        if settings.in_job() and not self.done:
            log.warning(
                "%s leaves the job at global step %d of %s: something else than the job ended training; "
                "remove it (an early stopping, for example), or the learner restarts",
                self.name, self.step_index, self.total_steps,
            )  # fmt: skip
        self.close()

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        if _skipped(optimizer):
            return
        left = self._left
        if not left:
            tokens = self._tokens() if callable(self._tokens) else self._tokens
            self.step(tokens=tokens, loss=None if self._loss is None else self._loss())
        self._left = self.done
        if self._left and self._raises:
            raise StopTraining
        if left and not self._warned:
            self._warned = True
            log.warning(
                "%s has left the job, and the loop continues; end it when learner.done is true, or run "
                "it inside of `with attach(...)`",
                self.name,
            )


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    tokens: int | Callable[[], int],
    loss: Callable[[], Loss] | None = None,
    standalone_steps: int | None = None,
    connect_timeout_seconds: float = 600,
    every_rank: bool | None = None,
) -> AttachedLearner:
    """
    Join the job, and count every step of the optimizer from now on.

    Two ways to end: a loop that you can change ends when `learner.done` is true. For any other, run
    it inside of `with attach(...)`: at the end of the job, or after SIGTERM, the optimizer's step
    raises StopTraining, which ends the block without an error.

    Args:
        model: as for `Learner.connect`. DistributedDataParallel and torch.compile are unwrapped.
        optimizer: one or several, also as Accelerate and Lightning wrap them. Of several, each step
            of the last one counts, so name last the one that steps once per round.
        tokens: of each step of the whole learner; or a function that returns those since its last call.
        loss: a function that returns the newest loss, for logs and metrics.
        standalone_steps: as for `Learner.connect`.
        connect_timeout_seconds: as for `Learner.connect`.
        every_rank: as for `Learner.connect`.

    Raises:
        SystemExit: as for `Learner.connect`.
        TypeError: an argument cannot be used.
    """
    optimizers = optimizers_of(optimizer)
    if not optimizers:
        raise TypeError("attach: optimizer is [], expected one torch.optim.Optimizer or several")
    if isinstance(tokens, bool) or not (isinstance(tokens, int) or callable(tokens)):
        raise TypeError(
            f"attach: tokens is {tokens!r}, expected the number of tokens in each step, or a function "
            "that returns it"
        )
    learner = Learner.connect(
        model,
        optimizers,
        standalone_steps=standalone_steps,
        connect_timeout_seconds=connect_timeout_seconds,
        every_rank=every_rank,
    )
    return AttachedLearner(learner, optimizers[-1], tokens=tokens, loss=loss)


def every_rank_of(processes: int) -> bool | None:
    """`every_rank` of a trainer that attaches in each of so many processes."""
    return True if processes > 1 else None


def planned_steps() -> int:
    """
    T as the spec has it, before there is a connection; the syncer may know a larger one.

    Raises:
        SystemExit: 78 if this process is not part of a job, or the spec cannot be used.
    """
    try:
        config = settings.from_env()
        if config is None:
            raise ConfigError("DILOCO_SYNCER: unset, expected <host>:<port>")
        return config.read_spec().steps
    except ConfigError as error:
        raise exit_with(EXIT_REFUSED, str(error)) from None


def _skipped(optimizer: Optimizer) -> bool:
    """
    Whether a GradScaler let a fused optimizer skip this step, which then decides it by itself.

    On a GPU the answer is not waited for: there a skipped step of a fused optimizer counts.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and found.device.type == "cpu" and bool(found)
