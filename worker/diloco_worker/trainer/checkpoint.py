"""
Local checkpoints of a learner: model, inner optimizer state, random state, counters. They are the
first source of recovery (docs/algorithm.md, "Recovery").

    <state>/checkpoint-<local step>.safetensors    every tensor
    <state>/checkpoint-<local step>.json           everything else, and the SHA-256 of the file
                                                   above; written last

Files are written under a temporary name, synced and renamed, the manifest last (docs/algorithm.md,
"Snapshots"). They are private to the process's user. A damaged checkpoint is skipped with a message,
and the previous one is used; so is one whose file is a link or no regular file, which is not followed.
The training thread only copies into reused memory; another thread writes.

A checkpoint that a learner of several ranks wrote has other files (`pieces`), and is read as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import ConfigError, StorageError
from diloco.model import tensorfile
from diloco.runtime import files
from diloco_worker.core.copy_budget import ATTEMPTS, SHARE
from diloco_worker.core.peer_files import PEER_MANIFEST
from diloco_worker.core.recovery import LocalCheckpoint
from diloco_worker.core.sealed import sealed, unsealed
from diloco_worker.trainer import optimizer_state, pieces
from diloco_worker.trainer.copies import Copies, Copy, Result, touch
from diloco_worker.trainer.kept import SavedEntries
from diloco_worker.trainer.trees import TensorReader, entry_of, pack, unpack
from diloco_worker.trainer.wrappers import tensors_of

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Bytes per os.write, during which other threads can run."""

SYNC_BYTES = 256 << 20
"""Bytes after which the disk must have everything so far: without it, the last sync could take minutes."""

UNTOUCHED_BYTES = 16 << 20
"""So much new memory is touched before the first checkpoint: its copy would take many times longer."""

DAMAGED = (OSError, ValueError, KeyError, TypeError, StorageError)
"""What reading a checkpoint that is not intact raises."""

