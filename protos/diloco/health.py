"""
The sign of life that a program of ours leaves for the first process of its container: one small
JSON file, replaced as a whole. Standard library only.

Times are `time.monotonic()`, the same clock in every process of a machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""A sign of life is left this often at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a program is."""

    at: float
    """When this was said."""
    ready: bool
    """It does its work now: a learner trains in the job, a syncer serves."""
    why: str
    """One sentence: what it does, or what it waits for."""
    progress_at: float
    """When its work last moved on: an optimizer step, a turn of the engine."""

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps(
            {"at": self.at, "ready": self.ready, "why": self.why, "progressAt": self.progress_at}
        )


def read(path: Path) -> Health | None:
    """What was said last; None: nothing was said yet, or it cannot be read."""
    try:
        data = json.loads(path.read_text())
        return Health(
            at=float(data["at"]),
            ready=bool(data["ready"]),
            why=str(data["why"]),
            progress_at=float(data["progressAt"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


class HealthFile:
    """
    Leaves signs of life in a file; used from one thread.

    Args:
        path: None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._due_at = float("-inf")
        self._complained = False

    def due_at(self) -> float | None:
        """When the next one may be left; None: never."""
        return None if self._path is None else self._due_at

    def write(self, health: Health, *, now: bool = False) -> None:
        """Leave it, if it is time; `now`: whatever the time. A disk that refuses is said once."""
        if self._path is None or not (now or health.at >= self._due_at):
            return
        self._due_at = health.at + WRITE_SECONDS
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            temporary.write_text(health.to_json())
            os.replace(temporary, self._path)
        except OSError as error:
            if not self._complained:
                log.warning("%s: %s; it will look dead from outside", self._path, error.strerror)
            self._complained = True
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
