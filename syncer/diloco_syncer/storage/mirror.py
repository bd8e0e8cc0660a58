"""
Copies snapshots to an object store, on a thread of its own: nothing else waits for the network.

Shell. What is copied, deleted and retried is decided in `catalog` and `copy_schedule`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from diloco.errors import StorageError
from diloco.journal.records import Recorder
from diloco_syncer.storage import catalog
from diloco_syncer.storage.catalog import Claim, Copy, Manifest
from diloco_syncer.storage.claims import FencedError, claim, confirm
from diloco_syncer.storage.copy_schedule import CopySchedule, CopyState
from diloco_syncer.storage.object_store import (
    Objects,
    StoppedError,
    read_whole,
    stream,
    until,
)
from diloco_syncer.storage.snapshot_files import LocalSnapshot
from diloco_syncer.storage.store import Store
from diloco_syncer.storage.stream_check import StreamCheck

log = logging.getLogger(__name__)


class Mirror:
    """
    Keeps the newest snapshots of a directory in an object store.

    Args:
        objects: below the URL and the name of the job.
        store: the directory; its `directory_id` and `start_id` are who writes.
        keep: how many complete snapshots stay in the object store.
        run: see `Store.run`.
        claimed: made when the directory was restored; None: it is made before the first object.
        verified: the copy that this start was restored from.
        record: for `copy` lines of events.jsonl; any thread.
        clock: monotonic seconds.
    """

    def __init__(
        self, objects: Objects, store: Store, *, keep: int, run: str, record: Recorder,
        claimed: Claim | None = None, verified: Copy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._objects, self._store, self._keep, self._run = objects, store, keep, run
        self._claimed, self._verified = claimed, verified
        self._record, self._clock = record, clock
        self._schedule = CopySchedule(place=objects.url)
        if verified is not None:
            self._schedule.step = verified.step
        # What the directory had at the start may not be in the store: an attempt was interrupted.
        self._schedule.written()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="mirror", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def snapshot_written(self) -> None:
        """A snapshot is durable in the directory; any thread, returns at once."""
        with self._changed:
            self._schedule.written()
            self._changed.notify_all()

    def state(self) -> CopyState:
        """Any thread."""
        with self._changed:
            return self._schedule.state(self._clock())

    def stop(self, timeout_seconds: float) -> None:
        """
        Copy what is to be copied now, unless that fails or takes longer; then end.

        An attempt that does not end in time is abandoned: without its manifest, what it wrote never counts.
        """
        with self._changed:
            self._schedule.hurry()
            self._changed.notify_all()
            self._changed.wait_for(self._is_settled, timeout_seconds)
            self._stopping = True
            self._changed.notify_all()

    # ------------------------------------------------------------ the thread

    def _is_settled(self) -> bool:
        """Nothing is to be copied, or the last attempt failed."""
        schedule = self._schedule
        return schedule.is_idle or schedule.due_in(self._clock()) not in (None, 0.0)

    def _loop(self) -> None:
        while self._wait():
            self._attempt()

    def _wait(self) -> bool:
        """Until a copy is due; False: the process ends."""
        with self._changed:
            while not self._stopping:
                wait = self._schedule.due_in(self._clock())
                if wait == 0.0:
                    self._schedule.begin(self._clock())
                    return True
                self._changed.wait(wait)
            return False

    def _attempt(self) -> None:
        begun = self._clock()
        try:
            copied = self._copy()
        except StoppedError:
            return
        except FencedError as error:
            reason = str(error)
            self._end(lambda: self._schedule.fence(reason))
            self._failed(reason)
        except BaseException as error:  # a panic of obstore is no Exception; training continues
            expected = isinstance(error, StorageError)
            reason = str(error) if expected else f"{type(error).__name__}: {error}"
            self._end(lambda: self._schedule.failed(reason, self._clock()))
            self._failed(self.state().problem, trace=not expected)
        else:
            if copied is None:
                self._end(lambda: self._schedule.done(self._schedule.step))
                return
            step, is_new = copied
            self._end(lambda: self._schedule.done(step))
            if is_new:
                seconds = round(self._clock() - begun, 3)
                self._record("copy", step=step, ok=True, seconds=seconds)
                log.info("the snapshot of step %d is in %s", step, self._objects.url)

    def _end(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def _failed(self, reason: str, *, trace: bool = False) -> None:
        log.warning("%s", reason, exc_info=trace)
        self._record("copy", step=self._schedule.step, ok=False, detail=reason)

    # ------------------------------------------------------------ one copy

    def _copy(self) -> tuple[int, bool] | None:
        """
        Copy the newest snapshot of the directory.

        Returns:
            Its step, and whether it is new there; None: the directory has no snapshot.
        """
        found = self._store.open_newest()
        if found is None:
            return None
        with found as local:
            own = self._own_claim()
            manifest = Manifest(run=self._run, body=local.body)
            names = self._objects.names(catalog.SNAPSHOTS)
            there = catalog.complete(names)
            if there and self._is_there(there[0], names[there[0].manifest], manifest):
                return there[0].step, False
            copy = Copy(claim=own.number, number=local.number, epoch=local.epoch, step=local.step)
            self._write(copy, manifest, local, own)
        self._settle_store(copy, own)
        return copy.step, True

    def _is_there(self, copy: Copy, size_bytes: int, manifest: Manifest) -> bool:
        try:
            data = read_whole(self._objects, copy.manifest, size_bytes)
            return Manifest.decode(copy.manifest, data).identity == manifest.identity
        except StorageError:
            return False

    def _write(self, copy: Copy, manifest: Manifest, local: LocalSnapshot, own: Claim) -> None:
        check = StreamCheck(local.name, manifest.body)
        pieces = check.passed(until(self._is_stopping, local.pieces()))
        self._objects.put(copy.data, pieces, size_bytes=check.size_bytes)
        written = self._objects.names(catalog.SNAPSHOTS).get(copy.data)
        if written != check.size_bytes:
            raise StorageError(
                f"{self._objects.url}/{copy.data}: has {written} bytes, expected {check.size_bytes}"
            )
        confirm(self._objects, own)
        content = manifest.encode()
        if not self._objects.put_new(copy.manifest, content):
            # A reply that was lost: the attempt before has written it.
            there = read_whole(self._objects, copy.manifest, len(content))
            if there != content:
                raise StorageError(
                    f"{self._objects.url}/{copy.manifest}: exists with other content"
                )

    def _settle_store(self, copy: Copy, own: Claim) -> None:
        """Delete what is outdated; the copy is complete, whatever happens here."""
        try:
            names = self._objects.names(catalog.SNAPSHOTS)
            newest = catalog.complete(names)[: self._keep]
            if self._verified not in newest and copy in newest:
                self._verify(copy, names[copy.manifest])
                self._verified = copy
            confirm(self._objects, own)
            for name in catalog.outdated(names, keep=self._keep, kept=[self._verified]):
                self._objects.remove(name)
        except StoppedError:
            raise
        except StorageError as error:
            log.warning("older snapshots stay in the object store: %s", error)

    def _verify(self, copy: Copy, size_bytes: int) -> None:
        """Read a copy back."""
        name = f"{self._objects.url}/{copy.data}"
        manifest = Manifest.decode(
            copy.manifest, read_whole(self._objects, copy.manifest, size_bytes)
        )
        check = StreamCheck(name, manifest.body)
        data = stream(self._objects, copy.data, check.size_bytes)
        for _ in check.passed(until(self._is_stopping, data)):
            pass

    def _is_stopping(self) -> bool:
        return self._stopping

    # ------------------------------------------------------------ claims

    def _own_claim(self) -> Claim:
        if self._claimed is None:
            self._claimed = claim(
                self._objects, directory=self._store.directory_id(), start=self._store.start_id,
                restores=False,
            )  # fmt: skip
        confirm(self._objects, self._claimed)
        return self._claimed
