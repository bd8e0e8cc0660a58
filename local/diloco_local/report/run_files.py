"""
The content of a run directory, read once and arranged for the report.

Any file may be missing or incomplete: a run that just started, a line truncated by a kill, a status
of an older version. Unreadable parts are skipped and are never an error.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.journal.audit import Audit, audit_parts
from diloco.journal.reader import lines as journal_lines
from diloco.journal.reader import objects
from diloco.journal.records import Complete, Join, Leave, Merge, Refuse, Restart
from diloco_local.faults import BeginRecord, EndRecord, PlanRecord, SkipRecord

F64 = npt.NDArray[np.float64]

MAX_STEP_LINES = 200_000
"""Lines that are parsed of all steps.jsonl together; longer files are sampled."""
MIN_STEP_LINES = 1_000

MAX_METRICS = 16
"""Of the user's scores that are shown."""

_MAX_NUMBER = 1e30
_OWN_OF_SCORES = ("time", "step", "tokens", "loss", "seconds", "epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A sample of a learner's optimizer steps; arrays of equal length, in order of time."""

    time: F64
    tokens: F64
    """Trained by this learner up to this step, in all its incarnations."""
    loss: F64
    seconds: F64
    sync_seconds: F64
    learning_rate: F64
    result_age: F64
    """Global steps from the merge of a result to the step that applied it; NaN in the other steps."""
    local_step: F64
    last_local_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault of `diloco chaos`."""

    kind: str
    target: str
    begin: float
    end: float
    flipped: int
    """Bytes that it inverted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """All faults of a run."""

    seed: int
    """Of the last plan."""
    faults: tuple[InjectedFault, ...]
    skipped: Mapping[str, int]
    """Number of faults of the last plan that did not begin, by kind."""
    earlier: int
    """Number of faults of the plans before it, the first in `faults`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One process of a learner, or one epoch of the syncer."""

    number: int
    """Incarnation or epoch."""
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRun:
    """A learner over all its incarnations."""

    name: str
    lifetimes: tuple[Lifetime, ...]
    merge_times: F64
    merge_numbers: F64
    """Of the merges that it took part in, in the order of the event log; from 0 on."""
    merge_shares: F64
    """Its part of the members' weights in each of them."""
    restart_times: F64
    """When the supervisor restarted it."""
    restarts: int
    """Its processes after the first, without those that a resumed run started."""
    refusals: Mapping[str, int]
    """What the syncer refused of it, by reason."""
    refusal_times: F64
    steps: Steps

    @property
    def tokens(self) -> float:
        """Trained in all its incarnations."""
        return float(self.steps.tokens[-1]) if self.steps.tokens.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Merges:
    """All merges; arrays of equal length, in the order of the event log."""

    time: F64
    step: F64
    quorum_seconds: F64
    grace_seconds: F64
    sync_seconds: F64
    members: F64
    quorum: F64
    bytes_up: F64
    bytes_down: F64
    delta_norm: F64
    tokens: F64
    """Of all members, in their copies of the fragment."""
    base_age: F64
    """Global steps since the oldest version that a member's delta refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Evaluations of the syncer's Θ."""

    time: F64
    tokens: F64
    loss: F64
    others: Mapping[str, F64]
    """Other numbers of the user's scores; NaN where one has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything the report shows; times are seconds since the start of the run."""

    name: str
    state: str
    step: int
    steps: int | None
    tokens: float
    seconds: float
    spec: Mapping[str, Any]
    epochs: tuple[Lifetime, ...]
    suspensions: tuple[tuple[float, float], ...]
    """Begin and end of the times at which neither syncer nor learners ran."""
    learners: tuple[LearnerRun, ...]
    merges: Merges
    scores: Scores
    audit: Audit
    sample: str | None
    chaos: Chaos | None = None
    """None: no faults were injected."""

    def tokens_at(self, time: F64) -> F64:
        """Tokens of all learners together at these times."""
        total = np.zeros(time.shape)
        for learner in self.learners:
            steps = learner.steps
            if steps.time.size:
                total += np.interp(time, steps.time, steps.tokens, left=0.0)
        return total


def load(run_dir: Path) -> Run:
    """Read a run directory, as far as it exists."""
    lines = _lines(run_dir / "events.jsonl")
    events = list(objects(line for _, line in lines))
    spec, status = _object(run_dir / "spec.json"), _object(run_dir / "status.json")
    steps = _all_steps(run_dir / "learners")
    scores = list(objects(line for _, line in _lines(run_dir / "eval.jsonl")))

    stamps = [t for e in (*events, *scores) if (t := _time(e)) is not None]
    stamps += [float(s.time[i]) for s in steps.values() if s.time.size for i in (0, -1)]
    begin, end = (min(stamps), max(stamps)) if stamps else (0.0, 0.0)

    merges = [e for e in events if e.get("event") == Merge.kind and _time(e) is not None]
    epochs = _epochs(events, begin)
    learners, suspensions = _without_resumes(_learners(events, merges, steps, begin, end), epochs)
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
        epochs=epochs,
        suspensions=suspensions,
        learners=learners,
        merges=_merges(merges, begin),
        scores=Scores(
            time=_column(scores, _time) - begin,
            tokens=_column(scores, lambda e: _number(e, "tokens")),
            loss=_column(scores, lambda e: _number(e, "loss")),
            others=_other_numbers(scores),
        ),
        audit=audit_parts(lines),
        sample=sample or None,
        chaos=_chaos(
            list(objects(line for _, line in _lines(run_dir / "faults.jsonl"))), begin, end
        ),
    )


