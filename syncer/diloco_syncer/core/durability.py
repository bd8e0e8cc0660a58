"""
When the state is written, and when the job is complete. Pure.

    TRAINING ──T is reached──► SNAPSHOT ──durable──► EXPORT ──exported──► COMPLETE
                                 ▲ │ failed            ▲ │ failed
                                 └─┘ after a back-off  └─┘ after a back-off

Learners are notified in COMPLETE only, so a job that is complete has a model.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco.runtime.backoff import doubled
from diloco_syncer.core import events as ev

RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 60.0


class Stage(enum.Enum):
    """How far the job is."""

    TRAINING = "Training"
    SNAPSHOT = "Snapshot"
    EXPORT = "Export"
    COMPLETE = "Complete"


@dataclass(slots=True, kw_only=True)
class Durability:
    """Requests snapshots and the export; at most one snapshot is written at a time."""

    every_steps: int
    capture: Callable[[], dict[str, Any]]
    """The engine's state as JSON, at the moment of the call."""
    snapshot_step: int = 0
    """Step of the last snapshot that was requested."""
    durable_step: int = -1
    """Step of the newest durable snapshot; -1: there is none."""
    stage: Stage = Stage.TRAINING
    failure: str = ""
    """Why the last attempt to write failed; empty: it did not."""
    _running: bool = False
    _wanted: bool = False
    _failures: int = 0
    retry_at: float | None = None
    """When a failed snapshot or export is tried again, monotonic."""

    def committed(self, step: int) -> list[ev.Decision]:
        """Global step `step` is committed: write it if one is due."""
        return self.snapshot(step) if step - self.snapshot_step >= self.every_steps else []

    def snapshot(self, step: int) -> list[ev.Decision]:
        """Write the state as of now, or as soon as the running snapshot has ended."""
        if self._running:
            self._wanted = True
            return []
        self._running, self.snapshot_step, self.retry_at = True, step, None
        return [ev.TakeSnapshot(step=step, engine=self.capture())]

    def snapshot_done(self, event: ev.SnapshotDone, step: int, now: float) -> list[ev.Decision]:
        """A snapshot ended; `step` is the current global step."""
        self._running = False
        wanted, self._wanted = self._wanted, False
        if event.step is None:
            self._failed(event.reason, now)
        else:
            self.durable_step = max(self.durable_step, event.step)
            self._failures, self.failure = 0, ""
        if self.stage is Stage.SNAPSHOT:
            return self._finish_snapshot(step)
        return self.snapshot(step) if wanted and self.stage is Stage.TRAINING else []

    def reached_end(self, step: int) -> list[ev.Decision]:
        """Global step T is done and nothing is in flight."""
        self.stage = Stage.SNAPSHOT
        return self._finish_snapshot(step)

    def exported(self) -> list[ev.Decision]:
        """The model is written."""
        self.stage, self.failure, self.retry_at = Stage.COMPLETE, "", None
        return []

    def export_failed(self, reason: str, now: float) -> None:
        """The model could not be written."""
        self._failed(reason, now)

    def tick(self, step: int, now: float) -> list[ev.Decision]:
        """Try again what failed, when its back-off is over."""
        if self.retry_at is None or now < self.retry_at:
            return []
        self.retry_at = None
        if self.stage is Stage.EXPORT:
            return [ev.Finish(step=step)]
        return self._finish_snapshot(step) if self.stage is Stage.SNAPSHOT else self.snapshot(step)

    def waiting_for(self) -> str:
        """What the end of the job waits for; empty: nothing."""
        what = {
            Stage.SNAPSHOT: "the last snapshot to become durable",
            Stage.EXPORT: "the model to be exported",
        }.get(self.stage, "")
        return f"{what}; last failure: {self.failure}" if what and self.failure else what

    def _finish_snapshot(self, step: int) -> list[ev.Decision]:
        if self.durable_step >= step:
            self.stage = Stage.EXPORT
            return [ev.Finish(step=step)]
        return [] if self._running or self.retry_at is not None else self.snapshot(step)

    def _failed(self, reason: str, now: float) -> None:
        self.failure = reason
        self.retry_at = now + doubled(RETRY_SECONDS, self._failures, MAX_RETRY_SECONDS)
        self._failures += 1
