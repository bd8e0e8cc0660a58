"""
What one cell runs. Pure.

A method fixes the fields that define it; fields and scenarios that do not concern it do not change its task.
So cells of a grid over such a field are one task, and run once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from diloco.spec import Checkpoint, RunSpec, canonical
from diloco_experiment.scenarios import Scenario

FORMAT = 2
"""Of tasks and results: raise it when the same task gives other numbers."""


class Method(StrEnum):
    """How a cell trains."""

    SYNCHRONOUS = "Synchronous"
    """Data-parallel: one model, and in each step the mean gradient of the batches of all learners."""
    DILOCO = "DiLoCo"
    """All learners wait for each result: K = M, one fragment, no overlap."""
    STREAMING = "Streaming"
    """All learners are in each merge: K = M; fragments and overlap of the job."""
    DECOUPLED = "Decoupled"
    """The job as it is."""


class Checks(StrEnum):
    """Which checkers of the simulator watch a cell."""

    LIGHT = "Light"
    """Reports, quorum, rounds, incarnations."""
    ALL = "All"
    """Also the replay of each merge in float64."""


class Moments(StrEnum):
    """What a merge does with the moments of the inner optimizers."""

    LOCAL = "Local"
    """Each learner keeps its own, as in a job."""
    OVERWRITE = "Overwrite"
    """Each fragment's are averaged with it, and a learner continues with the average; counts of steps stay."""
    AVERAGE = "Average"
    """The same, and a learner keeps what its own changed since the copy that was merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function of it gives the result of a cell."""

    method: Method
    spec: RunSpec
    configs: tuple[tuple[str, dict[str, Any]], ...]
    """Name and recipe config of each learner of the job, in the order of the manifest."""
    scenario: Scenario
    evaluate_every: int
    """Global steps."""
    checks: Checks = Checks.LIGHT
    moments: Moments = Moments.LOCAL

    @property
    def names(self) -> tuple[str, ...]:
        """The learners of the job."""
        return tuple(name for name, _ in self.configs)

    @property
    def added(self) -> tuple[str, ...]:
        """The learners that scavenging adds: the next ones of each region in turn."""
        counts, found = dict(self.spec.learners), []
        regions = list(counts)
        for number in range(self.scenario.added(len(self.names))):
            region = regions[number % len(regions)]
            found.append(f"{region}/{counts[region]}")
            counts[region] += 1
        return tuple(found)

    @property
    def digest(self) -> str:
        """16 hex digits over everything that decides the result."""
        data = {
            "format": FORMAT,
            "method": self.method,
            "spec": self.spec.to_json(),
            "configs": self.configs,
            "scenario": self.scenario.model_dump(mode="json"),
            "every": self.evaluate_every,
            "checks": self.checks,
            # Left out of what there was before, so that results of earlier studies are found.
            **({} if self.moments is Moments.LOCAL else {"moments": self.moments}),
        }
        return hashlib.sha256(canonical(data).encode()).hexdigest()[:16]


def task_of(
    method: Method, spec: RunSpec, configs: Sequence[tuple[str, dict[str, Any]]], scenario: Scenario, *,
    evaluate_every: int, checks: Checks, moments: Moments = Moments.LOCAL,
) -> Task:  # fmt: skip
    """The task of a job under a method, without what does not concern it."""
    learners = len(configs)
    spec = replace(
        spec,
        job="experiment",
        evaluation_every_steps=None,
        evaluation_command=(),
        recipe_config={},  # of each learner: `configs`
        quorum=spec.quorum if method is Method.DECOUPLED else learners,
    )
    if method is Method.SYNCHRONOUS:
        spec = RunSpec(
            job=spec.job, steps=spec.steps, seed=spec.seed, learners=spec.learners, recipe=spec.recipe,
            fragments=1, interval=1, overlap=1,
        )  # fmt: skip
    elif method is Method.DILOCO:
        none = Checkpoint(every_steps=100, keep=1)
        spec = replace(
            spec, fragments=1, overlap=1, grace_max_steps=0.0, guard=0.0,
            learner_checkpoint=none, syncer_checkpoint=none,
        )  # fmt: skip
    waits = method in (Method.SYNCHRONOUS, Method.DILOCO)
    return Task(
        method=method,
        spec=spec,
        configs=tuple(configs),
        scenario=Scenario() if waits else scenario,
        evaluate_every=evaluate_every,
        checks=Checks.LIGHT if waits else checks,
        moments=Moments.LOCAL if method is Method.SYNCHRONOUS else moments,
    )