STALL_SECONDS = 30.0
"""A disk that takes nothing for so long is not waited for at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint whose checksum was verified."""

    path: Path
    """The file with the tensors; of one in pieces, the manifest."""
    local_step: int
    global_step: int
    run: str
    """Name of the run, from Welcome; "": not known."""
    facts: dict[str, Any]
    optimizers: list[dict[str, Any]] | None
    """What `optimizer_state.describe` returned; None: written by an earlier release."""
    tree: Any
    pieces: tuple[pieces.Piece, ...] = ()
    """What each rank wrote; empty: one process did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a checkpoint is to hold."""

    tree: Any
    """Packed, without the tensors."""
    tensors: Mapping[str, torch.Tensor]
    """What to copy."""
    owners: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tensors of which only a part is copied."""
    parts: Mapping[str, pieces.Part] = field(default_factory=dict)
    """Which parts these are."""


class Checkpoints:
    """
    Local checkpoints in a directory.

    Args:
        directory: DILOCO_STATE; created if missing.
        keep: number of checkpoints to keep.
        digest: digest of the model's layout; checkpoints of other models are skipped, and deleted first.
    """

    def __init__(self, directory: Path, *, keep: int, digest: str) -> None:
        # A directory that is there, such as the root of a volume, keeps the mode its owner chose.
        directory.mkdir(files.PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        self._directory, self._keep, self._digest = directory, keep, digest
        self._clean()
        self._copies = Copies()
        self._optimizers: Sequence[Optimizer] = ()
        self._lost = threading.Event()
        self._model: nn.Module | None = None
        """Memory for its copies is still to be touched."""
        self._toucher: threading.Thread | None = None
        self._touched = threading.Event()
        """The toucher is to end."""
        self._logged: set[str] = set()
        """What is logged once and was."""
        self._writer: threading.Thread | None = None
        self._writing = 0
        """Local step of the last checkpoint that was started."""
        self._taken = 0
        """Pieces that the disk has taken: grows while it works."""
        self._stalled: int | None = None
        """What `_taken` was when a checkpoint was abandoned."""

    @staticmethod
    def name_of(step: int) -> str:
        """What the names of the files of a checkpoint begin with."""
        return f"checkpoint-{step:010d}"

    # ------------------------------------------------------------ writing

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer is not None and self._writer.is_alive()

    def start(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, local_step: int, global_step: int,
        facts: dict[str, Any], run: str = "", kept: Mapping[str, Any] | None = None,
    ) -> bool:  # fmt: skip
        """
        Copy the current state, and write it in the background.

        After `watch`, most of the copy is made in the background as well.

        Args:
            kept: the state of what `Learner.keep` was given.

        Returns:
            False, without an effect, while the previous checkpoint is being written.

        Raises:
            ConfigError: the state has a value that cannot be saved.
        """
        if self.busy:
            return False
        captured = self._capture(model, optimizers, kept or {})
        for name, tensor in captured.tensors.items():
            entry_of(name, tensor)
        self._end_touching()
        copy = self._copies.begin(captured.tensors, model, optimizers, owners=captured.owners)
        manifest = {
            "local_step": local_step, "global_step": global_step, "run": run, "digest": self._digest, "facts": facts,
            "optimizers": optimizer_state.describe(model, optimizers), "tree": captured.tree,
            **({"parts": captured.parts} if captured.parts else {}),
        }  # fmt: skip
        self._writing = local_step
        self._writer = threading.Thread(
            target=self._write, args=(copy, manifest), name="checkpoint", daemon=True
        )
        self._writer.start()
        return True

    def _capture(
        self, model: nn.Module, optimizers: Sequence[Optimizer], kept: Mapping[str, Any]
    ) -> Captured:
        """
        The current state, not copied.

        Raises:
            ConfigError: it has a value that cannot be saved.
        """
        tensors: dict[str, torch.Tensor] = {}
        tree = pack({**_state(model, optimizers), "kept": dict(kept)}, tensors)
        return Captured(tree=tree, tensors=tensors)

    def watch(self, optimizers: Sequence[Optimizer], model: nn.Module | None = None) -> None:
        """
        Begin to copy beside the forward and backward passes; `boundary` must be called then.

        Args:
            optimizers: step the model.
            model: memory for its copies is made ready in the background.
        """
        self._copies.watch(optimizers)
        self._optimizers, self._model = optimizers, model

    def boundary(self) -> bool:
        """
        A step has ended: call it before anything but the optimizers changes parameters.

        Returns:
            False, once: a checkpoint that was started has been discarded.
        """
        self._copies.boundary()
        if self._model is not None:
            self._begin_touching(self._model)
            self._model = None
        lost = self._lost.is_set()
        self._lost.clear()
        return not lost

    @property
    def wait_seconds(self) -> float | None:
        """
        How long the optimizers waited for copies in the step before the last `boundary`; None: no
        copies were made beside it.
        """
        return self._copies.wait_seconds

    def _begin_touching(self, model: nn.Module) -> None:
        """Access the memory for copies for the first time, now that the optimizers have their state."""
        memory = []
        with contextlib.suppress(ConfigError):  # `start` reports it
            memory = self._copies.reserve(self._capture(model, self._optimizers, {}).tensors)
        if sum(tensor.nbytes for tensor in memory) < UNTOUCHED_BYTES:
            return
        self._toucher = threading.Thread(
            target=touch, args=(memory, self._touched), name="checkpoint memory", daemon=True
        )
        self._toucher.start()

    def _end_touching(self) -> None:
        if self._toucher is not None:
            self._touched.set()
            self._toucher.join()  # at most one piece
            self._toucher = None

    def finish(self) -> bool:
        """
        Wait until the checkpoint being written is durable.

        Returns:
            False: the disk hangs, and the checkpoint is abandoned; this is logged once.
        """
        self._end_touching()
        self._copies.finish()
        while self._writer is not None and self._writer.is_alive():
            before = self._taken
            if self._stalled == before:
                return False
            self._writer.join(STALL_SECONDS)
            if self._writer.is_alive() and self._taken == before:
                self._stalled = before
                log.error(
                    "checkpoint of local step %d: the disk of %s has accepted no data for %.0f s; leaving "
                    "without this checkpoint, the previous one remains; check the disk",
                    self._writing, self._directory, STALL_SECONDS,
                )  # fmt: skip
        return True

    def _write(self, copy: Copy, manifest: dict[str, Any]) -> None:
        step = manifest["local_step"]
        result = copy.complete()
        if result is Result.CHANGED:
            self._copies.distrust()
            self._discard(
                step,
                "something other than the optimizers' step changed parameters; from now on a checkpoint "
                "stops training while it is copied",
            )
            return
        if result is Result.ABANDONED and not copy.unguarded:
            self._discard(
                step,
                f"its copy was not made within a forward and backward pass and {SHARE:.0%} of a step; it is "
                f"tried again after the next step, {ATTEMPTS} times, then the optimizer waits",
                once=True,
            )
            return
        if not copy.guarded():
            self._discard(step, "no optimizer step followed it")
            return
        self._log_wait(step, copy)
        try:
            self.write(copy.tensors, manifest)
        except OSError as error:
            log.error("checkpoint of local step %d: %s; training continues", step, error)

    def _discard(self, step: int, why: str, *, once: bool = False) -> None:
        self._lost.set()
        if not once or why not in self._logged:
            log.info("checkpoint of local step %d is discarded: %s", step, why)
        self._logged.add(why)

    def _log_wait(self, step: int, copy: Copy) -> None:
        usual = self._copies.budget.step_seconds
        if copy.spent_seconds <= SHARE * usual or not usual or "wait" in self._logged:
            return
        self._logged.add("wait")
        log.warning(
            "checkpoint of local step %d: its copy stopped training for %.0f ms, %.0f %% of a step, the limit "
            "is %.0f %%; see docs/learners.md, or make this rarer with learner.checkpoint.everySteps",
            step, 1e3 * copy.spent_seconds, 100 * copy.spent_seconds / usual, 100 * SHARE,
        )  # fmt: skip

    def write(self, tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
        """
        Write the checkpoint durably, its manifest last.

        Raises:
            OSError: the write failed; earlier checkpoints are intact.
        """
        step = manifest["local_step"]
        # What an earlier write left behind takes the room that this one needs.
        self._clean(step)
        name = self.name_of(step)
        sha, size = self._write_tensors(self._directory / f"{name}.safetensors", tensors)
        text = sealed({**manifest, "sha256": sha, "bytes": size})
        self._write_file(self._directory / f"{name}.json", [memoryview(text)])
        self._clean(step)

    def _write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
        """Write a file of tensors durably; returns its SHA-256 and its size."""
        header, _, size = tensorfile.plan([entry_of(n, t) for n, t in tensors.items()])
        parts = [memoryview(header)]
        parts += [
            t.reshape(-1).view(torch.uint8).numpy().data for t in tensors.values() if t.numel()
        ]
        return self._write_file(path, parts), size

    def _write_file(self, path: Path, parts: Sequence[memoryview]) -> str:
        """Write a file durably; returns its SHA-256."""
        sha, unsynced = hashlib.sha256(), 0
        with files.replacing(path, durable=True, mode=files.PRIVATE) as fd:
            for part in parts:
                for lo in range(0, len(part), PIECE_BYTES):
                    piece = part[lo : lo + PIECE_BYTES]
                    sha.update(piece)
                    files.write_all(fd, piece)
                    unsynced += len(piece)
                    if unsynced >= SYNC_BYTES:
                        os.fdatasync(fd)
                        unsynced = 0
                    self._taken += 1
        return sha.hexdigest()

    def _clean(self, step: int | None = None) -> None:
        """
        Remove what is left of writes that did not end, and the checkpoints that are too many.

        Args:
            step: local step of the checkpoint being written; None: every complete one is kept.
        """
        with contextlib.suppress(OSError):
            manifests = [*self._directory.glob("checkpoint-*.json")]
            found = [path for path in manifests if _has_tensors(path)]
            if step is not None:
                found = sorted(found, key=lambda path: self._rank(path, step))[-self._keep :]
            kept = {path.stem for path in found}
            writing = None if step is None else self.name_of(step)
            ended = {path.stem for path in manifests}
            # Sorted, so that a manifest goes before its tensors: an end in between leaves none without them.
            for path in sorted(self._directory.glob("checkpoint-*")):
                name = path.name.partition(".")[0]
                partial = name not in kept or path.suffix == files.TEMPORARY
                # Another rank may be a checkpoint ahead.
                later = writing is not None and name > writing and name not in ended
                if partial and name != writing and not later:
                    with contextlib.suppress(OSError):
                        path.unlink()

    def _rank(self, path: Path, step: int) -> tuple[bool, str]:
        """
        The place of a manifest in the order of deletion while `step` is being written.

        Those of another model go first, with those that cannot be read, and those of later steps: training
        has begun again before them. None of them may take the place of one that a restart can use.
        """
        if path.stem == self.name_of(step):
            return True, path.name  # a disk that refuses to read it back must not cost it
        try:
            data = json.loads(files.read(path))
            usable = data["digest"] == self._digest and int(data["local_step"]) <= step
        except (OSError, ValueError, KeyError, TypeError):
            usable = False
        return usable, path.name

    # ------------------------------------------------------------ reading

    def newest(self) -> Manifest | None:
        """
        The newest intact checkpoint of this model; others are skipped, each with a message.
        """
        for path in self._manifests():
            try:
                return self._read(path)
            except DAMAGED as error:
                log.warning("checkpoint %s is skipped: %s", path.name, error)
        return None

    def _manifests(self) -> list[Path]:
        """Of all checkpoints, the newest first."""
        return sorted(self._directory.glob("checkpoint-*.json"), reverse=True)

    def _read(self, path: Path, *, place: int = 0, places: int = 1) -> Manifest:
        """A checkpoint; of its pieces, this process verifies those of `pieces.read`."""
        data = unsealed(files.read(path))
        if data["digest"] != self._digest:
            raise StorageError("it belongs to another model")
        if "pieces" in data:
            read = pieces.read(path, data["pieces"], place=place, places=places)
            return _manifest(path, data, pieces=tuple(read))
        tensors = path.with_suffix(".safetensors")
        with open(files.open_regular(tensors), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != data["bytes"]:
                raise StorageError(f"{tensors.name} has {size} bytes, expected {data['bytes']}")
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != data["sha256"]:
            raise StorageError(
                f"{tensors.name} has SHA-256 {found[:16]}…, expected {data['sha256'][:16]}…"
            )
        return _manifest(tensors, data, tree=data["tree"])

    def load(self, manifest: Manifest, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """
        Restore model, optimizers and random state; after an error the optimizers have their own.

        Beside them, memory for the optimizers' state and the largest tensor is enough: never more
        than the checkpoint's size.

        Raises:
            ConfigError: the optimizers differ from those that were saved, or their state is not finite; or the model
                lacks a tensor that was saved.
            DamagedError: the file is not what was verified.
        """
        if manifest.pieces:
            found = manifest.pieces
            restore_random(
                pieces.load(found, manifest.optimizers, model, optimizers, parameters=True)
            )
            return
        with open(files.open_regular(manifest.path), "rb", buffering=0) as file:
            reader = TensorReader(file)
            tree = dict(manifest.tree["dict"])
            random_state = unpack(tree["random"], reader)
            named = dict(tensors_of(model))
            if lost := sorted({name for name, _ in tree["model"]["dict"]} - named.keys()):
                raise ConfigError(
                    f"the model lacks {len(lost)} tensors that it had then, such as {lost[0]}"
                )
            targets = [(named[name], saved_at) for name, saved_at in tree["model"]["dict"]]
            with optimizer_state.own_on_error(optimizers):
                saved = unpack(tree["optimizers"], reader)
                optimizer_state.load(saved, manifest.optimizers, model, optimizers)
                with torch.no_grad():
                    for tensor, saved_at in targets:
                        tensor.copy_(unpack(saved_at, reader))
        restore_random(random_state)

    def of_peer(self) -> Manifest:
        """The optimizers' state that a peer sent, for `load_optimizers`; raises one of DAMAGED if it is not."""
        return self._read(self._directory / PEER_MANIFEST)

    def kept(self, manifest: Manifest) -> SavedEntries:
        """
        What `Learner.keep` was given, to be read later; the file stays open.

        Raises:
            OSError, StorageError: the file is gone.
        """
        return kept_of(manifest)

    def load_optimizers(
        self, manifest: Manifest, model: nn.Module, optimizers: Sequence[Optimizer], *, of_peer: bool = False,
    ) -> None:  # fmt: skip
        """
        Restore the optimizers alone; after an error they have their own state.

        Raises:
            ConfigError: the optimizers differ from those that were saved, or their state is not finite; or the model
                lacks a tensor that was saved.
            DamagedError: the file is not what was verified.
        """
        if manifest.pieces:
            pieces.load(manifest.pieces, manifest.optimizers, model, optimizers, parameters=False)
            return
        with open(files.open_regular(manifest.path), "rb", buffering=0) as file:
            saved = unpack(dict(manifest.tree["dict"])["optimizers"], TensorReader(file))
        optimizer_state.load(saved, manifest.optimizers, model, optimizers, of_peer=of_peer)


