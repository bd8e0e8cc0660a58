"""
What of the syncer outlives it: snapshots, counters, the exported model, the event log.

Shell. A snapshot is two files:

    000007-epoch-2-step-96.safetensors   Θ, momentum and what else is an array
    000007-epoch-2-step-96.json          manifest: sizes, SHA-256 of everything, JSON state

    data: temporary name, fsync, rename, fsync directory; then the manifest likewise; then the
    oldest are deleted

A snapshot without a manifest does not exist, so a crash between any two steps leaves the one
before it (decision 13).
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from diloco.errors import StorageError
from diloco.spec import canonical
from diloco_syncer.durable import (
    DTYPES,
    TEMPORARY,
    Array,
    Fault,
    RawTensor,
    TensorFile,
    bytes_of,
    digest,
    no_fault,
    os_errors,
    publish,
    read_into,
    temporary,
    write_temporary,
)

__all__ = ["EventLog", "RawTensor", "Snapshot", "Store", "export_model", "raw_tensors"]

log = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"(\d{6,})-epoch-(\d+)-step-(\d+)\.(safetensors|json)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The whole durable state of a syncer at one global step."""

    step: int
    epoch: int
    arrays: Mapping[str, Array]
    """fp32 or uint8, any shape; the order is kept."""
    meta: Mapping[str, Any]
    """JSON values."""


