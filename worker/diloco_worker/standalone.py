"""A trainer without a job: it counts steps, so a training script also runs by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diloco.spec import RunSpec
from diloco_worker.core.ledger import Ledger
from diloco_worker.core.open_blocks import Data
from diloco_worker.trainer.kept import AFTER_A_STEP, Kept
from diloco_worker.trainer.loss import LossReader


class StandaloneTrainer:
    """
    Implements `Learner` where DILOCO_SYNCER is not set.

    Args:
        steps: `done` after this many steps; None: never.
    """

    def __init__(self, *, steps: int | None) -> None:
        self.name, self.index = "alone/0", 0
        self.spec: RunSpec | None = None
        self.config: dict[str, Any] = {}
        self.total_steps = steps
        self.resumed = False
        self._ledger, self._loss = Ledger(0), LossReader()
        self._kept = Kept()
        self._blocks = 0
        """How many were taken."""
        self.closed = False

    @property
    def done(self) -> bool:
        """See `Learner.done`."""
        return self.closed or (
            self.total_steps is not None and self._ledger.local_step >= self.total_steps
        )

    @property
    def step_index(self) -> int:
        """See `Learner.step_index`."""
        return self._ledger.local_step

    @property
    def local_step(self) -> int:
        """See `Learner.local_step`."""
        return self._ledger.local_step

    def keep(self, objects: Mapping[str, Any]) -> None:
        """See `Learner.keep`: there are no checkpoints, but what a job refuses is refused here, too."""
        if self._ledger.local_step:
            raise ValueError(AFTER_A_STEP)
        self._kept.add(objects)

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        """See `Learner.step`."""
        self._loss.read(loss)  # refused here as in a job
        self._ledger.count(tokens)

    def take_block(self, data: Data) -> int | None:
        """See `Learner.blocks`: this learner has all of them."""
        if self.done:
            return None
        self._blocks += 1
        return self._blocks - 1

    def close(self, error: BaseException | None = None) -> None:
        """See `Learner.close`."""
        self.closed = True
