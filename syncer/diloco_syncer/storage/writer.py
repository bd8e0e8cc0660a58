"""
Snapshots and the exported model, written on one background thread; completions come back as events.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from diloco.errors import StorageError
from diloco.journal.parts import Position
from diloco.journal.records import Recorder
from diloco.runtime.disk import LOCAL, Disk
from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.storage import capture, snapshots
from diloco_syncer.storage.capture import ExportedModel, Snapshot
from diloco_syncer.storage.parameters import Parameters
from diloco_syncer.storage.store import Store

JOURNAL_SECONDS = 30.0
"""How long a snapshot waits until the lines before it are durable."""

log = logging.getLogger(__name__)


class Journal(Protocol):
    """What the writer needs of `BackgroundWriter`, whose methods these are."""

    def position(self) -> Position:
        """A place before which all lines are that the disk has, or earlier."""

    def sync(self, timeout_seconds: float) -> bool:
        """Make the lines so far durable."""

    def rotate(self, *, needed: int, heading: Mapping[str, Any] | None = None) -> bool:
        """Bound the journal."""


class SnapshotMirror(Protocol):
    """What the writer needs of `Mirror`."""

    def snapshot_written(self) -> None:
        """A snapshot is durable; returns at once."""


class ModelOutput(Protocol):
    """What the writer needs of `Output`."""

    @property
    def url(self) -> str:
        """For messages."""

    def write(self, model: ExportedModel) -> None:
        """Copy the model; StorageError: it is not there."""


class Thread(Protocol):
    """Runs one call after the other."""

    def submit(self, function: Callable[..., None], /, *args: Any) -> object:
        """Run it after all earlier ones."""

    def shutdown(self, wait: bool = True) -> None:
        """Wait until all have run."""


class Writer:
    """
    Writes in the order of the calls.

    Args:
        directory: the run directory.
        store: where snapshots go.
        record: for `snapshot` and `export` lines.
        post: gets a SnapshotDone for each snapshot, an Exported or ExportFailed for each export;
            called on the thread that writes.
        journal: events.jsonl, made durable before each snapshot and rotated after it.
        run: name of the run that the exported model belongs to.
        disk: holds the exported model.
        thread: writes; None: a thread of its own.
        mirror: of the snapshots; None: there is none.
        output: where the model goes besides the run directory; None: nowhere.
        clock: monotonic seconds.
    """

    def __init__(
        self, spec: RunSpec, directory: Path, store: Store, *,
        record: Recorder, post: Callable[[ev.Event], None], journal: Journal, run: str,
        disk: Disk = LOCAL, thread: Thread | None = None,
        mirror: SnapshotMirror | None = None, output: ModelOutput | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._spec, self._directory, self._store = spec, directory, store
        self._record, self._post, self._journal = record, post, journal
        self._run, self._disk, self._clock = run, disk, clock
        self._mirror, self._output = mirror, output
        self._pool: Thread = thread or ThreadPoolExecutor(1, thread_name_prefix="disk")

    def snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot in the background, with the position that events.jsonl has now."""
        complete = capture.with_position(snapshot, self._journal.position())
        self._pool.submit(self._snapshot, complete)

    def export(self, parameters: Parameters, *, step: int, tokens: int) -> None:
        """Export the model in the background."""
        self._pool.submit(self._export, parameters, step, tokens)

    def write(self, snapshot: Snapshot) -> None:
        """
        Write a snapshot that `with_position` completed, now.

        Raises:
            StorageError: it is not durable; the reason is logged and recorded.
        """
        begun = self._clock()
        try:
            # No snapshot may hold a merge whose line a crash of the machine takes away.
            if not self._journal.sync(JOURNAL_SECONDS):
                raise StorageError(
                    "the lines of events.jsonl before it are not durable: the disk rejected "
                    f"them, or did not respond within {JOURNAL_SECONDS:.0f} s; check the disk of {self._directory}"
                )
            self._store.write(snapshot)
        except Exception as error:
            reason = _logged(f"snapshot of step {snapshot.step}", error)
            self._record("snapshot", step=snapshot.step, ok=False, detail=reason)
            raise StorageError(reason) from error
        seconds = round(self._clock() - begun, 3)
        self._record("snapshot", step=snapshot.step, ok=True, seconds=seconds)
        if self._mirror is not None:
            self._mirror.snapshot_written()
        self._rotate(snapshot.epoch)

    def _rotate(self, epoch: int) -> None:
        try:
            needed = snapshots.needed_part(self._store)
        except StorageError as error:
            log.warning("events.jsonl is not rotated: %s", error)
            return
        schedule = {"fragments": self._spec.fragments, "interval": self._spec.interval}
        self._journal.rotate(needed=needed, heading={"epoch": epoch, **schedule})

    def close(self) -> None:
        """Wait until everything is written."""
        self._pool.shutdown(wait=True)

    def _snapshot(self, snapshot: Snapshot) -> None:
        done = ev.SnapshotDone(step=None, reason="the snapshot was interrupted")
        try:
            self.write(snapshot)
            done = ev.SnapshotDone(step=snapshot.step)
        except StorageError as error:  # logged and recorded
            done = ev.SnapshotDone(step=None, reason=str(error))
        finally:
            self._post(done)
        if done.step is not None:
            self._store.verify()

    def _export(self, parameters: Parameters, step: int, tokens: int) -> None:
        done: ev.Event = ev.ExportFailed(reason="the export was interrupted")
        try:
            model = snapshots.export(
                self._directory, parameters, self._spec, step=step, tokens=tokens, run=self._run,
                disk=self._disk,
            )  # fmt: skip
            if self._output is not None:
                self._output.write(model)
                self._record("export", step=step, ok=True, url=self._output.url)
            done = ev.Exported(step=step, path=model.path, sha256=model.sha256)
            where = f" and {self._output.url}" if self._output is not None else ""
            log.info("model of step %d is in %s%s", step, model.path, where)
        except Exception as error:
            reason = _logged(f"model of step {step}", error)
            done = ev.ExportFailed(reason=reason)
            self._record("export", step=step, ok=False, detail=reason)
        finally:
            self._post(done)


def _logged(what: str, error: Exception) -> str:
    """The reason in a sentence; an error that is not the disk's is logged with its origin."""
    expected = isinstance(error, StorageError)
    reason = str(error) if expected else f"{type(error).__name__}: {error}"
    log.error("%s: %s", what, reason, exc_info=not expected)
    return reason


def make_durable(path: Path) -> None:
    """fsync a file that another descriptor has written; a disk that refuses is logged."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        log.error("%s: %s", path, error.strerror or error)