def _chaos(lines: Sequence[Mapping[str, Any]], begin: float, end: float) -> Chaos | None:
    """The faults of all runs in this directory, of which each begins with a plan."""
    seed, faults, skipped, earlier = 0, list[InjectedFault](), Counter[str](), 0
    active: dict[Any, int] = {}
    for line in lines:
        kind, time, number = line.get("event"), _time(line), line.get("number")
        if kind == PlanRecord.kind:
            seed, active = int(_number(line, "seed", 0.0)), {}
            skipped, earlier = Counter(), len(faults)
        elif kind == SkipRecord.kind:
            skipped[str(line.get("fault"))] += 1
        elif kind == BeginRecord.kind and time is not None and isinstance(number, int):
            at = time - begin
            # Without the line of its end, it ended with the run, or after its time.
            planned = min(at + max(0.0, _number(line, "seconds", 0.0)), max(at, end - begin))
            active[number] = len(faults)
            faults.append(
                InjectedFault(
                    kind=str(line.get("fault")), target=str(line.get("target")), begin=at, end=planned, flipped=0
                )
            )  # fmt: skip
        elif kind == EndRecord.kind and time is not None and number in active:
            place = active.pop(number)
            flipped = int(_number(line, "flipped", 0.0))
            faults[place] = replace(faults[place], end=time - begin, flipped=flipped)
    if not lines:
        return None
    return Chaos(seed=seed, faults=tuple(faults), skipped=skipped, earlier=earlier)


def _state(events: Iterable[Mapping[str, Any]]) -> str:
    return "Complete" if any(e.get("event") == Complete.kind for e in events) else "Unknown"


def _merges(merges: Sequence[Mapping[str, Any]], begin: float) -> Merges:
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
        delta_norm=column("deltaNorm"),
        tokens=_column(merges, lambda e: sum(_number(m, "tokens", 0.0) for m in _members(e))),
        base_age=_column(merges, _base_age),
    )


def _base_age(merge: Mapping[str, Any]) -> float:
    """Of the member with the oldest base; NaN without one: fragments that came whole have none."""
    bases = [base for m in _members(merge) if math.isfinite(base := _number(m, "base"))]
    return _number(merge, "step") - min(bases) if bases else math.nan


def _other_numbers(scores: Sequence[Mapping[str, Any]]) -> Mapping[str, F64]:
    names = dict.fromkeys(
        name
        for score in scores
        for name in score
        if name not in _OWN_OF_SCORES and math.isfinite(_number(score, name))
    )
    return {
        name: _column(scores, lambda e, name=name: _number(e, name))  # type: ignore[misc]
        for name in list(names)[:MAX_METRICS]
    }


