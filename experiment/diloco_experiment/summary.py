"""
Tables of a study: a row for each cell, and a row for each group of seeds. Pure.

A group has one method, scenario and values of the grid. Each is represented by the values of `sweep` with the
lowest mean loss, and compared with the group of synchronous training, if there is one, that has the same
values of the grid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_experiment.results import Result, Status
from diloco_experiment.study import JOB, Cell, Study
from diloco_experiment.tasks import Method

Results = Mapping[str, Result]
"""By digest."""

Rows = list[list[Any]]

_NUMBERS = (
    "train_loss", "steps", "local_steps", "tokens", "merged_tokens", "merges", "members", "restarts",
    "virtual_seconds", "theta", "made_by",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cells that differ in seed and sweep only."""

    method: Method
    scenario: str
    variant: str
    grid: tuple[tuple[str, Any], ...]
    best: tuple[tuple[str, Any], ...]
    """Values of the sweep that represent it."""
    losses: tuple[float, ...]
    """Of the seeds that are ok, at those values."""
    seeds: tuple[int, ...]
    """Of these losses."""
    tokens: int
    """Mean of these seeds: a learner whose peers keep the job waiting trains on."""
    merged_tokens: tuple[int, ...]
    """Tokens that are in a merge, of each of these seeds."""
    cells: tuple[Cell, ...]
    """At those values."""
    missing: int
    """Cells of all values that have no result yet."""
    others: int
    """Cells at those values that ended otherwise."""
    distance: float
    """Of the mean loss to that of synchronous training, over the seeds that both have, in percent; NaN: not known."""
    reference: float = math.nan
    """Mean loss of synchronous training over these seeds."""
    tokens_ratio: float = math.nan
    """Merged tokens to those of synchronous training, over these seeds; NaN: not known."""

    @property
    def mean(self) -> float:
        """Mean loss; NaN: there is none."""
        return math.fsum(self.losses) / len(self.losses) if self.losses else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; NaN: fewer than two."""
        if len(self.losses) < 2:
            return math.nan
        squares = math.fsum((loss - self.mean) ** 2 for loss in self.losses)
        return math.sqrt(squares / (len(self.losses) - 1))


def label_of(group: Group) -> str:
    """One line for people."""
    values = [f"{path.rpartition('.')[2]}={_text(value)}" for path, value in group.grid]
    scenario = [] if group.scenario == "equal" else [group.scenario]
    variant = [] if group.variant == JOB else [group.variant]
    return " ".join([group.method, *variant, *scenario, *values])


def table(study: Study, cells: Sequence[Cell], results: Results) -> Rows:
    """results.csv: a row for each cell, in the order of the study."""
    paths = [*study.grid, *study.sweep]
    rows: Rows = [
        [
            "method",
            "scenario",
            "variant",
            "seed",
            *paths,
            "status",
            "loss",
            *_NUMBERS,
            "detail",
            "cell",
        ]
    ]
    for cell in cells:
        values = dict((*cell.grid, *cell.sweep))
        head = [cell.method, cell.scenario, cell.variant, cell.seed]
        head += [_text(values[path]) for path in paths]
        result = results.get(cell.digest)
        if result is None:
            rows.append([*head, "", "", *("" for _ in _NUMBERS), "", cell.digest])
            continue
        numbers = [getattr(result, name) for name in _NUMBERS]
        loss = f"{result.loss:.6f}" if math.isfinite(result.loss) else ""
        rows.append(
            [*head, result.status, loss, *map(_number, numbers), result.detail, cell.digest]
        )
    return rows


def groups(cells: Sequence[Cell], results: Results) -> list[Group]:
    """The groups in the order of the study."""
    by_key: dict[str, list[Cell]] = {}
    for cell in cells:
        key = _key(cell.method, cell.scenario, cell.variant, cell.grid)
        by_key.setdefault(key, []).append(cell)
    found = [_group(own, results) for own in by_key.values()]
    references = [g for g in found if g.method is Method.SYNCHRONOUS and g.losses]
    return [_compared(group, references) for group in found]


def summary(study: Study, found: Sequence[Group]) -> Rows:
    """summary.csv: a row for each group."""
    sweeps = [f"best {path}" for path in study.sweep]
    rows: Rows = [
        [
            "method",
            "scenario",
            "variant",
            *study.grid,
            *sweeps,
            "seeds",
            "loss",
            "deviation",
            "distance_percent",
            "tokens",
            "merged_tokens_ratio",
            "not_ok",
            "missing",
        ]
    ]
    rows += [
        [
            group.method, group.scenario, group.variant, *(_text(value) for _, value in group.grid),
            *(_text(value) for _, value in group.best), len(group.losses),
            _number(group.mean), _number(group.deviation),
            f"{group.distance:+.2f}" if math.isfinite(group.distance) else "", group.tokens,
            f"{group.tokens_ratio:.3f}" if math.isfinite(group.tokens_ratio) else "", group.others, group.missing,
        ]
        for group in found
    ]  # fmt: skip
    return rows


def _group(cells: Sequence[Cell], results: Results) -> Group:
    by_sweep: dict[str, list[Cell]] = {}
    for cell in cells:
        by_sweep.setdefault(json.dumps(cell.sweep), []).append(cell)

    def complete(own: Sequence[Cell]) -> list[Result]:
        ended = (results[c.digest] for c in own if c.digest in results)
        return [r for r in ended if r.status is Status.OK and math.isfinite(r.loss)]

    def seeds_of(own: Sequence[Cell]) -> tuple[int, ...]:
        found = ((c.seed, results[c.digest]) for c in own if c.digest in results)
        return tuple(s for s, r in found if r.status is Status.OK and math.isfinite(r.loss))

    def losses_of(own: Sequence[Cell]) -> list[float]:
        return [result.loss for result in complete(own)]

    def rank(own: Sequence[Cell]) -> tuple[int, float]:
        # A value at which a seed diverges is worse than one at which none does.
        losses = losses_of(own)
        return len(own) - len(losses), math.fsum(losses) / len(losses) if losses else math.inf

    best = min(by_sweep.values(), key=rank)
    first, losses = best[0], losses_of(best)
    tokens = sum(result.tokens for result in complete(best)) // max(1, len(losses))
    ended = sum(cell.digest in results for cell in best)
    return Group(
        method=first.method, scenario=first.scenario, variant=first.variant, grid=first.grid, best=first.sweep,
        losses=tuple(losses), seeds=seeds_of(best), tokens=tokens, cells=tuple(best),
        merged_tokens=tuple(result.merged_tokens for result in complete(best)),
        others=ended - len(losses), distance=math.nan,
        missing=sum(cell.digest not in results for cell in cells),
    )  # fmt: skip


def _compared(group: Group, references: Sequence[Group]) -> Group:
    """
    With the distance to synchronous training of its variant, or of the first that does the same work.

    Only over the seeds that both have: those of one group may differ by more than two groups do.
    """
    alike = [r for r in references if r.grid == group.grid]
    own = [r for r in alike if r.variant == group.variant]
    others = [r for r in alike if _work(r) == _work(group)]
    for reference in (*own, *others)[:1]:
        seeds = set(group.seeds) & set(reference.seeds)
        if seeds:
            mean, tokens = _means(group, seeds)
            expected, all_tokens = _means(reference, seeds)
            return replace(
                group, reference=expected, distance=100 * (mean / expected - 1),
                tokens_ratio=tokens / all_tokens if all_tokens else math.nan,
            )  # fmt: skip
    return group


def _means(group: Group, seeds: set[int]) -> tuple[float, float]:
    """Loss and merged tokens of these seeds."""
    chosen = [index for index, seed in enumerate(group.seeds) if seed in seeds]
    losses = math.fsum(group.losses[index] for index in chosen)
    return losses / len(chosen), sum(group.merged_tokens[index] for index in chosen) / len(chosen)


_OPTIMIZER = "optimizer", "learningRate", "momentum", "weightDecay", "gradientClip", "warmupSteps"


def _work(group: Group) -> Any:
    """Steps, learners, models, batches and data: what must be equal for a comparison between variants."""
    task = group.cells[0].task
    configs = [
        (name, {key: value for key, value in config.items() if key not in _OPTIMIZER})
        for name, config in task.configs
    ]
    return task.spec.steps, configs


def _key(*parts: Any) -> str:
    return json.dumps(parts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