class Store:
    """
    Snapshots and counters of one job in one directory; only one syncer may have it open.

    Args:
        root: made if it is not there; half-written files of a dead syncer are removed from it.
        keep: how many complete snapshots stay; the disk must hold one more.
        fault: told the name of each step of `write`.

    Raises:
        StorageError: the directory cannot be made or read.
    """

    def __init__(self, root: Path, *, keep: int, fault: Fault = no_fault) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1")
        self.root, self._keep, self._fault = root, keep, fault
        self._writing, self._counting = threading.Lock(), threading.Lock()
        with os_errors(root, "opening"):
            root.mkdir(parents=True, exist_ok=True)
            for leftover in root.glob(f"*{TEMPORARY}"):
                log.info("%s was left half-written by an earlier syncer; removed", leftover)
                leftover.unlink(missing_ok=True)

    def next_epoch(self) -> int:
        """One more than every epoch before, durable before it returns; call it once per start."""
        return self._count("epoch", at_least=max((s.epoch for s in self._stems()), default=0))

    def next_incarnation(self) -> int:
        """One more than every incarnation of this job before; durable before it returns."""
        return self._count("incarnation")

    def write(self, snapshot: Snapshot) -> Path:
        """
        Make a snapshot durable and delete those beyond `keep`; returns its manifest.

        Blocks for as long as the disk takes, almost all of it without the GIL. The arrays must not
        change meanwhile.

        Raises:
            StorageError: the disk refused; nothing of this snapshot is left, those before it are.
        """
        with self._writing:
            stems = self._stems()
            number = stems[0].number + 1 if stems else 1
            stem = _Stem(number=number, epoch=snapshot.epoch, step=snapshot.step)
            data, manifest = self.root / stem.data, self.root / stem.manifest
            # The manifest goes first here too: it must never stand without its data.
            made = (manifest, data, temporary(manifest), temporary(data))
            with os_errors(manifest, "writing snapshot", remove=made):
                self._write(snapshot, data, manifest)
            self._fault("before-delete")
            self._delete_old(stem)
            self._fault("after-delete")
        return manifest

    def newest(self) -> Snapshot | None:
        """
        The newest snapshot of which every byte verifies, None if there is none.

        What is damaged is skipped with a logged sentence that names the file and the damage.
        """
        for stem in self._stems():
            try:
                return self._read(stem)
            except (StorageError, OSError) as error:
                log.warning("snapshot skipped, the one before it is tried: %s", error)
        return None

    def _write(self, snapshot: Snapshot, data: Path, manifest: Path) -> None:
        file = TensorFile.of(snapshot.arrays)
        self._fault("before-data")
        head, *tensors = write_temporary(
            data, file.parts, hash_groups=[[part] for part in file.parts], fault=self._fault
        )
        self._fault("after-data")
        publish(data)
        self._fault("after-rename")
        body = {
            "format": _FORMAT,
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "file": data.name,
            "bytes": file.size_bytes,
            "headerBytes": len(file.parts[0]),
            "headerSha256": head,
            "sha256": dict(zip(file.names, tensors, strict=True)),
            "meta": dict(snapshot.meta),
        }
        text = canonical({"manifest": body, "sha256": digest([canonical(body).encode()])})
        write_temporary(manifest, [text.encode()])
        self._fault("before-manifest")
        publish(manifest)
        self._fault("after-manifest")

    def _read(self, stem: _Stem) -> Snapshot:
        """
        Read and verify one snapshot.

        Raises:
            StorageError: names the file and what is wrong with it.
        """
        body = _read_manifest(self.root / stem.manifest)
        if body["file"] != stem.data:
            raise StorageError(f"{self.root / stem.manifest}: is the manifest of {body['file']}")
        path = self.root / stem.data
        with path.open("rb", buffering=0) as file:
            if (size_bytes := os.fstat(file.fileno()).st_size) != body["bytes"]:
                raise StorageError(f"{path}: has {size_bytes} bytes, expected {body['bytes']}")
            head = file.read(body["headerBytes"])
            if digest([head]) != body["headerSha256"]:
                raise StorageError(f"{path}: its header is not the one that was written")
            arrays: dict[str, Array] = {}
            for name, entry in json.loads(head[8:]).items():
                array = np.empty(entry["shape"], DTYPES[entry["dtype"]])
                read_into(file.fileno(), len(head) + entry["data_offsets"][0], bytes_of(array))
                if digest([bytes_of(array)]) != body["sha256"].get(name):
                    raise StorageError(f"{path}: tensor {name} is not what was written")
                arrays[name] = array
        return Snapshot(step=body["step"], epoch=body["epoch"], arrays=arrays, meta=body["meta"])

    def _stems(self) -> list[_Stem]:
        """What lies in the directory, newest first; data without a manifest too."""
        with os_errors(self.root, "listing"):
            found = [_NAME.fullmatch(name) for name in os.listdir(self.root)]
        numbers = {(int(m[1]), int(m[2]), int(m[3])) for m in found if m}
        return [_Stem(number=n, epoch=e, step=s) for n, e, s in sorted(numbers, reverse=True)]

    def _delete_old(self, written: _Stem) -> None:
        stems = self._stems()
        complete = [s for s in stems if (self.root / s.manifest).exists()]
        kept = {written, *complete[: self._keep]}
        for stem in stems:
            if stem in kept:
                continue
            try:
                (self.root / stem.manifest).unlink(missing_ok=True)
                (self.root / stem.data).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s: old snapshot stays: %s", self.root / stem.data, error)

    def _count(self, name: str, *, at_least: int = 0) -> int:
        path = self.root / name
        with self._counting, os_errors(path, "counting", remove=[temporary(path)]):
            text = path.read_text().strip() if path.exists() else "0"
            if not text.isdecimal():
                raise StorageError(
                    f"{path}: holds {text[:40]!r}, expected a whole number; write the largest "
                    f"{name} of events.jsonl into it"
                )
            value = max(int(text), at_least) + 1
            write_temporary(path, [b"%d\n" % value])
            publish(path)
        return value


