"""
What the syncer hands to the disk, as values: its state at a commit boundary, and the model. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from diloco.journal.parts import Position
from diloco.spec import RunSpec
from diloco_syncer.storage.parameters import Parameters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The whole durable state of a syncer at one global step."""

    step: int
    epoch: int
    arrays: Mapping[str, npt.NDArray[Any]]
    """fp32 or uint8, any shape; the order is kept."""
    meta: Mapping[str, Any]
    """JSON values."""
    chosen: bool = False
    """By a person, instead of a newer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """A model.safetensors on disk."""

    path: str
    sha256: str
    step: int
    """Global step of its parameters."""


def capture(
    parameters: Parameters, engine: Mapping[str, Any], *, spec: RunSpec, epoch: int, step: int
) -> Snapshot:
    """
    The state at a commit boundary: references and small values, nothing is copied, no disk is used.

    Args:
        parameters: Θ as of that boundary.
        engine: `Engine.to_json()` as of that boundary.
        spec: of the job.
        epoch: of this syncer.
        step: global step of the boundary.
    """
    arrays, facts = parameters.to_snapshot()
    meta = {"spec": spec.hash, "engine": engine, "theta": facts}
    return Snapshot(step=step, epoch=epoch, arrays=arrays, meta=meta)


def with_position(snapshot: Snapshot, events: Position) -> Snapshot:
    """
    The snapshot with a position in events.jsonl: a restart replays what comes after it.

    Args:
        snapshot: from `capture`.
        events: every line that is not in the state comes after it.
    """
    place = {"part": events.part, "offset": events.offset}
    return replace(snapshot, meta={**snapshot.meta, "events": place})
