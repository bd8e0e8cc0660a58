"""
A job of real models in the simulator: its learners, network, syncer and checkers, and `Trained` for the toys.

What differs from a world of the simulator is what it is made of (a task, not a seed), when it ends (the job
is complete or cannot continue, not all faults are over), and that Θ is evaluated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diloco.model.fragments import Layout
from diloco.spec import RunSpec
from diloco_experiment.models import Placed, Recipe, Trained
from diloco_experiment.results import Curve, Result, Status, digest_of
from diloco_experiment.scenarios import limit_of, plan_of
from diloco_experiment.tasks import Checks, Task
from diloco_sim.checkers.checker import Checker
from diloco_sim.checkers.incarnations import Incarnations
from diloco_sim.checkers.observations import Committed, Resumed
from diloco_sim.checkers.quorum import Quorum
from diloco_sim.checkers.replay import Replay
from diloco_sim.checkers.reports import Reports
from diloco_sim.checkers.rounds import Rounds
from diloco_sim.description import Description
from diloco_sim.faults import MEMBERSHIP, PROCESS
from diloco_sim.world import World
from diloco_syncer.storage.parameters import FragmentParameters

TRAIN_LOSSES = 20
"""Of each learner, the newest steps whose losses count as its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Description):
    """What the world of a task is made of."""

    all_names: tuple[str, ...]
    model: Layout
    step_tokens: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """See `Description`."""
        return self.all_names

    @property
    def layout(self) -> Layout:
        """See `Description`."""
        return self.model

    @property
    def job(self) -> RunSpec:
        """See `Description`."""
        return self.spec

    def tokens(self, index: int) -> int:
        """See `Description`."""
        return self.step_tokens[index]


def cell_of(task: Task, recipe: Recipe) -> Cell:
    """
    What the world of a task is made of.

    Raises:
        ValueError: the scenario does not fit the job.
    """
    scenario, spec = task.scenario, task.spec
    added = task.added
    counts = dict(spec.learners)
    for name in added:
        counts[name.partition("/")[0]] += 1
    speeds = scenario.speeds(len(task.names), extra=len(added))
    plan = plan_of(
        scenario, names=task.names, added=added, speeds=speeds, steps=spec.steps, seed=spec.seed
    )
    names = (*task.names, *added)
    configs = [recipe.config(name) for name in names]
    restarts = any(fault.kind in (*PROCESS, *MEMBERSHIP) for fault in plan)
    return Cell(
        seed=spec.seed,
        steps=spec.steps,
        learners=len(names),
        plan=plan,
        spec=replace(spec, learners=counts),
        sizes=(),
        step_seconds=speeds,
        latency=scenario.latency_seconds,
        bandwidth=scenario.bandwidth_bytes_per_second or math.inf,
        # Without a restart no local checkpoint is read.
        checkpoint_every=spec.learner_checkpoint.every_steps if restarts else None,
        part_bytes=1 << 26,
        all_names=names,
        model=recipe.layout,
        step_tokens=tuple(config.batch * config.context for config in configs),
    )


class Evaluations:
    """
    Θ as it is committed, and its validation loss when that is due.

    Args:
        task: of the cell.
        recipe: scores.
    """

    observes = (Committed, Resumed)

    def __init__(self, task: Task, recipe: Recipe) -> None:
        self._task, self._recipe = task, recipe
        self.theta = Placed(recipe.new_model(), recipe.layout)
        self.curve = Curve()
        self._step = 1
        """The next one that is complete when a later one is committed."""

    def observe(self, event: Committed | Resumed, now: float) -> None:
        """See `Checker`."""
        if isinstance(event, Committed):
            self._complete(event.commit.round)
            self._set(event.commit.fragment, event.fragment)
            return
        self.curve.points = [point for point in self.curve.points if point[0] <= event.step]
        self._step = min(self._step, event.step + 1)
        if event.parameters is None:
            self.theta = Placed(self._recipe.new_model(), self._recipe.layout)
            return
        for index, fragment in enumerate(event.parameters.all()):
            self._set(index, fragment)

    def finish(self, now: float) -> None:
        """See `Checker`; the job need not be complete."""

    def complete(self) -> None:
        """The job is complete."""
        self._complete(self._task.spec.steps + 1)

    def _complete(self, until: int) -> None:
        """Every merge before this global step is committed."""
        while self._step < until:
            if self.curve.due(self._task, self._step):
                self.curve.add(self._step, self._recipe.score(self.theta.model))
            self._step += 1

    def _set(self, fragment: int, parameters: FragmentParameters) -> None:
        self.theta.values[fragment][:] = parameters.theta_N