def _without_resumes(
    learners: Sequence[LearnerRun], epochs: Sequence[Lifetime]
) -> tuple[tuple[LearnerRun, ...], tuple[tuple[float, float], ...]]:
    """The learners with their restarts, and when the whole run was suspended: no process ran from then to then."""
    gaps = []
    for before, after in itertools.pairwise(epochs):
        runs = [life for learner in learners for life in learner.lifetimes]
        middle = (before.end + after.begin) / 2
        # A learner that trains while the syncer restarts is the same process before and after.
        if after.begin > before.end and not any(life.begin < middle < life.end for life in runs):
            ends = [life.end for life in runs if life.end <= middle]
            gaps.append((max([before.end, *ends]), after.begin))

    def resumed(learner: LearnerRun) -> int:
        begins = [life.begin for life in learner.lifetimes]
        first, last = min(begins, default=0.0), max(begins, default=0.0)
        return sum(first < end <= last for _, end in gaps)

    counted = tuple(
        replace(learner, restarts=max(0, len(learner.lifetimes) - 1 - resumed(learner)))
        for learner in learners
    )
    return counted, tuple(gaps)


def _epochs(events: Sequence[Mapping[str, Any]], begin: float) -> tuple[Lifetime, ...]:
    """The epochs of the syncer, from the first to the last event of each."""
    seen: dict[int, list[float]] = {}
    for event in events:
        time, epoch = _time(event), event.get("epoch")
        # Events of the supervisor carry the last epoch that it knew.
        if time is not None and isinstance(epoch, int) and event.get("event") != Restart.kind:
            seen.setdefault(epoch, []).append(time - begin)
    return tuple(
        Lifetime(number=epoch, begin=min(times), end=max(times))
        for epoch, times in sorted(seen.items())
    )


def _learners(
    events: Sequence[Mapping[str, Any]],
    merges: Sequence[Mapping[str, Any]],
    steps: Mapping[str, Steps],
    begin: float,
    end: float,
) -> tuple[LearnerRun, ...]:
    merged: dict[str, list[tuple[float, int, float]]] = {}
    refused: dict[str, list[tuple[float, str]]] = {}
    sightings: dict[str, dict[int, list[float]]] = {}
    """learner → incarnation → times at which it was running."""
    running: dict[str, int] = {}

    def seen(learner: object, incarnation: object, time: float) -> None:
        if isinstance(learner, str) and isinstance(incarnation, int):
            sightings.setdefault(learner, {}).setdefault(incarnation, []).append(time)

    for event in events:
        time, kind = _time(event), event.get("event")
        if time is None:
            continue
        learner, incarnation = event.get("learner"), event.get("incarnation")
        if kind == Refuse.kind:
            refused.setdefault(str(learner), []).append((time, str(event.get("reason"))))
        if (
            isinstance(learner, str)
            and isinstance(incarnation, int)
            and kind in (Join.kind, Leave.kind)
        ):
            seen(learner, incarnation, time)
            if kind == Join.kind:
                running[learner] = incarnation
            elif running.get(learner) == incarnation:
                del running[learner]
    for number, event in enumerate(merges):
        time, members = _time(event) or begin, _members(event)
        total = sum(_number(member, "weight", 0.0) for member in members)
        for member in members:
            seen(member.get("learner"), member.get("incarnation"), time)
            share = _number(member, "weight", 0.0) / total if total > 0 else 0.0
            merged.setdefault(str(member.get("learner")), []).append((time, number, share))
    for learner, number in running.items():
        # Not left: it runs until its own last step, or until the last known time.
        if learner in steps and (own := steps[learner].time).size:
            seen(learner, number, max(float(own[-1]), max(sightings[learner][number])))
        else:
            seen(learner, number, end)
    return tuple(
        LearnerRun(
            name=name,
            lifetimes=tuple(
                Lifetime(number=number, begin=min(times) - begin, end=max(times) - begin)
                for number, times in sorted(sightings.get(name, {}).items())
            ),
            merge_times=np.sort(_part(merged.get(name, []), 0)) - begin,
            merge_numbers=_part(merged.get(name, []), 1),
            merge_shares=_part(merged.get(name, []), 2),
            restart_times=np.array(_restarts(events, name)) - begin,
            restarts=0,
            refusals=Counter(reason for _, reason in refused.get(name, [])),
            refusal_times=_part(refused.get(name, []), 0) - begin,
            steps=_shifted(steps.get(name) or _steps([]), begin),
        )
        for name in sorted(sightings.keys() | steps.keys(), key=_natural)
    )


