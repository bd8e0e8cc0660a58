"""
Copies of the steps of learners that `diloco chaos --job` makes while the job trains.

They last beyond the pods: those of a job that is complete are removed, and a new pod without a volume of its own begins
with an empty `steps.jsonl`. What an earlier pod wrote becomes an earlier part of the file (`diloco.journal.parts`).
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from diloco.errors import StorageError, UnavailableError
from diloco.journal.parts import numbers, part_path
from diloco_cli.job_view import Pod
from diloco_cli.remote import RemoteJob, fetch_steps
from diloco_local.run_directory import RunDir

NAME = "steps.jsonl"
MAX_LINE = 1 << 16


class StepCopies:
    """The copies of one run directory."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._uids = dict[str, str]()
        """Learner → UID of the pod of its last copy."""
        self._kept = dict[str, Path]()
        """Learner → what it had of the pod before that one."""

    def is_new(self, learner: str, pod: Pod) -> bool:
        """Whether the last copy of this learner is of an earlier pod."""
        return self._uids.get(learner, pod.uid) != pod.uid

    def copy(self, job: RemoteJob, learner: str, pod: Pod) -> None:
        """
        Copy the steps of a learner, of which the next copy has all again; what cannot be reached now is left for it.

        Args:
            job: with few retries.
            learner: its name.
            pod: its first.
        """
        path = self._run.state_of(learner) / NAME
        with contextlib.suppress(UnavailableError, StorageError):
            if self.is_new(learner, pod):
                self._keep(learner, path)
            fetch_steps(job, self._run, learner, pod.name)
            self._uids[learner] = pod.uid
            kept = self._kept.get(learner)
            # On a volume, the file of the new pod is the old one, and longer.
            if (
                kept is not None
                and _first(kept) == _first(path)
                and kept.stat().st_size <= path.stat().st_size
            ):
                kept.unlink()
                del self._kept[learner]

    def _keep(self, learner: str, path: Path) -> None:
        before = self._kept.get(learner)
        if not path.exists() or (before is not None and _first(before) == _first(path)):
            return  # kept already, by an attempt that brought nothing new
        names = [entry.name for entry in path.parent.iterdir()]
        kept = part_path(path, max(numbers(path, names), default=0) + 1)
        shutil.copy2(path, kept)
        self._kept[learner] = kept


def _first(path: Path) -> bytes:
    """The first line: its time distinguishes it from that of any other file."""
    with path.open("rb") as file:
        return file.readline(MAX_LINE)
