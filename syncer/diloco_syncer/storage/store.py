"""
The durable state of a syncer: snapshots and counters.

Shell. A snapshot is two files:

    000007-epoch-2-step-96.safetensors   Θ, momentum and further arrays
    000007-epoch-2-step-96.json          manifest: sizes, SHA-256 of everything, JSON state

    data: temporary name, fsync, rename, fsync directory; then the manifest likewise; then the
    oldest are deleted

A snapshot without a manifest does not count, so a crash between any two steps leaves the previous
one (docs/algorithm.md, "Snapshots"). When none of those that are there can be read, or the disk refuses
to read the newest one, a person decides with the file `from-snapshot`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diloco.errors import DamagedError, StorageError
from diloco.model.tensorfile import Entry, parse
from diloco.runtime import files
from diloco.runtime.disk import LOCAL, Disk, File, Mode, read, write_all
from diloco.runtime.disk import replace as replace_file
from diloco_syncer.storage import counters
from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.durable import (
    Array,
    Fault,
    TensorFile,
    bytes_of,
    digest,
    no_fault,
    os_errors,
    pieces,
    publish,
    read_into,
    write_temporary,
)
from diloco_syncer.storage.snapshot_files import (
    FORMAT,
    NAME,
    LocalSnapshot,
    Stem,
    encode_manifest,
    read_manifest,
)

log = logging.getLogger(__name__)

CHOICE = "from-snapshot"
"""File in the directory of the snapshots: the step to start from, until there is a snapshot of that start."""
RUN = "run"
"""File in the directory of the snapshots: the name of the run."""
DIRECTORY = "directory"
"""File in the directory of the snapshots: a name of this directory, which claims in an object store show."""
SET_ASIDE = "set-aside"
"""Directory for snapshots that a person decided not to start from."""

_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EINVAL}
"""What opening reports where there is something other than a regular file."""

_RUN = re.compile(r"[0-9a-f]{32}")


class Store:
    """
    Snapshots and counters of one job in a directory that only one syncer may have open.

    Args:
        root: created if missing; unfinished files of an earlier syncer are removed from it.
        keep: how many complete snapshots stay; the disk must hold one more.
        disk: holds the files.
        fault: called with the name of each step of `write`.

    Raises:
        StorageError: the directory cannot be created or read.
    """

    def __init__(
        self, root: Path, *, keep: int, disk: Disk = LOCAL, fault: Fault = no_fault
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1")
        self.root, self._keep, self._disk, self._fault = root, keep, disk, fault
        self.start_id = uuid.uuid4().hex
        """Of this start: a restored copy of this directory makes epochs begin again that learners know."""
        self.snapshot_start_id = ""
        """Of the start that wrote the snapshot which was read last; "": none was, or it is not known."""
        self._writing, self._counting = threading.Lock(), threading.Lock()
        self._counted: dict[str, int] = {}
        """The largest number of each counter, since this process has read or counted it."""
        self._verified: Stem | None = None
        self._choice: bytes | None = None
        """Content of the file `from-snapshot` that this start followed, while no snapshot was written since."""
        self._chosen: Stem | None = None
        """The snapshot that it named."""
        with os_errors(disk, root, "opening"):
            disk.make_directory(root)
            for name in disk.names(root):
                if name.endswith(files.TEMPORARY):
                    log.info("%s: removed an unfinished file of an earlier syncer", root / name)
                    disk.remove(root / name)

    def next_epoch(self) -> int:
        """
        One more than every epoch before that this directory knows, durable before it returns; call it once per start.
        """
        return self._count("epoch", at_least=max((s.epoch for s in self._stems()), default=0))

    def next_incarnation(self, *, at_least: int = 0) -> int:
        """
        One more than every incarnation of this job before; durable before it returns.

        Args:
            at_least: the largest one known otherwise, in case the counter was lost.

        Raises:
            StorageError: the disk reported an error, or the counter was damaged before this process read it.
        """
        return self._count("incarnation", at_least=at_least)

    def run(self, *, begins: bool) -> str:
        """
        The name of this run, durable before it returns; call it once per start, after `start`.

        It is another one when the parameters start over or a person chose a snapshot: what learners keep of
        their own belongs to the parameters that they had.

        Args:
            begins: there was no snapshot to start from.

        Raises:
            StorageError: the disk reported an error.
        """
        damage = "learners that restart do not use their checkpoints"
        return self._name(RUN, damage, new=begins or self._choice is not None)

    def directory_id(self) -> str:
        """
        The name of this directory, durable before it returns.

        Raises:
            StorageError: the disk reported an error.
        """
        return self._name(DIRECTORY, "it counts as another directory in the object store")

    def _name(self, file: str, damage: str, *, new: bool = False) -> str:
        path = self.root / file
        with os_errors(self._disk, path, "reading"):
            if not new and self._disk.size(path) is not None:
                name = read(self._disk, path).decode(errors="replace").strip()
                if _RUN.fullmatch(name):
                    return name
                log.warning("%s is damaged: %s", path, damage)
        name = uuid.uuid4().hex
        self._replace_name(file, name)
        return name

    def _replace_name(self, file: str, name: str) -> None:
        path = self.root / file
        with os_errors(self._disk, path, "writing"):
            replace_file(self._disk, path, f"{name}\n")

    def issued_incarnations(self) -> int:
        """The largest incarnation of this job so far, as its counter has it; 0: none."""
        name = "incarnation"
        path = self.root / name
        with self._counting, os_errors(self._disk, path, "counting"):
            self._counted[name] = counters.counted(self._disk, path)
            return self._counted[name]

    def write(self, snapshot: Snapshot) -> Path:
        """
        Make a snapshot durable and delete those beyond `keep`; returns its manifest.

        Blocks for as long as the disk takes, almost all of it without the GIL. The arrays must not
        change meanwhile.

        Raises:
            StorageError: the disk reported an error; earlier snapshots are intact, nothing is left of this one.
        """
        with self._writing:
            stems = self._stems()
            number = stems[0].number + 1 if stems else 1
            stem = Stem(number=number, epoch=snapshot.epoch, step=snapshot.step)
            data, manifest = self.root / stem.data, self.root / stem.manifest
            # The manifest is removed first: it must never exist without its data.
            made = (manifest, data, files.temporary(manifest), files.temporary(data))
            with os_errors(self._disk, manifest, "writing snapshot", remove=made):
                self._write(snapshot, data, manifest)
            self._end_choice()
            self._fault("before-delete")
            self._delete_old(stem)
            self._fault("after-delete")
        return manifest

    def newest(self) -> Snapshot | None:
        """
        The newest snapshot of which every byte verifies; None: there is none at all.

        Damaged ones are skipped; the log names the file and the damage. One that the disk refuses to
        read is not: it may be intact, and an older one would undo merges that learners have received.

        Raises:
            StorageError: the disk refuses to read the newest, or there are snapshots and none can be
                read; starting over would overwrite them. The message names each, its damage and what
                to do.
        """
        damage = []
        for stem in self._stems():
            try:
                found = self._read(stem)
            except _RefusedError as error:
                raise StorageError(
                    f"{error}; the next start reads it again. If the disk cannot be repaired, write the step "
                    f"of an older snapshot to {self.root / CHOICE}: what was merged after it is lost then"
                ) from None
            except StorageError as error:
                log.warning("snapshot skipped, trying the previous one: %s", error)
                # Data without a manifest was never completed.
                if self._disk.size(self.root / stem.manifest) is not None:
                    damage.append(str(error))
            else:
                self._verified = stem
                return found
        if damage:
            raise StorageError(
                f"{self.root}: none of its {len(damage)} snapshots can be read ({'; '.join(damage)}); "
                "repair the disk or restore this directory from a copy; to begin at step 0 instead, "
                f"which sets these files aside, write 0 to {self.root / CHOICE}"
            )
        return None

    def metas(self) -> list[Mapping[str, Any]]:
        """
        What `Snapshot.meta` was in every snapshot, the newest first; damaged manifests are left out.

        Raises:
            StorageError: the disk reported an error.
        """
        found = []
        for stem in self._complete(self._stems()):
            with contextlib.suppress(StorageError, OSError):
                found.append(read_manifest(self._disk, self.root / stem.manifest)["meta"])
        return found

    @property
    def is_empty(self) -> bool:
        """
        There is nothing to start from, and no person has decided what to start from.

        Raises:
            StorageError: the disk reported an error.
        """
        path = self.root / CHOICE
        with os_errors(self._disk, path, "reading"):
            chosen = self._disk.size(path) is not None
        return not chosen and not self._complete(self._stems())

    def open_newest(self) -> LocalSnapshot | None:
        """
        The newest complete snapshot, open for reading: it can be read until it is closed. None: there is none.

        Raises:
            StorageError: the disk reported an error, or its manifest is damaged.
        """
        for stem in self._complete(self._stems())[:1]:
            path = self.root / stem.data
            with os_errors(self._disk, path, "reading"):
                body = read_manifest(self._disk, self.root / stem.manifest)
                return LocalSnapshot(stem, path, body, self._disk.open(path, Mode.READ))
        return None

    def adopt(self, body: Mapping[str, Any], data: Iterable[bytes], *, run: str) -> None:
        """
        Make a snapshot durable that another directory has written.

        The lines of events.jsonl that come after it are all that are in this directory.

        Args:
            body: its manifest.
            data: verified before the last piece comes; what it raises leaves nothing behind.
            run: that it is of.

        Raises:
            StorageError: the disk reported an error, or the manifest is of no snapshot.
        """
        match = NAME.fullmatch(str(body.get("file", "")))
        if match is None or not isinstance(body.get("meta"), Mapping):
            raise StorageError(f"a manifest names {body.get('file')!r} as its data")
        stem = Stem(number=int(match[1]), epoch=int(match[2]), step=int(match[3]))
        path, manifest = self.root / stem.data, self.root / stem.manifest
        made = (manifest, path, files.temporary(manifest), files.temporary(path))
        try:
            with os_errors(self._disk, path, "restoring"):
                with self._disk.open(files.temporary(path), Mode.CREATE) as file:
                    for piece in data:
                        write_all(file, piece)
                    file.sync()
                self._replace_name(RUN, run)
                publish(self._disk, path)
                here = {"part": 1, "offset": 0}
                text = encode_manifest({**body, "meta": {**body["meta"], "events": here}})
                write_temporary(self._disk, manifest, [text])
                publish(self._disk, manifest)
        except StorageError:
            for leftover in made:
                with contextlib.suppress(OSError):
                    self._disk.remove(leftover)
            raise

    def start(self) -> Snapshot | None:
        """
        The snapshot to start from: that of the step in the file `from-snapshot`, else the newest.

        The file is a person's decision: snapshots newer than the chosen one move to the directory
        `set-aside`; step 0 sets all of them aside. The first `write` deletes the file, because learners
        must replace what they have until then: each start before it follows the file again.

        Raises:
            StorageError: no snapshot of that step can be read, or none at all.
        """
        path = self.root / CHOICE
        with os_errors(self._disk, path, "reading"):
            if self._disk.size(path) is None:
                return self.newest()
            content = read(self._disk, path)
        text = content.decode(errors="replace").strip()
        if not text.isdecimal():
            raise StorageError(
                f"{path}: holds {text[:40]!r}, expected the step of a snapshot, or 0 to start over"
            )
        chosen, found = self._of_step(int(text)) if int(text) else (None, None)
        with os_errors(self._disk, self.root, "setting snapshots aside in"):
            self._set_aside([stem for stem in self._stems() if chosen is None or stem > chosen])
        self._verified = self._chosen = chosen
        self._choice = content
        log.warning("starting from step %s, as requested in %s", text, path)
        return None if found is None else replace(found, chosen=True)

    def verify(self) -> bool:
        """
        Read the newest snapshot back when no other of the `keep` newest was verified before.

        Retention keeps the last verified snapshot, also beyond `keep`; this replaces it.

        Returns:
            False: it cannot be read; the log has the reason.
        """
        with self._writing:
            try:
                complete = self._complete(self._stems())
                if complete and self._verified not in complete[: self._keep]:
                    self._check(complete[0])
                    self._verified = complete[0]
                    self._delete_old(complete[0])
            except StorageError as error:
                log.error("the newest snapshot cannot be read back, older ones stay: %s", error)
                return False
        return True

    def _end_choice(self) -> None:
        """Delete the file that this start followed: what was decided is durable now."""
        if self._choice is None:
            return
        path, removed = self.root / CHOICE, files.temporary(self.root / CHOICE)
        try:
            # A person may have written another step meanwhile: that is for the next start.
            if self._disk.size(path) is not None and read(self._disk, path) == self._choice:
                # Durable, as deleting is not: its snapshot may be gone when the machine crashes.
                self._disk.rename(path, removed)
                self._disk.remove(removed)
        except OSError as error:
            log.warning("%s: cannot be deleted, delete it: %s", path, error)
            return  # the chosen snapshot stays: the next start would look for it
        self._choice = self._chosen = None

    def _of_step(self, step: int) -> tuple[Stem, Snapshot]:
        damage = []
        stems = self._complete(self._stems())
        for stem in stems:
            if stem.step == step:
                try:
                    return stem, self._read(stem)
                except StorageError as error:
                    damage.append(str(error))
        steps = ", ".join(str(stem.step) for stem in stems) or "none"
        raise StorageError(
            f"{self.root / CHOICE}: no snapshot of step {step} can be read; there are snapshots of "
            f"steps {steps}" + "".join(f"; {reason}" for reason in damage)
        )

    def _set_aside(self, stems: list[Stem]) -> None:
        if not stems:
            return
        target = self.root / SET_ASIDE
        self._disk.make_directory(target)
        # The oldest last: after a crash in between, the newest of the rest is chosen again.
        for stem in stems:
            for name in (stem.manifest, stem.data):
                if self._disk.size(self.root / name) is not None:
                    self._disk.rename(self.root / name, target / name)

    def _write(self, snapshot: Snapshot, data: Path, manifest: Path) -> None:
        file = TensorFile.of(snapshot.arrays)
        self._fault("before-data")
        head, *tensors = write_temporary(
            self._disk,
            data,
            file.parts,
            hash_groups=[[part] for part in file.parts],
            fault=self._fault,
        )
        self._fault("after-data")
        publish(self._disk, data)
        self._fault("after-rename")
        body = {
            "format": FORMAT,
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "startId": self.start_id,
            "file": data.name,
            "bytes": file.size_bytes,
            "headerBytes": len(file.parts[0]),
            "headerSha256": head,
            "sha256": dict(zip(file.names, tensors, strict=True)),
            "meta": dict(snapshot.meta),
        }
        write_temporary(self._disk, manifest, [encode_manifest(body)])
        self._fault("before-manifest")
        publish(self._disk, manifest)
        self._fault("after-manifest")

    def _read(self, stem: Stem) -> Snapshot:
        """
        Read and verify one snapshot.

        Raises:
            StorageError: names the file and what is wrong with it.
        """
        arrays: dict[str, Array] = {}

        def keep(name: str, entry: Entry) -> Array:
            arrays[name] = np.empty(entry.shape, entry.dtype)
            return arrays[name]

        body = self._check(stem, keep)
        self.snapshot_start_id = str(body.get("startId", ""))
        return Snapshot(step=body["step"], epoch=body["epoch"], arrays=arrays, meta=body["meta"])

    def _check(
        self, stem: Stem, target: Callable[[str, Entry], Array] | None = None
    ) -> dict[str, Any]:
        """
        Verify every byte of one snapshot; returns its manifest.

        Args:
            stem: of the snapshot.
            target: gives the array that a tensor is read into; None: the content is not kept.

        Raises:
            StorageError: names the file and what is wrong with it.
        """
        path = self.root / stem.data
        try:
            body = read_manifest(self._disk, self.root / stem.manifest)
            if body["file"] != stem.data:
                raise StorageError(
                    f"{self.root / stem.manifest}: is the manifest of {body['file']}"
                )
            with self._disk.open(path, Mode.READ) as file:
                self._check_data(path, file, body, target)
        except OSError as error:
            kind = StorageError if error.errno in _NO_FILE else _RefusedError
            raise kind(f"{path}: {error.strerror or error}") from None
        except (DamagedError, LookupError, TypeError, ValueError) as error:
            # Its SHA-256 is right, so this syncer does not know how to read it.
            raise StorageError(f"{path}: {error!r}") from None
        return body

    def _check_data(
        self, path: Path, file: File, body: Mapping[str, Any],
        target: Callable[[str, Entry], Array] | None,
    ) -> None:  # fmt: skip
        if (size_bytes := file.size()) != body["bytes"]:
            raise StorageError(f"{path}: has {size_bytes} bytes, expected {body['bytes']}")
        head = memoryview(bytearray(body["headerBytes"]))
        read_into(file, 0, head)
        if digest([head]) != body["headerSha256"]:
            raise StorageError(f"{path}: its header has changed since it was written")
        for name, entry in parse(head, size_bytes).items():
            if target is not None:
                data = bytes_of(target(name, entry))
                read_into(file, entry.lo, data)
                actual = digest([data])
            else:
                actual = digest(pieces(file, entry.lo, entry.hi))
            if actual != body["sha256"].get(name):
                raise StorageError(f"{path}: tensor {name} has changed since it was written")

    def _stems(self) -> list[Stem]:
        """Snapshots in the directory, newest first, including data without a manifest."""
        with os_errors(self._disk, self.root, "listing"):
            found = [NAME.fullmatch(name) for name in self._disk.names(self.root)]
        stems = {Stem(number=int(m[1]), epoch=int(m[2]), step=int(m[3])) for m in found if m}
        return sorted(stems, reverse=True)

    def _complete(self, stems: list[Stem]) -> list[Stem]:
        with os_errors(self._disk, self.root, "listing"):
            return [s for s in stems if self._disk.size(self.root / s.manifest) is not None]

    def _delete_old(self, written: Stem) -> None:
        stems = self._stems()
        kept = {written, self._verified, self._chosen, *self._complete(stems)[: self._keep]}
        for stem in stems:
            if stem in kept:
                continue
            try:
                self._disk.remove(self.root / stem.manifest)
                self._disk.remove(self.root / stem.data)
            except OSError as error:
                log.warning("%s: cannot delete the old snapshot: %s", self.root / stem.data, error)

    def _count(self, name: str, *, at_least: int = 0) -> int:
        path = self.root / name
        with self._counting, os_errors(self._disk, path, "counting"):
            known = self._counted.get(name)
            self._counted[name] = counters.count(self._disk, path, at_least=at_least, known=known)
            return self._counted[name]


class _RefusedError(StorageError):
    """The disk refused to read a file, which may be intact."""
