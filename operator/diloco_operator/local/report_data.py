"""
What a run directory tells, read once and put in order for the report.

Shell (reads files). Everything may be missing or half-written: a run that just began, a line torn
by a kill, a status of an older version. What cannot be read is left out, never an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_operator.audit import Audit, audit

F64 = npt.NDArray[np.float64]

MOST_STEP_LINES = 200_000
"""Lines of all steps.jsonl together that are parsed; of longer files every n-th."""
FEWEST_STEP_LINES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A learner's optimizer steps, thinned out; arrays of equal length, in order of time."""

    time: F64
    tokens: F64
    """Trained by this learner up to this step, over all its lives."""
    loss: F64
    seconds: F64
    sync_seconds: F64
    last_local_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process of a learner, or one epoch of the syncer."""

    number: int
    """Incarnation or epoch."""
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRun:
    """One learner over all its lives."""

    name: str
    lives: tuple[Life, ...]
    merge_times: F64
    restart_times: F64
    """When the supervisor saw it die and started it again."""
    steps: Steps

    @property
    def tokens(self) -> float:
        """Trained in all its lives."""
        return float(self.steps.tokens[-1]) if self.steps.tokens.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Merges:
    """All merges, arrays of equal length, in the order they were written."""

    time: F64
    step: F64
    quorum_seconds: F64
    grace_seconds: F64
    sync_seconds: F64
    members: F64
    quorum: F64
    bytes_up: F64
    bytes_down: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Evaluations of the syncer's Θ."""

    time: F64
    tokens: F64
    loss: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything the report shows. Times are seconds since the run began."""

    name: str
    state: str
    step: int
    steps: int | None
    tokens: float
    seconds: float
    spec: Mapping[str, Any]
    epochs: tuple[Life, ...]
    learners: tuple[LearnerRun, ...]
    merges: Merges
    scores: Scores
    audit: Audit
    sample: str | None

    def tokens_at(self, time: F64) -> F64:
        """Tokens of all learners together at these times."""
        total = np.zeros(time.shape)
        for learner in self.learners:
            steps = learner.steps
            if steps.time.size:
                total += np.interp(time, steps.time, steps.tokens, left=0.0)
        return total


def load(run_dir: Path) -> Run:
    """Read all of a run directory that is there."""
    lines = _text(run_dir / "events.jsonl").splitlines()
    events = list(_objects(lines))
    spec, status = _object(run_dir / "spec.json"), _object(run_dir / "status.json")
    steps = _all_steps(run_dir / "learners")
    scores = list(_objects(_text(run_dir / "eval.jsonl").splitlines()))

    stamps = [t for e in (*events, *scores) if (t := _time(e)) is not None]
    stamps += [float(s.time[i]) for s in steps.values() if s.time.size for i in (0, -1)]
    begin, end = (min(stamps), max(stamps)) if stamps else (0.0, 0.0)

    merges = [e for e in events if e.get("event") == "merge" and _time(e) is not None]
    learners = _learners(events, merges, steps, begin, end)
    trained = sum(learner.tokens for learner in learners)
    reached = max((_number(e, "step", 0.0) for e in events), default=0.0)
    sample = _text(run_dir / "model" / "sample.txt")
    return Run(
        name=str(spec.get("job") or run_dir.resolve().name),
        state=str(status.get("state") or _state(events)),
        step=int(_number(status, "step", reached)),
        steps=int(steps_) if (steps_ := _number(spec, "steps", 0.0)) else None,
        tokens=_number(status, "tokens", trained) or trained,
        seconds=end - begin,
        spec=spec,
        epochs=_epochs(events, begin),
        learners=learners,
        merges=_merges(merges, begin),
        scores=Scores(
            time=_column(scores, _time) - begin,
            tokens=_column(scores, lambda e: _number(e, "tokens")),
            loss=_column(scores, lambda e: _number(e, "loss")),
        ),
        audit=audit(lines),
        sample=sample or None,
    )


def _state(events: Iterable[Mapping[str, Any]]) -> str:
    return "Complete" if any(e.get("event") == "complete" for e in events) else "Unknown"


def _merges(merges: list[Mapping[str, Any]], begin: float) -> Merges:
    def column(name: str) -> F64:
        return _column(merges, lambda e: _number(e, name))

    return Merges(
        time=_column(merges, _time) - begin,
        step=column("step"),
        quorum_seconds=column("quorumSeconds"),
        grace_seconds=column("graceSeconds"),
        sync_seconds=column("syncSeconds"),
        members=_column(merges, lambda e: float(len(_members(e)))),
        quorum=column("quorum"),
        bytes_up=np.nan_to_num(column("bytesUp")),
        bytes_down=np.nan_to_num(column("bytesDown")),
    )


def _epochs(events: list[Mapping[str, Any]], begin: float) -> tuple[Life, ...]:
    """A syncer lives from the first line of its epoch to the last."""
    seen: dict[int, list[float]] = {}
    for event in events:
        time, epoch = _time(event), event.get("epoch")
        # The supervisor's own lines carry the epoch it last heard of.
        if time is not None and isinstance(epoch, int) and event.get("event") != "restart":
            seen.setdefault(epoch, []).append(time - begin)
    return tuple(
        Life(number=epoch, begin=min(times), end=max(times))
        for epoch, times in sorted(seen.items())
    )


def _learners(
    events: list[Mapping[str, Any]],
    merges: list[Mapping[str, Any]],
    steps: Mapping[str, Steps],
    begin: float,
    end: float,
) -> tuple[LearnerRun, ...]:
    merged: dict[str, list[float]] = {}
    signs: dict[str, dict[int, list[float]]] = {}
    """learner → incarnation → times at which it showed life."""
    open_lives: dict[str, int] = {}

    def sign(learner: object, incarnation: object, time: float) -> None:
        if isinstance(learner, str) and isinstance(incarnation, int):
            signs.setdefault(learner, {}).setdefault(incarnation, []).append(time)

    for event in events:
        time, kind = _time(event), event.get("event")
        if time is None:
            continue
        learner, incarnation = event.get("learner"), event.get("incarnation")
        if kind in ("join", "leave"):
            sign(learner, incarnation, time)
            if kind == "join":
                open_lives[str(learner)] = incarnation if isinstance(incarnation, int) else -1
            elif open_lives.get(str(learner)) == incarnation:
                del open_lives[str(learner)]
    for event in merges:
        time = _time(event) or begin
        for member in _members(event):
            sign(member.get("learner"), member.get("incarnation"), time)
            merged.setdefault(str(member.get("learner")), []).append(time)
    for learner, number in open_lives.items():
        # Still here: alive until the last thing known, or until its own last step.
        if learner in steps and (own := steps[learner].time).size:
            sign(learner, number, max(float(own[-1]), max(signs[learner][number])))
        else:
            sign(learner, number, end)
    return tuple(
        LearnerRun(
            name=name,
            lives=tuple(
                Life(number=number, begin=min(times) - begin, end=max(times) - begin)
                for number, times in sorted(signs.get(name, {}).items())
            ),
            merge_times=np.sort(np.array(merged.get(name, []))) - begin,
            restart_times=np.array(_restarts(events, name)) - begin,
            steps=_shifted(steps.get(name) or _steps([]), begin),
        )
        for name in sorted(signs.keys() | steps.keys(), key=_natural)
    )


def _restarts(events: list[Mapping[str, Any]], name: str) -> list[float]:
    named = {name, f"learner {name}", f"learner/{name}"}
    return [
        time
        for event in events
        if event.get("event") == "restart"
        and not named.isdisjoint(str(event.get(key)) for key in ("learner", "process", "name"))
        and (time := _time(event)) is not None
    ]


def _all_steps(directory: Path) -> dict[str, Steps]:
    paths = sorted(directory.glob("*/steps.jsonl"))
    most = max(FEWEST_STEP_LINES, MOST_STEP_LINES // max(1, len(paths)))
    found = {}
    for path in paths:
        region, _, index = path.parent.name.rpartition("-")
        stride, lines = _thinned(path, most)
        found[f"{region}/{index}"] = _steps(list(_objects(lines)), stride)
    return found


def _steps(rows: list[Mapping[str, Any]], stride: int = 1) -> Steps:
    rows = [row for row in rows if _time(row) is not None]
    tokens = np.nan_to_num(_column(rows, lambda e: _number(e, "tokens")))
    return Steps(
        time=np.maximum.accumulate(_column(rows, _time)),
        tokens=_total(tokens, stride),
        loss=_column(rows, lambda e: _number(e, "loss")),
        seconds=_column(rows, lambda e: _number(e, "seconds")),
        sync_seconds=_column(rows, lambda e: _number(e, "syncSeconds")),
        last_local_step=int(max((_number(row, "localStep", 0.0) for row in rows), default=0.0)),
    )


def _total(tokens: F64, stride: int) -> F64:
    """Running total, whether a line says the tokens of its step or of all steps so far."""
    if tokens.size > 2 and np.mean(np.diff(tokens) > 0) > 0.9:
        return np.asarray(np.maximum.accumulate(tokens))
    return np.asarray(np.cumsum(tokens) * stride)


def _shifted(steps: Steps, begin: float) -> Steps:
    return replace(steps, time=steps.time - begin)


def _thinned(path: Path, most: int) -> tuple[int, list[str]]:
    """Every n-th line so that about `most` are left, and n."""
    lines = _text(path).splitlines()
    stride = max(1, math.ceil(len(lines) / most))
    return stride, lines[stride - 1 :: stride]


def _column(
    rows: list[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float | None]
) -> F64:
    return np.array([math.nan if (v := value(row)) is None else v for row in rows], np.float64)


def _members(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    members = event.get("members")
    return [m for m in members if isinstance(m, dict)] if isinstance(members, list) else []


def _number(row: Mapping[str, Any], name: str, otherwise: float = math.nan) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    return float(value)


def _time(row: Mapping[str, Any]) -> float | None:
    """Seconds since 1970, from ISO 8601 or from seconds."""
    value = row.get("time")
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    number = _number(row, "time")
    return number if math.isfinite(number) else None


def _natural(name: str) -> tuple[str, int, str]:
    region, _, index = name.rpartition("/")
    return region, int(index) if index.isdecimal() else -1, index


def _objects(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _object(path: Path) -> Mapping[str, Any]:
    return next(iter(_objects([_text(path)])), {})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
