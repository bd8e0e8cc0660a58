"""A learner without a syncer, anywhere in its job: for the loops of other libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco_worker import Learner
from diloco_worker.core.ledger import Ledger
from diloco_worker.settings import LearnerSettings

ENVIRONMENT = {
    "DILOCO_SYNCER": "127.0.0.1:1",
    "DILOCO_JOB": "demo",
    "DILOCO_LEARNER": "eu/0",
    "DILOCO_SPEC": "spec.json",
}


class Rejoined:
    """
    Implements what `Learner` needs, as a learner that joins at a global step.

    Args:
        at: global step at which it joins.
        total: T.
        steps: the job is complete after so many steps of this learner.
        rate: global steps for each of its own.
    """

    def __init__(
        self, *, at: int = 0, total: int = 100, steps: int = 10, rate: float = 1.0
    ) -> None:
        self.name, self.index, self.spec = "eu/0", 0, None
        self.config: dict[str, Any] = {}
        self.total_steps, self.tokens, self.losses = total, [], []
        self._at, self._steps, self._rate = at, steps, rate
        self._ledger, self.closed = Ledger(0), False
        self.connected: tuple[torch.nn.Module, list[torch.optim.Optimizer]] | None = None
        self.every_rank: bool | None = None
        """As `Learner.connect` was given it."""

    @property
    def done(self) -> bool:
        return self.closed or self.local_step >= self._steps

    @property
    def step_index(self) -> int:
        return self._at + int(self._rate * self.local_step)

    @property
    def local_step(self) -> int:
        return self._ledger.local_step

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        self._ledger.count(tokens)
        self.tokens.append(tokens)
        self.losses.append(None if loss is None else float(loss))

    def close(self, error: BaseException | None = None) -> None:
        self.closed = True

    def join(self, monkeypatch: pytest.MonkeyPatch) -> Rejoined:
        """Let `Learner.connect` return it, in the environment of a job."""

        def connect(
            model: torch.nn.Module, optimizer: Any, *, every_rank: bool | None = None, **_: object
        ) -> Learner:
            self.connected, self.every_rank = (model, optimizer), every_rank
            return Learner(self)

        spec = SimpleNamespace(steps=self.total_steps)
        monkeypatch.setattr(LearnerSettings, "read_spec", lambda settings: spec)
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(Learner, "connect", connect)
        return self
