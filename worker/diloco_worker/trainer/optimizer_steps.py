"""
What the optimizers report of their steps: how many there were, to compare them with the calls of `learner.step()`, the
learning rate, and whether the parameters have the element types that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer


class OptimizerSteps:
    """
    The steps that the optimizers report by their hooks; loops without hooks report none.

    Args:
        optimizers: of the model.
        other_type: called before the step of an optimizer with a parameter that has another element type than now,
            and with that one. The step would end in an error of torch, or change the type of what is merged.
        before: called before each step of any of them.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], other_type: Callable[[torch.Tensor, torch.dtype], object] | None = None,
        *, before: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
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
            if before is not None:
                optimizer.register_step_pre_hook(before)
            if other_type is not None:
                optimizer.register_step_pre_hook(_Types(optimizer, other_type))

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


class _Types:
    """Compares the element types of an optimizer's parameters with those that they had: some 50 ns for each."""

    def __init__(
        self, optimizer: Optimizer, other_type: Callable[[torch.Tensor, torch.dtype], object]
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._had, self._other_type = [(p, p.dtype) for p in parameters], other_type

    def __call__(self, *_: object) -> None:
        for parameter, dtype in self._had:
            if parameter.dtype is not dtype:
                self._other_type(parameter, dtype)


def _number(rate: object) -> float | None:
    if isinstance(rate, torch.Tensor) and rate.device.type == "cpu" and rate.numel() == 1:
        return float(rate)
    return float(rate) if isinstance(rate, int | float) else None