def local_checkpoint(found: Manifest | None) -> LocalCheckpoint | None:
    """What the core needs to know of a checkpoint."""
    if found is None:
        return None
    return LocalCheckpoint(
        local_step=found.local_step, global_step=found.global_step, run=found.run,
        start=str(found.facts.get("start", "")),
    )  # fmt: skip


def kept_of(manifest: Manifest, *, rank: int = 0, ranks: int = 1) -> SavedEntries:
    """
    What `Learner.keep` was given in this rank, to be read later; the file stays open.

    Raises:
        OSError, StorageError: the file is gone.
    """
    found = manifest.pieces or (pieces.Piece(path=manifest.path, tree=manifest.tree),)
    piece, trees = pieces.kept(found, rank=rank, ranks=ranks)
    if piece is None:
        why = f"has the state that {len(found)} ranks kept, which does not fit {ranks}"
        return SavedEntries(None, {}, local_step=manifest.local_step, absent=why)
    file = open(files.open_regular(piece.path), "rb", buffering=0)  # noqa: SIM115 - see `close`
    return SavedEntries(file, dict(trees["dict"]), local_step=manifest.local_step)


def _manifest(path: Path, data: Mapping[str, Any], **more: Any) -> Manifest:
    return Manifest(
        path=path,
        local_step=int(data["local_step"]),
        global_step=int(data["global_step"]),
        run=str(data.get("run", "")),
        facts=dict(data["facts"]),
        optimizers=data.get("optimizers"),
        **{"tree": None, **more},
    )


