"""
What the optimizers report of their steps: how many there were, to compare them with the calls of `learner.step()`, and
the learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer


class OptimizerSteps:
    """The steps that the optimizers report by their hooks; loops without hooks report none."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.learning_rate: float | None = None
        """
        Of the last step of the first optimizer: the largest of its groups; None: not known, or on a device, which a
        step does not wait for.
        """
        self.first = 0
        """Steps of the first optimizer."""
        self._steps = 0
        for number, optimizer in enumerate(optimizers):
            optimizer.register_step_post_hook(self._stepped if number else self._first_stepped)

    def taken(self) -> int:
        """Steps since the last call."""
        steps, self._steps = self._steps, 0
        return steps

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._steps += 1

    def _first_stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._steps += 1
        self.first += 1
        rates = [_number(group.get("lr")) for group in optimizer.param_groups]
        known = [rate for rate in rates if rate is not None]
        self.learning_rate = max(known) if len(known) == len(rates) else None


def _number(rate: object) -> float | None:
    if isinstance(rate, torch.Tensor) and rate.device.type == "cpu" and rate.numel() == 1:
        return float(rate)
    return float(rate) if isinstance(rate, int | float) else None
