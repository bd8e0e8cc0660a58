"""
What the steps of a learner show about its program: a loss that is not finite, steps without tokens, calls of
`learner.step()` without an optimizer step, and a model that is no longer that of the job. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Paper leaves this open: after how many steps a learner counts as not working. A loss scaler skips a few steps in a
# row, and a batch may be empty, but not twenty times.
STEPS_IN_ROW = 20
CALLS = 64
"""Calls of `learner.step()` that are compared with the optimizer's steps."""
MAX_WITHOUT = 0.4
"""The largest part of them that an optimizer step need not precede: with two calls per step, it is a half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with the work of a learner."""

    kind: str
    """NotFinite | NoTokens | RepeatedSteps | OtherModel."""
    text: str
    """One sentence: what was seen, and what to do."""


class StepChecks:
    """Counts the steps that show a problem; a step without it ends the first two kinds."""

    def __init__(self) -> None:
        self._not_finite = self._without_tokens = 0
        """Steps in a row."""
        self.other_model = ""
        """A sentence about what the program trains that the job does not, or the other way round; "": nothing."""
        self._followed: deque[bool] = deque(maxlen=CALLS)
        """Of the last calls, whether an optimizer step preceded them."""

    @property
    def finite(self) -> bool:
        """Whether the newest known loss is finite, so that the model is worth a checkpoint."""
        return not self._not_finite

    def stepped(self, *, tokens: int, optimizer_steps: int | None) -> None:
        """
        `learner.step()` was called.

        Args:
            tokens: of the step.
            optimizer_steps: that the optimizers reported since the previous call; None: not known.
        """
        self._without_tokens = 0 if tokens else self._without_tokens + 1
        if optimizer_steps is not None:
            self._followed.append(optimizer_steps > 0)

    def loss_read(self, *, finite: bool) -> None:
        """A loss was read; those of a device may be fewer than the steps."""
        self._not_finite = 0 if finite else self._not_finite + 1

    def problem(self) -> Problem | None:
        """The most severe problem; None: there is none."""
        if self._not_finite >= STEPS_IN_ROW:
            return Problem(
                kind="NotFinite",
                text=f"the last {self._not_finite} losses were NaN or Inf; check the learning rate and the data",
            )
        if self._without_tokens >= STEPS_IN_ROW:
            return Problem(
                kind="NoTokens",
                text=f"the last {self._without_tokens} steps had no tokens, so their merges change nothing; "
                "pass the number of tokens, or of any other unit of work, to learner.step()",
            )
        without = self._followed.count(False)
        if len(self._followed) == CALLS and self._without_between() > MAX_WITHOUT * CALLS:
            return Problem(
                kind="RepeatedSteps",
                text=f"before {without} of the last {CALLS} calls of learner.step() there was no optimizer step; "
                "call it once after each step of the optimizer",
            )
        return Problem(kind="OtherModel", text=self.other_model) if self.other_model else None

    def _without_between(self) -> int:
        """
        Calls without an optimizer step, between those with one.

        Others may belong to loops whose optimizers do not report steps (docs/learners.md): replays of a CUDA graph
        follow reported steps, those of its warm-up and capture.
        """
        reported = [call for call, followed in enumerate(self._followed) if followed]
        return reported[-1] - reported[0] + 1 - len(reported) if reported else 0