def _has_tensors(manifest: Path) -> bool:
    pieces_of_it = manifest.parent.glob(f"{manifest.stem}.rank-*.safetensors")
    return os.path.lexists(manifest.with_suffix(".safetensors")) or any(pieces_of_it)


# ---------------------------------------------------------------- what is saved


def _state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    return {
        "model": dict(tensors_of(model)),
        "optimizers": [_state_of(optimizer) for optimizer in optimizers],
        "random": _random(),
    }


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    try:
        return optimizer.state_dict()
    except Exception as error:  # of a class of the user, or of state whose parameter was replaced
        raise ConfigError(
            f"{type(optimizer).__name__}.state_dict() fails with {error!r}; if a parameter was replaced, remove its "
            "state from optimizer.state as well"
        ) from error


def _random() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"].get("key")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": None if key is None else {
            "key": torch.from_numpy(key.astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }  # fmt: skip


def restore_random(state: dict[str, Any] | None) -> None:
    """Continue with this random state; None: with the present one."""
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    if (
        state["cuda"]
        and torch.cuda.is_available()
        and len(state["cuda"]) == torch.cuda.device_count()
    ):
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    if state["numpy"] is not None:
        n = state["numpy"]
        key = n["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, n["pos"], n["has_gauss"], n["gauss"]))
