"""A supervisor's policy in virtual time, with all of its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco_local.events import (
    Abandon,
    Decision,
    Event,
    Exited,
    Kill,
    Limits,
    Restart,
    Served,
    Start,
    State,
    Terminate,
    Tick,
)
from diloco_local.policy import Policy

SIGKILL, SIGSEGV = 9, 11
LEARNERS = ("eu/0", "eu/1")


@dataclass
class Run:
    """A policy and a clock; `decisions` are all decisions with their time."""

    policy: Policy
    now: float = 0.0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def handle(self, event: Event, *, at: float | None = None) -> list[Decision]:
        self.now = self.now if at is None else at
        decisions = self.policy.handle(event, self.now)
        self.decisions += [(self.now, decision) for decision in decisions]
        return decisions

    def exits(
        self, name: str, code: int, *, at: float | None = None, last_line: str = ""
    ) -> list[Decision]:
        return self.handle(Exited(name=name, code=code, last_line=last_line), at=at)

    def wait(self, *, until: float) -> list[Decision]:
        decisions: list[Decision] = []
        while self.now < until:
            decisions += self.handle(Tick(), at=min(until, self.now + 0.25))
        return decisions

    def state(self, name: str) -> State:
        return self.policy.processes[name].state

    def starts(self, name: str) -> list[float]:
        return [at for at, decision in self.decisions if decision == Start(name=name)]


def fresh(**limits: Any) -> Run:
    run = Run(Policy(learners=LEARNERS, evaluator=True, limits=Limits(**limits)))
    run.handle(Tick())
    return run


def training(**limits: Any) -> Run:
    run = fresh(**limits)
    run.exits("kernels", 0)
    run.handle(Served())
    return run


def names(
    decisions: list[Decision], kind: type[Start | Terminate | Kill | Restart | Abandon]
) -> list[str]:
    return [decision.name for decision in decisions if isinstance(decision, kind)]
