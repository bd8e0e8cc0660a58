"""
Learning rates at the job's global step, where a trainer steps a scheduler that cannot be replaced.

A trainer steps its scheduler once for each step of its own, from 0 after each start: a learner that rejoins would warm
up again. Here a copy of it follows the global step, as `learner.scheduler` does, and its options replace those of the
optimizer before each step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diloco_worker.trainer.learning_rate import GlobalStepScheduler, copy_of, follow


class Rates:
    """
    Sets the options of an optimizer to those of a schedule at a global step: learning rates, and what else it changes.

    Args:
        scheduler: of the optimizer, before its first step. It may be stepped: a copy gives the
            rates. That works for every scheduler whose rates depend on nothing but the number of
            steps (`depends_on_steps`).
        build: None: the copy is of `scheduler`. Otherwise, this makes the schedule of another one,
            from a stand-in for the optimizer.
    """

    def __init__(
        self, scheduler: LRScheduler, build: Callable[[Optimizer], LRScheduler] | None = None
    ) -> None:
        self._scheduler, self._step = scheduler, 0
        follow(scheduler)
        self._stand_in = _StandIn(scheduler.optimizer)
        made = (
            copy_of(scheduler, scheduler, self._stand_in)
            if build is None
            else build(self._stand_in)
        )
        self._last = int(getattr(scheduler, "last_epoch", 0))
        """The last step that the trainer's own scheduler may be at."""
        self._copy = GlobalStepScheduler(made, lambda: self._step)
        self._options = {"lr"}
        """What the schedule has changed."""

    def follow(self, step: int) -> None:
        """Set the options to those at global step `step`; after its last step, a schedule keeps its last ones."""
        self._step = step
        self._copy.step()
        self._options |= self._copy.changed_options()
        pairs = zip(
            self._scheduler.optimizer.param_groups, self._stand_in.param_groups, strict=True
        )
        for group, stand_in in pairs:
            for key in self._options & group.keys():
                if isinstance(group[key], torch.Tensor):
                    group[key].fill_(float(stand_in[key]))
                else:
                    group[key] = _plain(stand_in[key])
        # What trainers log.
        self._scheduler._last_lr = [_plain(group["lr"]) for group in self._stand_in.param_groups]
        if hasattr(self._scheduler, "last_epoch"):
            # The trainer steps it, too, and must not take one with an end beyond that.
            self._scheduler.last_epoch = min(
                self._scheduler.last_epoch, max(self._copy.count - 1, self._last)
            )


def depends_on_steps(scheduler: object) -> bool:
    """Whether it is a scheduler that steps alone decide, and no metric."""
    return isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)


class _StandIn(Optimizer):
    """The parameter groups of an optimizer without its parameters."""

    _opt_called = True
    """As if it had been stepped: schedulers warn otherwise."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            values = {name: value for name, value in group.items() if name != "params"}
            groups.append({**copy.deepcopy(values), "params": [nn.Parameter(torch.empty(0))]})
        super().__init__(groups, copy.deepcopy(optimizer.defaults))  # some schedules read them

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing has a gradient."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _plain(value: Any) -> Any:
    """A rate as a number, also of one that the optimizer has as a tensor."""
    return float(value) if isinstance(value, torch.Tensor) else value