def export_model(
    directory: Path,
    tensors: Mapping[str, Array | RawTensor],
    meta: Mapping[str, Any],
    *,
    fault: Fault = no_fault,
) -> str:
    """
    Write model.safetensors and, last, model.json: `meta` plus `bytes` and `sha256` of the file.

    While there is a model.json it describes the model.safetensors beside it, also after a crash.

    Returns:
        The SHA-256 of model.safetensors, hex.

    Raises:
        StorageError: the disk refused; an older model there is intact unless only a rename was
            left to do.
    """
    data, facts = directory / "model.safetensors", directory / "model.json"
    half_made = (temporary(data), temporary(facts))
    with os_errors(directory, "exporting the model to", remove=half_made):
        directory.mkdir(parents=True, exist_ok=True)
        file = TensorFile.of(tensors, metadata={"format": "pt"})
        [sha256] = write_temporary(data, file.parts, hash_groups=[file.parts], fault=fault)
        said = {**meta, "bytes": file.size_bytes, "sha256": sha256}
        text = json.dumps(said, indent=2, sort_keys=True) + "\n"
        write_temporary(facts, [text.encode()])
        fault("after-data")
        facts.unlink(missing_ok=True)
        publish(data)
        fault("before-manifest")
        publish(facts)
    return sha256


def raw_tensors(blob: bytes) -> dict[str, RawTensor]:
    """
    Take a safetensors blob apart without losing types that numpy lacks.

    Raises:
        StorageError: the blob is not safetensors.
    """
    try:
        found = safetensors.deserialize(blob)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise StorageError(f"{len(blob)} bytes, expected safetensors: {error}") from None
    return {
        name: RawTensor(dtype=t["dtype"], shape=tuple(t["shape"]), data=bytes(t["data"]))
        for name, t in found
    }


class EventLog:
    """
    Appends JSON lines to a file that several processes append to: whole lines, never in the way.

    A line torn by the death of an earlier writer is closed off on opening. A disk that refuses
    costs lines, counted in `lost` and warned about once, never an exception: training goes on
    without its log.

    Raises:
        StorageError: the file cannot be opened at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._lock = threading.Lock()
        with os_errors(path, "opening"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size_bytes = os.fstat(self._fd).st_size
            self._torn = size_bytes > 0 and os.pread(self._fd, 1, size_bytes - 1) != b"\n"
        if self._torn:
            self._append(b"")

    def append(self, event: Mapping[str, Any]) -> None:
        """
        Add one line; `time` (UTC, ISO 8601) is filled in unless the event has it.

        numpy scalars and arrays become numbers and lists, other things their text.
        """
        stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **event}
        line = json.dumps(stamped, separators=(",", ":"), default=_plain)
        self._append(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file; further events are lost."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, line: bytes) -> None:
        with self._lock:
            data = b"\n" + line if self._torn else line
            try:
                # One write with O_APPEND: the kernel puts whole lines one after the other.
                written = os.write(self._fd, data)
            except OSError as error:
                self._lose(error.strerror or str(error))
                return
            if written == len(data):
                self._torn = False
            else:
                self._torn = self._torn or written > 0
                self._lose(f"only {written} of {len(data)} bytes were written")

    def _lose(self, why: str) -> None:
        if self.lost == 0:
            log.warning("%s: events are being lost, training goes on: %s", self.path, why)
        self.lost += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stem:
    """Name of a snapshot; numbers only grow, so a rewound step never outranks a later write."""

    number: int
    epoch: int
    step: int

    @property
    def data(self) -> str:
        return f"{self.number:06d}-epoch-{self.epoch}-step-{self.step}.safetensors"

    @property
    def manifest(self) -> str:
        return f"{self.number:06d}-epoch-{self.epoch}-step-{self.step}.json"


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise StorageError(f"{path}: is missing, so its data was never completed") from None
    try:
        outer = json.loads(text)
        body, stated = outer["manifest"], outer["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{path}: not a manifest: {error}") from None
    if stated != (actual := digest([canonical(body).encode()])):
        raise StorageError(f"{path}: its SHA-256 is {actual}, expected {stated}")
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise StorageError(f"{path}: not in format {_FORMAT}, the one this syncer reads")
    return body


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
