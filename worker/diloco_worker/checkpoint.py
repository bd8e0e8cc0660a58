"""
A learner's own checkpoint: model, inner optimizer state, random state, counters (decision 11: the
first source of recovery).

    <state>/checkpoint-<local step>.safetensors    every tensor
    <state>/checkpoint-<local step>.json           everything else, and the SHA-256 of the file
                                                   above; written last

Decision 13: a temporary name, fsync, rename, the manifest last; damaged ones are skipped with a
message and the one before is used. The training thread only copies into memory that is used again;
a thread of its own writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import ConfigError, StorageError
from diloco_worker.core import tensorfile
from diloco_worker.core.tensorfile import Entry
from diloco_worker.layout import from_bytes

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""One os.write; it lets other threads run meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint whose bytes were checked."""

    path: Path
    """The tensors."""
    local_step: int
    global_step: int
    facts: dict[str, Any]
    tree: Any


class Checkpoints:
    """
    The checkpoints of one learner.

    Args:
        directory: DILOCO_STATE; made if missing.
        keep: how many stay.
        digest: of the model's layout; a checkpoint of another model is skipped.
    """

    def __init__(self, directory: Path, *, keep: int, digest: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._keep, self._digest = directory, keep, digest
        self._staging: dict[str, torch.Tensor] = {}
        self._writer: threading.Thread | None = None

    # ------------------------------------------------------------ writing

    @property
    def busy(self) -> bool:
        """One is being written."""
        return self._writer is not None and self._writer.is_alive()

    def start(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, local_step: int, global_step: int,
        facts: dict[str, Any],
    ) -> bool:  # fmt: skip
        """
        Copy the state as it is now, and write it in the background.

        Returns:
            False, and nothing happens, while the one before is still being written.
        """
        if self.busy:
            return False
        tensors: dict[str, torch.Tensor] = {}
        tree = pack(_state(model, optimizers), tensors)
        staged = {name: self._stage(name, tensor) for name, tensor in tensors.items()}
        manifest = {
            "local_step": local_step, "global_step": global_step, "digest": self._digest, "facts": facts, "tree": tree,
        }  # fmt: skip
        self._writer = threading.Thread(
            target=self._write, args=(staged, manifest), name="checkpoint", daemon=True
        )
        self._writer.start()
        return True

    def finish(self) -> None:
        """Wait until the one being written is durable."""
        if self._writer is not None:
            self._writer.join()

    def _stage(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._staging.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            # numpy asks for huge pages: touching them for the first time is four times faster.
            room = torch.from_numpy(np.empty(tensor.numel() * tensor.element_size(), np.uint8))
            copy = self._staging[name] = room.view(tensor.dtype).reshape(tensor.shape)
        return copy.copy_(tensor.detach())

    def _write(self, staged: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
        try:
            self.write(staged, manifest)
        except OSError as error:
            log.error(
                "checkpoint of local step %d: %s; training goes on", manifest["local_step"], error
            )

    def write(self, tensors: dict[str, torch.Tensor], manifest: dict[str, Any]) -> None:
        """
        Write durably; the manifest last.

        Raises:
            OSError: the disk refused; earlier checkpoints are intact.
        """
        name = f"checkpoint-{manifest['local_step']:010d}"
        entries = [Entry(name=n, dtype=_dtype(t), shape=tuple(t.shape)) for n, t in tensors.items()]
        header, _, size = tensorfile.plan(entries)
        parts = [memoryview(header)]
        parts += [
            t.reshape(-1).view(torch.uint8).numpy().data for t in tensors.values() if t.numel()
        ]
        sha = _write_file(self._directory / f"{name}.safetensors", parts)
        text = json.dumps({**manifest, "sha256": sha, "bytes": size}).encode()
        _write_file(self._directory / f"{name}.json", [memoryview(text)])
        self._clean()

    def _clean(self) -> None:
        manifests = sorted(self._directory.glob("checkpoint-*.json"))
        kept = {path.stem for path in manifests[-self._keep :]}
        for path in self._directory.glob("checkpoint-*"):
            if path.name.partition(".")[0] not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()

    # ------------------------------------------------------------ reading

    def newest(self) -> Manifest | None:
        """
        The newest checkpoint that is whole and of this model; others are skipped, each with a
        message.
        """
        for path in sorted(self._directory.glob("checkpoint-*.json"), reverse=True):
            try:
                return self._read(path)
            except (OSError, ValueError, KeyError, TypeError, StorageError) as error:
                log.warning("checkpoint %s is skipped: %s", path.name, error)
        return None

    def _read(self, path: Path) -> Manifest:
        data = json.loads(path.read_bytes())
        if data["digest"] != self._digest:
            raise StorageError("it is of another model than this one")
        tensors = path.with_suffix(".safetensors")
        size = tensors.stat().st_size
        if size != data["bytes"]:
            raise StorageError(
                f"{tensors.name} has {size} bytes, its manifest says {data['bytes']}"
            )
        with tensors.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != data["sha256"]:
            raise StorageError(
                f"{tensors.name} has SHA-256 {found[:16]}…, its manifest says {data['sha256'][:16]}…"
            )
        return Manifest(
            path=tensors,
            local_step=int(data["local_step"]),
            global_step=int(data["global_step"]),
            facts=data["facts"],
            tree=data["tree"],
        )

    def load(self, manifest: Manifest, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """
        Put model, optimizers and random state back as they were.

        Raises:
            ConfigError: the optimizers are others than those that were saved.
        """
        data = torch.frombuffer(bytearray(manifest.path.read_bytes()), dtype=torch.uint8)
        entries = tensorfile.parse(data.numpy().data, data.numel())
        tensors = {}
        for name, entry in entries.items():
            tensors[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            if entry.hi > entry.lo:
                from_bytes(data[entry.lo : entry.hi], tensors[name])
        state = unpack(manifest.tree, tensors)
        if len(state["optimizers"]) != len(optimizers):
            raise ConfigError(
                f"the checkpoint has {len(state['optimizers'])} optimizers, this run {len(optimizers)}"
            )
        named = dict(_model_tensors(model))
        with torch.no_grad():
            for name, tensor in state["model"].items():
                named[name].copy_(tensor)
        try:
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except ValueError as error:
            raise ConfigError(
                f"the checkpoint's optimizer does not fit this one: {error}"
            ) from None
        _restore_random(state["random"])


# ---------------------------------------------------------------- what is saved


def _state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    return {
        "model": dict(_model_tensors(model)),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "random": _random(),
    }


def _model_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer once; also the buffers that state_dict leaves out."""
    return [*model.named_parameters(), *model.named_buffers()]


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


def _restore_random(state: dict[str, Any]) -> None:
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


# ---------------------------------------------------------------- trees without pickle


def pack(value: Any, tensors: dict[str, torch.Tensor], path: str = "") -> Any:
    """
    A tree of plain values as JSON values; its tensors go to `tensors`.

    Raises:
        ConfigError: a value that is neither plain nor a tensor.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {
            "dict": [[pack(k, tensors), pack(v, tensors, f"{path}/{k}")] for k, v in value.items()]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    raise ConfigError(
        f"checkpoint: {path} is a {type(value).__name__}; only tensors and plain values can be kept"
    )


def unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What `pack` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {unpack(k, tensors): unpack(v, tensors) for k, v in inner}
    items = [unpack(v, tensors) for v in inner]
    return items if kind == "list" else tuple(items)


# ---------------------------------------------------------------- files


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in tensorfile.CODES:
        raise ConfigError(
            f"checkpoint: a tensor of dtype {name}; expected one of {', '.join(tensorfile.CODES)}"
        )
    return name


def _write_file(path: Path, parts: list[memoryview]) -> str:
    """All of it durably, or nothing; returns the SHA-256."""
    sha = hashlib.sha256()
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        try:
            for part in parts:
                for lo in range(0, len(part), PIECE_BYTES):
                    piece = part[lo : lo + PIECE_BYTES]
                    sha.update(piece)
                    while piece:
                        piece = piece[os.write(fd, piece) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return sha.hexdigest()
