"""
Learning rates at the job's global step.

A trainer steps its scheduler once for each step of its own, from 0 after each start: a learner that rejoins would warm
up again. Here the scheduler is stepped to the global step instead, which restarts do not change.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

log = logging.getLogger(__name__)


class Rates:
    """
    Sets the learning rates of an optimizer to those of a schedule at a global step.

    Args:
        scheduler: of the optimizer, before its first step. It may be stepped: a copy gives the
            rates. That works for every scheduler whose rates depend on nothing but the number of
            steps.
        build: None: the copy is of `scheduler`. Otherwise, this makes the schedule of another one,
            from a stand-in for the optimizer.
    """

    def __init__(
        self, scheduler: LRScheduler, build: Callable[[Optimizer], LRScheduler] | None = None
    ) -> None:
        self._scheduler = scheduler
        stand_in = _StandIn(scheduler.optimizer)
        if build is None:
            self._first = _copy(scheduler, stand_in)
            self._begin = int(getattr(scheduler, "last_epoch", 0))
        else:
            self._first, self._begin = build(stand_in), 0
        self._warned = False
        self._rewind()

    def follow(self, step: int) -> None:
        """Set the rates to those at global step `step`; after its last step, a schedule keeps its last rates."""
        if step < self._step:
            self._rewind()
        while self._step < step and not self._ended:
            self._advance()
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
        if hasattr(self._scheduler, "last_epoch"):
            # The trainer steps it, too, and must not take one with an end beyond that.
            behind = max(self._step - 1, self._begin)
            self._scheduler.last_epoch = min(self._scheduler.last_epoch, behind)

    def _advance(self) -> None:
        try:
            self._copy.step()
        except ValueError as error:  # OneCycleLR, when the job became longer
            self._ended = True
            if not self._warned:
                self._warned = True
                log.warning(
                    "the learning rate stays as of step %d, because %s ends there: %s",
                    self._step, type(self._scheduler).__name__, error,
                )  # fmt: skip
            return
        self._step += 1

    def _rewind(self) -> None:
        """Begin again, as after a syncer returned to an older snapshot."""
        self._stand_in = _StandIn(self._first.optimizer)
        self._copy = _copy(self._first, self._stand_in)
        self._step, self._ended = self._begin, False


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


def _copy(scheduler: LRScheduler, stand_in: Optimizer) -> LRScheduler:
    """A copy that shares modules with the scheduler, and has this optimizer."""
    # Nested schedulers share the optimizer, which must not be copied with the model.
    memo: dict[int, Any] = {id(scheduler.optimizer): stand_in}
    memo.update((id(owner), owner) for owner in _owners(list(vars(scheduler).values())))
    return copy.deepcopy(scheduler, memo)


def _owners(value: Any) -> Iterator[Any]:
    """Modules, and what the methods belong to that a schedule is computed by: they may have the model."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, MethodType):
        if not isinstance(value.__self__, LRScheduler | Optimizer):
            yield value.__self__
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _owners(item)
    elif isinstance(value, functools.partial):
        yield from _owners([value.func, *value.args, *value.keywords.values()])
    elif isinstance(value, LRScheduler):
        yield from _owners([item for item in vars(value).values() if item is not value])
