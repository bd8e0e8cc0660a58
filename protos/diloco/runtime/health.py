"""
The health file that a program writes for the first process of its container: small JSON, replaced
as a whole. Standard library only.

Times are `time.monotonic()`, the same clock in every process of a machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

from diloco.runtime import files, untrusted_json

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""The file is written this often at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of a program."""

    at: float
    """When this was written."""
    ready: bool
    """It does its work: a learner trains in the job, a syncer serves."""
    why: str
    """What it does or waits for, in one sentence."""
    progress_at: float
    """Its last progress: an optimizer step, a turn of the engine."""
    joined: bool = False
    """A learner: it has been part of the job."""
    left: str = ""
    """A learner: why it left the job; "": it has not."""
    problem: str = ""
    """What is wrong with its work, in one word, although it runs; `why` has the sentence. "": nothing."""

    def to_json(self) -> str:
        """The file's content."""
        return json.dumps(
            {
                **{"at": self.at, "ready": self.ready, "why": self.why},
                **{"progressAt": self.progress_at, "joined": self.joined},
                **{"left": self.left, "problem": self.problem},
            }
        )


def read(path: Path) -> Health | None:
    """The last state; None: nothing was written yet, or it cannot be read."""
    try:
        data = untrusted_json.parse(files.read(path), finite=False)
        return Health(
            at=float(data["at"]),
            ready=bool(data["ready"]),
            why=str(data["why"]),
            progress_at=float(data["progressAt"]),
            joined=bool(data.get("joined")),
            left=str(data.get("left", "")),
            problem=str(data.get("problem", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


class HealthFile:
    """
    Writes the health file; used from one thread.

    Args:
        path: the file; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._due_at = float("-inf")
        self._warned = False

    def due_at(self) -> float | None:
        """When the next write is due; None: never."""
        return None if self._path is None else self._due_at

    def write(self, health: Health, *, now: bool = False) -> None:
        """Write if it is due, or `now`; a disk that refuses is logged once."""
        if self._path is None or not (now or health.at >= self._due_at):
            return
        self._due_at = health.at + WRITE_SECONDS
        self._replace(self._path, health)

    def _replace(self, path: Path, health: Health) -> None:
        try:
            files.replace(path, health.to_json(), mode=files.PRIVATE)
        except OSError as error:
            if not self._warned:
                log.warning("%s: %s; probes will report this process as dead", path, error.strerror)
            self._warned = True

    def settle(self, timeout_seconds: float) -> None:
        """Return when what was passed to `write` is in the file, or after the time."""


class BackgroundHealthFile(HealthFile):
    """A health file whose caller never waits for the disk: the newest state is what is written."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self._states: queue.Queue[tuple[Path, Health] | threading.Event] = queue.Queue(1)
        if path is not None:
            threading.Thread(target=self._run, name="health", daemon=True).start()

    def _replace(self, path: Path, health: Health) -> None:
        # Only what the disk does is left to the thread: when the next write is due must not depend on it,
        # since a caller that sleeps until then would not sleep while the disk hangs.
        with contextlib.suppress(queue.Empty):
            self._states.get_nowait()
        with contextlib.suppress(queue.Full):
            self._states.put_nowait((path, health))

    def settle(self, timeout_seconds: float) -> None:
        """As HealthFile does; a process that ends calls it, since the thread ends with the process."""
        if self._path is None:
            return
        settled = threading.Event()
        with contextlib.suppress(queue.Full):
            self._states.put(settled, timeout=timeout_seconds)
            settled.wait(timeout_seconds)

    def _run(self) -> None:
        while True:
            newest = self._states.get()
            if isinstance(newest, threading.Event):
                newest.set()
                continue
            try:
                super()._replace(*newest)
            except Exception:
                log.exception("%s could not be written", self._path)
