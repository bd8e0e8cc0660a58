"""
`Learner`: puts an ordinary torch loop into a DiLoCo job.

    learner = Learner.connect(model, optimizer)
    while not learner.done:
        loss = train_one_step(model, optimizer, learner.step_index)
        learner.step(tokens=n_tokens, loss=loss)

This process never touches the network: `step` counts, copies a few fragments to and from shared
memory and sends one message that nobody waits for. Everything else happens in the link process
(link.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import EXIT_REFUSED, ConfigError, DilocoError
from diloco.spec import RunSpec
from diloco_worker import settings
from diloco_worker.core.ledger import Ledger


class Learner:
    """
    One learner; as it stands here, one that is alone (no DILOCO_SYNCER): it counts and takes no
    part in anything.

    Use `Learner.connect`, in the main thread and after the model is on its device.
    """

    def __init__(self, *, standalone_steps: int | None = None) -> None:
        self._standalone_steps = standalone_steps
        self._ledger = Ledger(0)
        self._closed = False

    @staticmethod
    def connect(
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        standalone_steps: int | None = None,
        connect_timeout_seconds: float = 600,
    ) -> Learner:
        """
        Join the job that the environment names, and return when the model holds what the job says.

        Of the processes of one learner (RANK, WORLD_SIZE) rank 0 connects; the others take its
        parameters after each `step`, for example by torch.distributed.broadcast.

        Args:
            model: parameters are overwritten in place, now and during training; move it to its
                device before.
            optimizer: one or several; only used for local checkpoints.
            standalone_steps: without a job, `done` after so many steps; None: never.
            connect_timeout_seconds: how long to wait for a syncer that does not answer.

        Raises:
            SystemExit: 78 when the job refused this model, spec or name for good, or this is not
                rank 0; 75 when the syncer did not come in time or this process was replaced; one
                sentence on standard error says why.
        """
        from diloco_worker.joined import JoinedLearner

        try:
            config = settings.from_env()
            if config is None:
                return Learner(standalone_steps=standalone_steps)
            _refuse_other_ranks(config)
            optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
            return JoinedLearner(
                config, model, optimizers, connect_timeout_seconds=connect_timeout_seconds
            )
        except DilocoError as error:
            raise exit_with(EXIT_REFUSED, str(error)) from None

    # ------------------------------------------------------------ facts

    @property
    def done(self) -> bool:
        """The job is complete, or this process was told to stop: leave the loop."""
        return self._closed or (
            self._standalone_steps is not None and self._ledger.local_step >= self._standalone_steps
        )

    @property
    def step_index(self) -> int:
        """Global step t, for the learning-rate schedule; alone: the local step."""
        return self._ledger.local_step

    @property
    def total_steps(self) -> int | None:
        """
        T as the syncer last said it (it may be raised while the job runs); alone:
        `standalone_steps`.
        """
        return self._standalone_steps

    @property
    def local_step(self) -> int:
        """t_m: steps this learner has made over all its lives, so the position in its data."""
        return self._ledger.local_step

    @property
    def name(self) -> str:
        """ "<region>/<index>"; alone: "alone/0"."""
        return "alone/0"

    @property
    def index(self) -> int:
        """
        A number that no other learner of the job has: index in the region × number of regions +
        place of the region.

        Stays the same while learners are added or removed; only another set of regions changes it.
        Alone: 0.
        """
        return 0

    @property
    def spec(self) -> RunSpec | None:
        """What all processes of the job share; alone: None."""
        return None

    @property
    def config(self) -> dict[str, Any]:
        """DILOCO_CONFIG; alone: empty."""
        return {}

    # ------------------------------------------------------------ training

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        """
        Call once after each optimizer step.

        Args:
            tokens: how many the step trained on; weighs this learner in a merge.
            loss: for the records; a tensor on another device is read one step later, so that
                nothing waits for it.
        """
        self._ledger.count(tokens)

    def close(self) -> None:
        """Leave the job; `done` from now on. Happens by itself when `done` turns true."""
        self._closed = True

    def __enter__(self) -> Learner:
        """Nothing; for `with`."""
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the job."""
        self.close()


def _refuse_other_ranks(config: settings.LearnerSettings) -> None:
    # Each would replace the one before: to the syncer they are one learner.
    if config.rank > 0:
        raise ConfigError(
            f"RANK: {config.rank}, expected 0: of the {config.world_size} processes of learner "
            f"{config.learner} only rank 0 connects; the others take its parameters, for example "
            "by torch.distributed.broadcast after its learner.step()"
        )


def exit_with(code: int, sentence: str) -> SystemExit:
    """Print the sentence to standard error; raise the result to end the process with `code`."""
    print(f"diloco: {sentence}", file=sys.stderr, flush=True)
    return SystemExit(code)
