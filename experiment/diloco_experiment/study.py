"""
study.yaml: what is compared, and the cells of the grid.

    cells of a study = variants × methods × scenarios × values of grid and sweep × seeds

Each cell is a job: the manifest with `set` and the values of the cell, checked by the rules of the manifest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from diloco.errors import ConfigError
from diloco_experiment.scenarios import Failures, Fields, Scavenging, Scenario, plan_of
from diloco_experiment.tasks import Checks, Method, Moments, Task, task_of
from diloco_job.manifest_file import parse_job, parse_yaml
from diloco_job.plan import plan
from diloco_job.validation_messages import path_text, shown

MAX_CELLS = 2000
MAX_LEARNERS = 64
MAX_STEPS = 1_000_000
MAX_EVALUATIONS = 10_000
"""Of a cell; its file has each."""
MAX_BYTES = 1 << 20
"""Of study.yaml and of the manifest."""
JOB = "job"
"""Name of the only variant of a study that has none."""

MAX_PROBLEMS = 10
"""That one message lists."""

_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"

Values = Annotated[tuple[Any, ...], Field(min_length=1, max_length=MAX_CELLS)]


class Evaluation(Fields):
    """When Θ is evaluated, besides the end."""

    every_steps: Annotated[int, Field(ge=1)]


class Variant(Fields):
    """A step of an ablation: fields that change together."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Field of the job → value; replaces that of `set` of the study."""
    methods: tuple[Method, ...] | None = None
    """None: those of the study."""
    scenarios: tuple[str, ...] | None = None
    """None: those of the study."""
    moments: Moments = Moments.LOCAL


class Study(Fields):
    """The fields of study.yaml."""

    name: Annotated[str, Field(pattern=_NAME)]
    job: Annotated[str, Field(min_length=1)]
    """Path of the manifest, relative to the study's file."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Field of the job → value, in all cells."""
    grid: dict[str, Values] = Field(default_factory=dict)
    """Field of the job → values that are compared."""
    sweep: dict[str, Values] = Field(default_factory=dict)
    """Field of the job → values of which each method is compared at its best, such as the learning rate."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1)] = (0,)
    methods: Annotated[tuple[Method, ...], Field(min_length=1)] = tuple(Method)
    scenarios: Annotated[dict[str, Scenario], Field(min_length=1)] = Field(
        default_factory=lambda: {"equal": Scenario()}
    )
    variants: Annotated[dict[str, Variant], Field(min_length=1)] = Field(
        default_factory=lambda: {JOB: Variant()}
    )
    """Name → what it changes, besides grid and sweep."""
    evaluation: Evaluation | None = None
    """None: that of the job, or ten times."""
    checks: Checks = Checks.LIGHT

    @model_validator(mode="after")
    def _distinct(self) -> Study:
        for name, values in (("seeds", self.seeds), ("methods", self.methods)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: a value is there twice")
        seen: dict[str, str] = {}
        for where, paths in (("set", self.set), ("grid", self.grid), ("sweep", self.sweep)):
            for path in paths:
                if path in seen:
                    raise ValueError(f"{path} is in {seen[path]} and in {where}; choose one")
                seen[path] = where
        for path, values in {**self.grid, **self.sweep}.items():
            if len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
                raise ValueError(f"{path}: a value is there twice")
        for name, variant in self.variants.items():
            if both := variant.set.keys() & {*self.grid, *self.sweep}:
                raise ValueError(
                    f"{min(both)} is in variant {name}, and in grid or sweep; choose one"
                )
            if unknown := set(variant.scenarios or ()) - set(self.scenarios):
                known = ", ".join(self.scenarios)
                raise ValueError(f"variant {name}: no scenario {min(unknown)}; there are {known}")
        if "spec.seed" in seen or any("spec.seed" in v.set for v in self.variants.values()):
            raise ValueError("spec.seed: write seeds instead")
        return self

    @property
    def count(self) -> int:
        """How many cells there are."""
        axes = (*self.grid.values(), *self.sweep.values(), self.seeds)
        count = sum(
            len(v.methods or self.methods) * len(v.scenarios or self.scenarios)
            for v in self.variants.values()
        )
        for axis in axes:
            count *= len(axis)
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of the table."""

    method: Method
    scenario: str
    variant: str
    grid: tuple[tuple[str, Any], ...]
    """Field → value."""
    sweep: tuple[tuple[str, Any], ...]
    seed: int
    task: Task
    digest: str
    """Of the task."""

    @property
    def label(self) -> str:
        """One line for people."""
        values = [f"{path.rpartition('.')[2]}={_short(v)}" for path, v in (*self.grid, *self.sweep)]
        scenario = [] if self.scenario == "equal" else [self.scenario]
        variant = [] if self.variant == JOB else [self.variant]
        return " ".join([self.method, *variant, *scenario, *values, f"seed={self.seed}"])


def load(path: Path) -> tuple[Study, str]:
    """
    A study, and the text of its manifest.

    Raises:
        ConfigError: a file cannot be read, or the study is not valid; lists all problems.
    """
    data, problems = parse_yaml(
        _read(path), file="study", content="a study as in docs/experiments.md"
    )
    if problems:
        raise ConfigError("\n".join([f"{path}: not a study", *problems[:MAX_PROBLEMS]]))
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: {shown(data)} is not an object with fields; see docs/experiments.md"
        )
    try:
        study = Study.model_validate(data)
    except ValidationError as error:
        found = [_message(e) for e in error.errors(include_url=False)]
        raise ConfigError("\n".join([f"{path}: not a study", *found[:MAX_PROBLEMS]])) from None
    if study.count > MAX_CELLS:
        raise ConfigError(
            f"{path}: {study.count:,} cells, at most {MAX_CELLS:,}; leave out values, or make several studies"
        )
    return study, _read(path.parent / study.job)


