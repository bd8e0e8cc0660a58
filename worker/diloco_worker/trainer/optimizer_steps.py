"""Counts the steps of the optimizers, to compare them with the calls of `learner.step()`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer


class OptimizerSteps:
    """The steps that the optimizers report by their hooks; loops without hooks report none."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._steps = 0
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._stepped)

    def taken(self) -> int:
        """Steps since the last call."""
        steps, self._steps = self._steps, 0
        return steps

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._steps += 1
