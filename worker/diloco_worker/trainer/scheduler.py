"""
A torch learning-rate scheduler that follows the global step.

torch's schedulers count their own calls: after a restart they begin again, and in a learner that joins later they
start late. Here the scheduler is stepped until its count is the global step.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diloco.errors import ConfigError

log = logging.getLogger(__name__)

MAX_STEPS = 10_000_000
"""More than these in one go would take minutes."""

CHANGED = ("lr", "momentum", "betas")
"""Options of a group that schedulers change as they step."""


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
        self.scheduler = scheduler
        """What is wrapped."""
        self._global_step = global_step
        self._begin = self._count = _count(scheduler)
        self._ended = self._warned = False
        """Whether the schedule has no further steps, and whether this was logged."""
        self._begin_state = copy.deepcopy(scheduler.state_dict())
        self._begin_options = [
            {key: _copy(group[key]) for key in CHANGED if key in group}
            for group in scheduler.optimizer.param_groups
        ]
        self.step()

    def step(self, *_: object) -> None:
        """Let the scheduler's count be the global step; arguments are ignored."""
        target = self._global_step()
        if target < self._count:
            self._rewind()
        missing = target - self._count
        if missing <= 0 or self._ended:
            return
        if missing > MAX_STEPS:
            raise ConfigError(
                f"learner.scheduler: the global step is {target}, and {type(self.scheduler).__name__} is at "
                f"{self._count}; expected at most {MAX_STEPS} steps between them: set the learning rate from "
                "learner.step_index instead"
            )
        with contextlib.ExitStack() as stack:
            if self._count == self._begin:
                # It has not seen the optimizer's steps of other learners and earlier processes.
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            try:
                while self._count < target:
                    self.scheduler.step()
                    self._count += 1
            except ValueError as error:  # OneCycleLR, after its `total_steps`
                self._end(error)

    def _end(self, error: ValueError) -> None:
        """The schedule ends before the job, whose T may have been raised: its last rate remains."""
        self._ended = True
        if not self._warned:
            self._warned = True
            log.warning(
                "learner.scheduler: %s has no step %d: %s; the learning rate stays what it is; make the "
                "schedule for learner.total_steps, and restart the learner after T was raised",
                type(self.scheduler).__name__, self._count + 1, error,
            )  # fmt: skip

    def _rewind(self) -> None:
        """A syncer has returned to an older snapshot: begin again."""
        self.scheduler.load_state_dict(copy.deepcopy(self._begin_state))
        for group, options in zip(
            self.scheduler.optimizer.param_groups, self._begin_options, strict=True
        ):
            for key, value in options.items():
                if isinstance(group[key], torch.Tensor):  # compiled and captured steps hold it
                    group[key].fill_(value)
                else:
                    group[key] = value
        self._count, self._ended = self._begin, False

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the global step is all of the state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: the global step is all of the state."""


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
