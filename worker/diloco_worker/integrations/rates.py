"""
Learning rates at the job's global step.

A trainer steps its scheduler once for each step of its own, from 0 after each start: a learner that rejoins would warm
up again. Here the scheduler is stepped to the global step instead, which restarts do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Rates:
    """
    Sets the learning rates of an optimizer to those of a schedule at a global step.

    Args:
        scheduler: of the optimizer, before its first step. It stays as it is, and it may be stepped:
            a copy gives the rates. That works for every scheduler whose rates depend on nothing but
            the number of steps.
        build: None: the copy is of `scheduler`. Otherwise, this makes the schedule of another one,
            from a stand-in for the optimizer.
    """

    def __init__(
        self, scheduler: LRScheduler, build: Callable[[Optimizer], LRScheduler] | None = None
    ) -> None:
        self._scheduler = scheduler
        self._stand_in = _StandIn(scheduler.optimizer)
        if build is None:
            # Nested schedulers share the optimizer, which must not be copied with the model.
            memo = {id(scheduler.optimizer): self._stand_in}
            self._copy = copy.deepcopy(scheduler, memo)
            self._step = int(getattr(scheduler, "last_epoch", 0))
        else:
            self._copy, self._step = build(self._stand_in), 0

    def follow(self, step: int) -> None:
        """Set the rates to those at global step `step`; they do not go back."""
        while self._step < step:
            self._copy.step()
            self._step += 1
        pairs = zip(
            self._scheduler.optimizer.param_groups, self._stand_in.param_groups, strict=True
        )
        for group, stand_in in pairs:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(stand_in["lr"]))
            else:
                group["lr"] = float(stand_in["lr"])
        # What trainers log.
        self._scheduler._last_lr = [group["lr"] for group in self._stand_in.param_groups]


class _StandIn(Optimizer):
    """The parameter groups of an optimizer without its parameters."""

    _opt_called = True
    """As if it had been stepped: schedulers warn otherwise."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            values = {name: value for name, value in group.items() if name != "params"}
            groups.append({**copy.deepcopy(values), "params": [nn.Parameter(torch.empty(0))]})
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing has a gradient."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