class Merges:
    """Counts merges, their members and tokens."""

    observes = (dict,)

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self.count = self.members = self._tokens = self.step = 0
        self.seconds = 0.0
        """When the last one was."""

    @property
    def tokens(self) -> int:
        """Tokens of members, per fragment."""
        return self._tokens // self._fragments

    def observe(self, event: dict[str, Any], now: float) -> None:
        """See `Checker`."""
        if event.get("event") == "merge":
            self.count += 1
            self.seconds = now
            self.members += len(event["members"])
            self._tokens += sum(member["tokens"] for member in event["members"])
            self.step = max(self.step, event["step"])

    def finish(self, now: float) -> None:
        """See `Checker`."""


class TrainingWorld(World):
    """
    The world of a task.

    Args:
        task: its method is Streaming or Decoupled.

    Raises:
        ConfigError: a config is not valid.
        ValueError: the scenario does not fit the job.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.recipe = task, Recipe(task)
        self.evaluations = Evaluations(task, self.recipe)
        self.merged = Merges(task.spec.fragments)
        self.starts = 0
        self._last: dict[str, list[float]] = {}
        moments = [self.recipe.moments] if self.recipe.moments is not None else []
        super().__init__(
            cell_of(task, self.recipe),
            checkers=[self.evaluations, self.merged, *moments],
            new_model=self._start,
        )

    def _start(self, name: str) -> Trained:
        self.starts += 1
        return _Noted(self.recipe, name, self._last.setdefault(name, []))

    def own_checkers(self) -> list[Checker]:
        """See `World`: those that cost little, or all that judge merges."""
        light: list[Checker] = [
            Quorum(self.spec.quorum),
            Rounds(self.spec.overlap),
            Reports(),
            Incarnations(),
        ]
        if self.task.checks is Checks.ALL:
            light.append(Replay(self.spec, self.recipe.layout))
        return light

    @property
    def over(self) -> bool:
        """The job is complete: a learner has left because of that."""
        return any(learner.done for learner in self.learners.values())

    @property
    def stopped(self) -> bool:
        """See `World`: nothing more will be merged."""
        return bool(self.recipe.diverged or self.halt or self.syncer.refusal)

    @property
    def deadline(self) -> float:
        """See `World`: also a job in which all learners fail most of the time is complete by then."""
        return limit_of(self.of.steps, self.of.step_seconds)

    def result(self) -> Result:
        """Run it."""
        outcome = self.run()
        status, detail = Status.OK, ""
        if outcome.violation is not None:
            status, detail = Status.FAILED, str(outcome.violation)
        elif self.recipe.diverged:
            status, detail = Status.DIVERGED, self.recipe.diverged
        elif outcome.stopped or not self.over:
            status = Status.HALTED
            detail = outcome.stopped or f"not complete after {outcome.seconds:.0f} virtual seconds"
        else:
            self.evaluations.complete()
        last = [np.mean(losses) for losses in self._last.values() if losses]
        cell = self.of
        tokens = {name: cell.tokens(index) for index, name in enumerate(cell.names)}
        return Result(
            status=status,
            detail=detail,
            curve=tuple(self.evaluations.curve.points),
            train_loss=float(np.mean(last)) if last and np.isfinite(last).all() else None,
            steps=self.merged.step if status is not Status.OK else self.task.spec.steps,
            local_steps=self.recipe.steps_of.total(),
            tokens=sum(tokens[name] * count for name, count in self.recipe.steps_of.items()),
            merged_tokens=self.merged.tokens,
            merges=self.merged.count,
            members=round(self.merged.members / max(1, self.merged.count), 4),
            restarts=max(0, self.starts - len(self.learners)),
            virtual_seconds=round(self.merged.seconds, 3),
            theta=digest_of(self.evaluations.theta.values),
        )


class _Noted(Trained):
    """Keeps the newest losses of its learner."""

    def __init__(self, recipe: Recipe, name: str, losses: list[float]) -> None:
        super().__init__(recipe, name)
        self._losses = losses

    def step(self) -> float:
        """See `Model`."""
        loss = super().step()
        self._losses.append(loss)
        del self._losses[:-TRAIN_LOSSES]
        return loss
