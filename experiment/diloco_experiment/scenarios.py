"""
The circumstances of a job: speeds, network, failures, and learners that join for a while.

Times are in virtual seconds; a step takes one unless the scenario states otherwise. Failures are a function
of the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from diloco_sim.faults import DISK, LINK, MEMBERSHIP, PROCESS, Fault, Kind, Plan
from diloco_sim.learner import TRAINER

MAX_FAULTS = 100_000
"""Of one cell."""

SLACK = 20.0
"""A job may take this many times its duration without failures."""

_OTHERS = (*LINK, *PROCESS, *DISK, *MEMBERSHIP)


class Fields(BaseModel):
    """An object of study.yaml: camelCase keys, no unknown ones."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )


class Failures(Fields):
    """Each learner fails and returns, at random."""

    goodput: Annotated[float, Field(ge=0.05, lt=1)]
    """Expected share of the time in which a learner is up."""
    outage_steps: Annotated[float, Field(ge=1, le=1e6)] = 20.0
    """Mean duration of an outage, in steps of the fastest learner; exponentially distributed, as is the time up."""


class Scavenging(Fields):
    """Further learners for a part of the run."""

    extra: Annotated[float, Field(gt=0, le=8)] = 1.0
    """How many, as a share of the job's learners."""
    begin: Annotated[float, Field(ge=0, le=1)] = 0.25
    """When they join, as a share of the duration of the run."""
    end: Annotated[float, Field(ge=0, le=1)] = 0.75

    @model_validator(mode="after")
    def _ordered(self) -> Scavenging:
        if not self.begin < self.end:
            raise ValueError(f"begin {self.begin:g} is not less than end {self.end:g}")
        return self


class Scenario(Fields):
    """One entry of `scenarios`; all defaults: learners of one speed that never fail."""

    step_seconds: tuple[Annotated[float, Field(ge=0.1, le=1e4)], ...] = (1.0,)
    """
    Of each learner in the order of the manifest, or one for all.

    With shorter ones, 64 learners pass the simulator's limit of events within a time, which a loop would pass, too:
    a step was seen to cost up to 33 events, and 62 fit.
    """
    latency_seconds: Annotated[float, Field(ge=0, le=100)] = 0.02
    bandwidth_bytes_per_second: Annotated[float, Field(ge=1e3)] | None = None
    """Of each learner's link; None: unlimited."""
    failures: Failures | None = None
    scavenging: Scavenging | None = None
    faults: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Lines of the simulator's plans: BEGIN..END KIND TARGET [PEER] [one-way] [AMOUNT]."""

    @field_validator("faults")
    @classmethod
    def _known(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        for line in lines:
            kind = Fault.parse(line).kind
            if kind is Kind.SCALE or kind not in _OTHERS:
                allowed = ", ".join(k.value for k in _OTHERS if k is not Kind.SCALE)
                raise ValueError(f"{line!r}: expected one of {allowed}")
        return lines

    def speeds(self, learners: int, *, extra: int) -> tuple[float, ...]:
        """
        Seconds of a step of each learner, then of each extra one, which is as fast as the fastest.

        Raises:
            ValueError: there are speeds for another number of learners.
        """
        given = self.step_seconds
        if len(given) not in (1, learners):
            raise ValueError(f"stepSeconds has {len(given)} values, expected 1 or {learners}")
        own = given * learners if len(given) == 1 else given
        return (*own, *[min(own)] * extra)

    def added(self, learners: int) -> int:
        """How many learners scavenging adds."""
        return max(1, round(learners * self.scavenging.extra)) if self.scavenging else 0


def limit_of(steps: int, speeds: Sequence[float]) -> float:
    """Virtual seconds after which a cell ends, complete or not; failures last until then."""
    return 600.0 + SLACK * steps * max(speeds)


def plan_of(
    scenario: Scenario, *, names: Sequence[str], added: Sequence[str], speeds: Sequence[float],
    steps: int, seed: int,
) -> Plan:  # fmt: skip
    """
    The faults of a run.

    Args:
        scenario: what to plan.
        names: the learners of the job.
        added: those that scavenging adds.
        speeds: seconds of a step of each, `names` first.
        steps: T.
        seed: of the failures; equal seeds give each learner the same failures in each cell.

    Raises:
        ValueError: too many failures, or a fault of a process that does not exist.
    """
    duration = steps * min(speeds)
    limit = limit_of(steps, speeds)
    found = [Fault.parse(line) for line in scenario.faults]
    learners = (*names, *added)
    known = {*learners, *(name + TRAINER for name in learners), "syncer"}
    for fault in found:
        if not {fault.target, *({fault.peer} - {"", "power"})} <= known:
            raise ValueError(f"{fault}: no such process; there are {', '.join(sorted(known))}")
    if scenario.failures is not None:
        for name in learners:
            found += _failures(scenario.failures, name, horizon=limit, step=min(speeds), seed=seed)
            if len(found) > MAX_FAULTS:
                raise ValueError(f"more than {MAX_FAULTS} failures; raise outageSteps or goodput")
    if scenario.scavenging is not None:
        begin, end = scenario.scavenging.begin * duration, scenario.scavenging.end * duration
        for name in added:
            if begin > 0:
                found.append(Fault(Kind.LATE, name, 0.0, begin))
            found.append(Fault(Kind.LEAVE, name, end, 2 * limit))  # it does not return
    return Plan.of(*found)


def _failures(
    failures: Failures, name: str, *, horizon: float, step: float, seed: int
) -> list[Fault]:
    """Of one learner: alternately up and down."""
    source = random.Random(f"{seed}/{name}")  # noqa: S311  # no secret
    outage = failures.outage_steps * step
    up = outage * failures.goodput / (1 - failures.goodput)
    found: list[Fault] = []
    now = source.expovariate(1 / up)
    while now < horizon and len(found) <= MAX_FAULTS:
        end = now + source.expovariate(1 / outage)
        found.append(Fault(Kind.CRASH, name + TRAINER, round(now, 3), round(end, 3)))
        now = end + source.expovariate(1 / up)
    return found
