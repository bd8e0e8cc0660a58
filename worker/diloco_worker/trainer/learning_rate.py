"""
A torch learning-rate scheduler that follows the global step.

torch's schedulers count their own calls: after a restart they begin again, and in a learner that joins later they
start late. Here the scheduler is stepped until its count is the global step. Schedulers that a trainer of another
library holds are followed by the same means, in a copy (`integrations.rates`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diloco.errors import ConfigError

log = logging.getLogger(__name__)

MAX_STEPS = 10_000_000
"""More than these in one go would take minutes."""

CHANGED = ("lr", "momentum", "betas")
"""Options of a group that schedulers change as they step."""

_followed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Those with a schedule that follows the global step."""


def follow(scheduler: LRScheduler) -> None:
    """The rates of this scheduler's optimizer follow the global step."""
    _followed.add(scheduler.optimizer)


def starting_over(optimizers: Iterable[Optimizer]) -> list[str]:
    """
    Types of the schedulers of these optimizers that have made at most one step and do not follow the global step.

    An optimizer does not know its schedulers, so this looks through all objects of the process: call it once.
    """
    scheduled = {
        id(optimizer)
        for optimizer in optimizers
        if optimizer not in _followed and any("initial_lr" in g for g in optimizer.param_groups)
    }
    if not scheduled:
        return []
    found = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler) and not isinstance(each, ReduceLROnPlateau)
        and id(getattr(each, "optimizer", None)) in scheduled
    ]  # fmt: skip
    # Of several, such as those of a SequentialLR, some may not have begun.
    continues = {id(each.optimizer) for each in found if _count(each) > 1}
    return sorted({type(each).__name__ for each in found if id(each.optimizer) not in continues})


class GlobalStepScheduler:
    """
    Keeps a scheduler at the global step. Its `step` may be called at any time, or never.

    Args:
        scheduler: its count and the optimizer's learning rates belong together now.
        global_step: returns it.

    Raises:
        TypeError: not a scheduler of torch, or one that does not depend on a step.
        ConfigError: the global step is too far ahead.
    """

    def __init__(self, scheduler: LRScheduler, global_step: Callable[[], int]) -> None:
        _check(scheduler)
        follow(scheduler)
        self.scheduler = scheduler
        """What is wrapped."""
        self._global_step = global_step
        self._begin = self.count = _count(scheduler)
        """The step that the scheduler is at."""
        self._ended = self._warned = False
        """Whether the schedule has no further steps, and whether this was logged."""
        self._begin_state = copy_of(scheduler.state_dict(), scheduler)
        self._begin_options = [
            {key: _copy(group[key]) for key in CHANGED if key in group}
            for group in scheduler.optimizer.param_groups
        ]
        self.step()

    def step(self, *_: object) -> None:
        """Let the scheduler's count be the global step; arguments are ignored."""
        target = self._global_step()
        if target < self.count:
            self._rewind()
        missing = target - self.count
        if missing <= 0 or self._ended:
            return
        if missing > MAX_STEPS:
            raise ConfigError(
                f"learner.scheduler: the global step is {target}, and {type(self.scheduler).__name__} is at "
                f"{self.count}; expected at most {MAX_STEPS} steps between them: set the learning rate from "
                "learner.step_index instead"
            )
        with contextlib.ExitStack() as stack:
            if self.count == self._begin:
                # It has not seen the optimizer's steps of other learners and earlier processes.
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            try:
                while self.count < target:
                    self.scheduler.step()
                    self.count += 1
            except ValueError as error:  # OneCycleLR, after its `total_steps`
                self._end(error)

    def _end(self, error: ValueError) -> None:
        """The schedule ends before the job, whose T may have been raised: its last rate remains."""
        self._ended = True
        if not self._warned:
            self._warned = True
            log.warning(
                "the learning rate stays as of step %d, because %s ends there: %s; make the schedule for all of "
                "the job's steps, and restart the learner after T was raised",
                self.count, type(self.scheduler).__name__, error,
            )  # fmt: skip

    def _rewind(self) -> None:
        """A syncer has returned to an older snapshot: begin again."""
        self.scheduler.load_state_dict(copy_of(self._begin_state, self.scheduler))
        for group, options in zip(
            self.scheduler.optimizer.param_groups, self._begin_options, strict=True
        ):
            for key, value in options.items():
                if isinstance(group[key], torch.Tensor):  # compiled and captured steps hold it
                    group[key].fill_(value)
                else:
                    group[key] = value
        self.count, self._ended = self._begin, False

    def changed_options(self) -> set[str]:
        """Which of CHANGED differ from what they were at the beginning, in any group."""
        groups = self.scheduler.optimizer.param_groups
        return {
            key
            for group, options in zip(groups, self._begin_options, strict=True)
            for key, value in options.items()
            if group[key] != value
        }

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the global step is all of the state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: the global step is all of the state."""


def refuse_second(scheduler: object, others: Iterable[LRScheduler]) -> None:
    """
    Refuse a scheduler of an optimizer that has one: the rates of both depend on the order of their steps.

    Raises:
        ConfigError: one of `others` has the same optimizer.
    """
    optimizer = getattr(scheduler, "optimizer", None)
    for other in others:
        if optimizer is other.optimizer:
            raise ConfigError(
                f"{type(other).__name__} and {type(scheduler).__name__} have the same optimizer, expected one "
                "scheduler of each optimizer: at another global step, each would begin with the rates of the other; "
                "combine them by torch.optim.lr_scheduler.ChainedScheduler or SequentialLR"
            )


def _check(scheduler: object) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "learner.scheduler: ReduceLROnPlateau follows a metric of one learner, not the step, so learners "
            "would differ and a restart would begin again; use a schedule of the global step"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"learner.scheduler: got a {type(scheduler).__name__}, expected a scheduler of "
            "torch.optim.lr_scheduler; of a wrapper, pass what it wraps"
        )
    for inner in getattr(scheduler, "_schedulers", ()):
        _check(inner)


def _count(scheduler: LRScheduler) -> int:
    """The steps that the scheduler has made; a chain has no count of its own."""
    count = getattr(scheduler, "last_epoch", None)
    if count is None:
        count = max(_count(inner) for inner in getattr(scheduler, "_schedulers", ()))
    return int(count)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def copy_of(value: Any, scheduler: LRScheduler, optimizer: Optimizer | None = None) -> Any:
    """
    A deep copy of a scheduler, or of a part of it, that shares models with it, and what cannot be copied.

    Args:
        value: what to copy.
        scheduler: that it is of.
        optimizer: of the copy; None: the same.
    """
    own = scheduler.optimizer
    # Nested schedulers share the optimizer, which must not be copied with the model.
    memo: dict[int, Any] = {id(own): own if optimizer is None else optimizer}
    memo.update((id(owner), owner) for owner in _owners(list(vars(scheduler).values())))
    memo.update((id(part), part) for part in [*_not_copied([value, scheduler], memo)])
    return copy.deepcopy(value, memo)


def _not_copied(value: Any, memo: Mapping[int, Any]) -> Iterator[Any]:
    """What a schedule is computed by and cannot be copied, such as a lock or the learner."""
    if id(value) in memo:
        return
    if isinstance(value, LRScheduler):
        value = vars(value)
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _not_copied(item, memo)
        return
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # of a class that may be the user's
        yield value


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