def _part(rows: Sequence[tuple[Any, ...]], column: int) -> F64:
    return np.array([row[column] for row in rows], np.float64)


def _restarts(events: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [
        time
        for event in events
        if event.get("event") == Restart.kind
        and event.get("process") == name
        and (time := _time(event)) is not None
    ]


def _all_steps(directory: Path) -> dict[str, Steps]:
    paths = sorted(directory.glob("*/steps.jsonl"))
    limit = max(MIN_STEP_LINES, MAX_STEP_LINES // max(1, len(paths)))
    found = {}
    for path in paths:
        region, _, index = path.parent.name.rpartition("-")
        stride, lines = _sampled(path, limit)
        found[f"{region}/{index}"] = _steps(list(objects(lines)), stride)
    return found


def _steps(rows: Sequence[Mapping[str, Any]], stride: int = 1) -> Steps:
    rows = [row for row in rows if _time(row) is not None]
    tokens = np.nan_to_num(_column(rows, lambda e: _number(e, "tokens")))
    return Steps(
        time=np.maximum.accumulate(_column(rows, _time)),
        tokens=_total(tokens, stride),
        loss=_column(rows, lambda e: _number(e, "loss")),
        seconds=_column(rows, lambda e: _number(e, "seconds")),
        sync_seconds=_column(rows, lambda e: _number(e, "syncSeconds")),
        learning_rate=_column(rows, lambda e: _number(e, "learningRate")),
        result_age=_column(rows, lambda e: _number(e, "resultAge")),
        local_step=_column(rows, lambda e: _number(e, "localStep")),
        last_local_step=int(max((_number(row, "localStep", 0.0) for row in rows), default=0.0)),
    )


def _total(tokens: F64, stride: int) -> F64:
    """Running total, whether lines contain the tokens per step or the running total."""
    if tokens.size > 2 and np.mean(np.diff(tokens) > 0) > 0.9:
        return np.asarray(np.maximum.accumulate(tokens))
    return np.asarray(np.cumsum(tokens) * stride)


def _shifted(steps: Steps, begin: float) -> Steps:
    return replace(steps, time=steps.time - begin)


def _sampled(path: Path, limit: int) -> tuple[int, list[str]]:
    """n, and every n-th line, so that about `limit` lines remain."""
    lines = [line for _, line in _lines(path)]
    stride = max(1, math.ceil(len(lines) / limit))
    return stride, lines[stride - 1 :: stride]


def _column(
    rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float | None]
) -> F64:
    return np.array([math.nan if (v := value(row)) is None else v for row in rows], np.float64)


def _members(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    members = event.get("members")
    return [m for m in members if isinstance(m, dict)] if isinstance(members, list) else []


def _number(row: Mapping[str, Any], name: str, default: float = math.nan) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    # Numbers beyond this, infinity and whole numbers of hundreds of digits are none that a run has.
    return float(value) if abs(value) <= _MAX_NUMBER else default


def _time(row: Mapping[str, Any]) -> float | None:
    """Seconds since 1970, from ISO 8601 or from seconds."""
    value = row.get("time")
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return None
    number = _number(row, "time")
    return number if math.isfinite(number) else None


def _natural(name: str) -> tuple[str, int, str]:
    region, _, index = name.rpartition("/")
    return region, int(index) if index.isdecimal() else -1, index


def _object(path: Path) -> Mapping[str, Any]:
    return next(iter(objects([_text(path)])), {})


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        return list(journal_lines(path))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
