"""
Restores the newest snapshot of an object store into an empty directory, before a syncer serves.

Shell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Event

from diloco.errors import ConfigError, StorageError
from diloco.runtime.backoff import doubled
from diloco_syncer.storage import catalog
from diloco_syncer.storage.catalog import Claim, Copy, Manifest
from diloco_syncer.storage.claims import claim
from diloco_syncer.storage.durable import DiskError
from diloco_syncer.storage.object_store import (
    MissingError,
    Objects,
    ObjectsError,
    StoppedError,
    read_whole,
    stream,
    until,
)
from diloco_syncer.storage.store import Store
from diloco_syncer.storage.stream_check import StreamCheck

log = logging.getLogger(__name__)

ATTEMPTS = 6
RETRY_SECONDS = 2.0
MAX_RETRY_SECONDS = 20.0
"""After a minute the process ends with the reason; whatever keeps it running starts it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a start found in the object store."""

    claim: Claim
    """Under which it writes."""
    copy: Copy | None
    """What is in the directory now; None: the object store has no snapshot either."""


def restore(
    objects: Objects, store: Store, *, spec: str, stop: Event,
    show: Callable[[str], None] = lambda text: None,
) -> Restored:  # fmt: skip
    """
    Claim the object store, and restore the newest snapshot that verifies.

    A start at step 0 would replace what is there: while the store cannot be read, it waits.

    Args:
        objects: below the URL and the name of the job.
        store: an empty directory.
        spec: hash of the RunSpec.
        stop: ends the wait.
        show: gets a sentence about what it does or waits for.

    Raises:
        ConfigError: the snapshots are of a job with another spec.
        StoppedError: the process ends.
        StorageError: the store cannot be read, or it has snapshots and none can be.
    """
    show(f"looking for snapshots in {objects.url}")
    for failures in range(ATTEMPTS):
        try:
            return _restore(objects, store, spec=spec, stop=stop, show=show)
        except ObjectsError as error:
            if error.denied or failures == ATTEMPTS - 1:
                raise
            wait = doubled(RETRY_SECONDS, failures, MAX_RETRY_SECONDS)
            log.warning("%s; next attempt in %.0f s", error, wait)
            show(f"the snapshots cannot be read: {error}")
            if stop.wait(wait):
                raise StoppedError("the process ends") from None
    raise AssertionError("unreachable")


def _restore(
    objects: Objects, store: Store, *, spec: str, stop: Event, show: Callable[[str], None]
) -> Restored:
    _refuse_other_specs(objects, spec)
    own = claim(objects, directory=store.directory_id(), start=store.start_id, restores=True)
    names = objects.names(catalog.SNAPSHOTS)
    damage = []
    for copy in catalog.complete(names):
        try:
            _adopt(objects, store, copy, names=names, spec=spec, stop=stop, show=show)
        except StorageError as error:
            if not _is_damage(error):
                raise  # it may be intact, and an older one would undo merges
            log.warning("snapshot skipped, trying the previous one: %s", error)
            damage.append(str(error))
            continue
        log.info("restored the snapshot of step %d from %s", copy.step, objects.url)
        return Restored(claim=own, copy=copy)
    if damage:
        raise StorageError(
            f"{objects.url}: none of its {len(damage)} snapshots can be read ({'; '.join(damage)}); restore "
            "the objects, or give another URL to begin at step 0"
        )
    log.info("%s has no snapshot: the job begins at step 0", objects.url)
    return Restored(claim=own, copy=None)


def _refuse_other_specs(objects: Objects, spec: str) -> None:
    """Before the claim, which would end the copies of the job whose name and URL this one has by mistake."""
    names = objects.names(catalog.SNAPSHOTS)
    for copy in catalog.complete(names):
        try:
            _manifest(objects, copy, names, spec)
            return
        except StorageError as error:
            if not _is_damage(error):
                raise


def _is_damage(error: StorageError) -> bool:
    """It is of the snapshot, not of what it was read from or written to."""
    return isinstance(error, MissingError) or not isinstance(
        error, ObjectsError | DiskError | StoppedError
    )


def _manifest(objects: Objects, copy: Copy, names: Mapping[str, int], spec: str) -> Manifest:
    data = read_whole(objects, copy.manifest, names[copy.manifest])
    manifest = Manifest.decode(f"{objects.url}/{copy.manifest}", data)
    if manifest.spec != spec:
        raise ConfigError(
            f"{objects.url}: its snapshots belong to run spec {manifest.spec}, this job has {spec}; use the "
            "manifest that they were made with, or another URL"
        )
    return manifest


def _adopt(
    objects: Objects, store: Store, copy: Copy, *, names: Mapping[str, int], spec: str, stop: Event,
    show: Callable[[str], None],
) -> None:  # fmt: skip
    manifest = _manifest(objects, copy, names, spec)
    check = StreamCheck(f"{objects.url}/{copy.data}", manifest.body)
    # Otherwise, the service refuses to read behind the end, as it refuses for other reasons.
    if (found := names.get(copy.data)) != check.size_bytes:
        raise StorageError(
            f"{objects.url}/{copy.data}: has {found} bytes, expected {check.size_bytes}"
        )

    def shown(pieces: Iterable[bytes]) -> Iterator[bytes]:
        done = 0
        for piece in pieces:
            done += len(piece)
            show(
                f"restoring the snapshot of step {copy.step} from {objects.url}: "
                f"{done >> 20} of {check.size_bytes >> 20} MiB"
            )
            yield piece

    data = until(stop.is_set, stream(objects, copy.data, check.size_bytes))
    store.adopt(manifest.body, check.passed(shown(data)), run=manifest.run)
