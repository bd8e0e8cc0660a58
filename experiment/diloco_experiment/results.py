"""
What a cell gave, as a value and as a file.

A file is written when its cell ends, as a whole, under the digest of its task: an interrupted study
continues with the cells that have none, and a changed one runs only what is new.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from diloco.runtime import files
from diloco_experiment.tasks import Task

MAX_BYTES = 1 << 20
"""Of a file of a cell; `study.MAX_EVALUATIONS` and `pool.MAX_DETAIL` keep it below."""


class Status(StrEnum):
    """How a cell ended."""

    OK = "ok"
    DIVERGED = "diverged"
    """A loss is not finite."""
    HALTED = "halted"
    """The syncer waits for a person, or the job did not complete within its limit of virtual time."""
    FAILED = "failed"
    """A checker found a broken promise, or the program has a defect; runs again next time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a cell gave; a function of its task."""

    status: Status
    detail: str = ""
    """Why it is not `ok`."""
    curve: tuple[tuple[int, float], ...] = ()
    """Global step and validation loss of Θ; only finite losses."""
    train_loss: float | None = None
    """Mean of the last 5 % of the learners' steps."""
    steps: int = 0
    """Global."""
    local_steps: int = 0
    """Of all learners."""
    tokens: int = 0
    """Trained on by all learners."""
    merged_tokens: int = 0
    """Tokens of members, per fragment."""
    merges: int = 0
    members: float = 0.0
    """Mean number in a merge."""
    restarts: int = 0
    """Of learners."""
    virtual_seconds: float = 0.0
    theta: str = ""
    """SHA-256 of the final Θ, 16 digits."""
    made_by: str = ""
    """Versions, kind of CPU and digest of the data: what decides the result besides the task."""

    @property
    def loss(self) -> float:
        """Validation loss of the final Θ; NaN: there is none."""
        return self.curve[-1][1] if self.status is Status.OK and self.curve else math.nan


@dataclass(slots=True)
class Curve:
    """Collects the points of a curve."""

    points: list[tuple[int, float]] = field(default_factory=list)

    def due(self, task: Task, step: int) -> bool:
        """Whether Θ is evaluated after this global step."""
        return step % task.evaluate_every == 0 or step == task.spec.steps

    def add(self, step: int, loss: float) -> None:
        """Θ of a step has this loss."""
        if math.isfinite(loss):
            self.points.append((step, loss))


def digest_of(vectors: Iterable[npt.NDArray[np.float32]]) -> str:
    """16 hex digits over values."""
    found = hashlib.sha256()
    for vector in vectors:
        found.update(np.ascontiguousarray(vector).tobytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Folder:
    """The directory of a study."""

    path: Path
    expected: dict[str, str] = field(default_factory=dict)
    """`made_by` of results that are still valid, by digest; those of other tasks are not compared."""
    _known: dict[str, Result] = field(default_factory=dict)

    def cell(self, digest: str) -> Path:
        """The file of a task."""
        return self.path / "cells" / f"{digest}.json"

    def read(self, digest: str) -> Result | None:
        """
        The result of a task.

        None: there is none, the file is damaged, or other versions or data made it, so that the cell runs again.
        """
        if digest not in self._known:
            try:
                with self.cell(digest).open("rb") as file:
                    self._known[digest] = parse(file.read(MAX_BYTES))
            except (OSError, ValueError):
                return None
        found = self._known[digest]
        return found if self.expected.get(digest, found.made_by) == found.made_by else None

    def write(self, digest: str, result: Result) -> None:
        """Store a result."""
        self.cell(digest).parent.mkdir(parents=True, exist_ok=True)
        files.replace(self.cell(digest), text_of(result), durable=True)
        self._known[digest] = result


def csv_of(rows: Sequence[Sequence[object]]) -> str:
    """The text of a CSV file."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[_safe(cell) for cell in row] for row in rows])
    return out.getvalue()


def _safe(cell: object) -> str:
    """One line, which a spreadsheet does not take for a formula."""
    text = " ".join(str(cell).split())
    return f"'{text}" if text[:1] in ("=", "@") else text


def text_of(result: Result) -> str:
    """JSON of a result; equal results give equal bytes."""
    return json.dumps(asdict(result), sort_keys=True, allow_nan=False) + "\n"


def parse(data: bytes) -> Result:
    """
    The inverse of `text_of`.

    Raises:
        ValueError: `text_of` does not write this.
    """
    result = _RESULT.validate_json(data)
    if text_of(result).encode() != data:  # a field is missing, or has another type
        raise ValueError("not a result")
    return result


_RESULT = TypeAdapter(Result)