def cells(study: Study, manifest: str) -> list[Cell]:
    """
    The cells in the order of the table.

    Raises:
        ConfigError: a cell is not a valid job; names each kind of problem once, with its first cell.
    """
    found: list[Cell] = []
    problems: dict[str, str] = {}
    for choice in _choices(study):
        try:
            found.append(_cell(study, manifest, *choice))
        except (ConfigError, ValueError) as error:
            variant, method, scenario, grid, sweep, seed = choice
            values = ", ".join(f"{path}={_short(value)}" for path, value in (*grid, *sweep))
            of_variant = f", variant {variant}" if variant != JOB else ""
            where = f"{method}{of_variant}, scenario {scenario}, seed {seed}{', ' + values if values else ''}"
            problems.setdefault(str(error), where)
    if problems:
        lines = [f"{where}: {text}" for text, where in problems.items()]
        more = [f"and {len(lines) - MAX_PROBLEMS} more"] if len(lines) > MAX_PROBLEMS else []
        count = study.count - len(found)
        raise ConfigError(
            "\n".join([f"{count} of {study.count} cells cannot run", *lines[:MAX_PROBLEMS], *more])
        )
    return found


def _choices(study: Study) -> Iterator[tuple[str, Method, str, Any, Any, int]]:
    kinds = (
        (name, method, scenario)
        for name, variant in study.variants.items()
        for method in variant.methods or study.methods
        for scenario in variant.scenarios or study.scenarios
    )
    for name, method, scenario in kinds:
        for grid in itertools.product(*study.grid.values()):
            for sweep in itertools.product(*study.sweep.values()):
                for seed in study.seeds:
                    yield (
                        name,
                        method,
                        scenario,
                        tuple(zip(study.grid, grid, strict=True)),
                        tuple(zip(study.sweep, sweep, strict=True)),
                        seed,
                    )


def _cell(
    study: Study, manifest: str, variant: str, method: Method, scenario: str, grid: Any, sweep: Any, seed: int
) -> Cell:  # fmt: skip
    changed = {**study.set, **study.variants[variant].set}
    values = {**changed, **dict(grid), **dict(sweep), "spec.seed": seed}
    sets = [f"{path}={json.dumps(value)}" for path, value in values.items()]
    job = parse_job(manifest, sets, name=study.job)
    of = plan(job)
    spec = of.spec
    if spec.recipe is None:
        raise ConfigError(
            "spec.learner.command: experiments train the built-in recipe; use spec.learner.recipe"
        )
    if not 1 <= len(of.learners) <= MAX_LEARNERS:
        raise ConfigError(f"{len(of.learners)} learners, an experiment has 1 to {MAX_LEARNERS}")
    if spec.steps > MAX_STEPS:
        raise ConfigError(f"spec.steps: {spec.steps}, an experiment at most {MAX_STEPS:,}")
    every = spec.evaluation_every_steps or max(1, spec.steps // 10)
    every = study.evaluation.every_steps if study.evaluation else every
    if spec.steps > MAX_EVALUATIONS * every:
        raise ConfigError(
            f"evaluation.everySteps: {every} of {spec.steps:,} steps, an experiment at most {MAX_EVALUATIONS:,} "
            "evaluations; raise it"
        )
    task = task_of(
        method, spec, [(learner.name, dict(learner.config)) for learner in of.learners],
        study.scenarios[scenario], checks=study.checks, evaluate_every=every,
        moments=study.variants[variant].moments,
    )  # fmt: skip
    _check(task)
    return Cell(
        method=method, scenario=scenario, variant=variant, grid=grid, sweep=sweep, seed=seed, task=task,
        digest=task.digest,
    )  # fmt: skip


def _check(task: Task) -> None:
    """Raises ValueError if the scenario does not fit the job."""
    added = task.added
    if len(task.names) + len(added) > MAX_LEARNERS:
        raise ValueError(f"scavenging adds up to more than {MAX_LEARNERS} learners; lower extra")
    plan_of(
        task.scenario, names=task.names, added=added, steps=task.spec.steps, seed=task.spec.seed,
        speeds=task.scenario.speeds(len(task.names), extra=len(added)),
    )  # fmt: skip


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a file") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES:,} bytes; a study is a short file")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def _message(error: ErrorDetails) -> str:
    where = path_text(error["loc"]) if error["loc"] else "study"
    if error["type"] == "extra_forbidden":
        known = ", ".join(_keys(error["loc"]))
        return f"{where}: there is no such field; known are {known}"
    if error["type"] == "missing":
        return f"{where}: missing; it is required"
    text = error["msg"].removeprefix("Value error, ").replace("Tuple", "A list")
    text = text.replace("tuple", "list").replace("dictionary", "object")
    seen = error["input"]
    return f"{where}: {text}" + ("" if isinstance(seen, Mapping) else f"; found {shown(seen)}")


def _keys(location: Sequence[str | int]) -> list[str]:
    """Fields of the object that has an unknown one."""
    owners: dict[str, type[Fields]] = {
        "failures": Failures,
        "scavenging": Scavenging,
        "evaluation": Evaluation,
    }
    above = str(location[-2]) if len(location) > 1 else ""
    owner: type[Fields] = Study
    if above:
        default = Variant if location[0] == "variants" else Scenario
        owner = owners.get(above, default)
    return [str(field.alias) for field in owner.model_fields.values()]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
