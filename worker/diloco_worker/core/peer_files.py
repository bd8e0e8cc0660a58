"""
What a peer sends of its local checkpoint: the optimizers' tensors, and a manifest that describes them. Pure.

The newcomer has them as a checkpoint without a model: `peer-state.safetensors` and `peer-state.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.errors import StorageError
from diloco.model import tensorfile
from diloco.model.tensorfile import Entry
from diloco_worker.core.sealed import sealed, unsealed

PEER_MANIFEST, PEER_TENSORS = "peer-state.json", "peer-state.safetensors"
"""Names in the state directory of the newcomer."""

MOST_MANIFEST_BYTES = 256 << 20
BYTES_PER_ELEMENT = 32
SMALL_BYTES = 64 << 20
"""A state of more than so many bytes per element of the trained tensors, and these, is refused."""

_SENT = ("local_step", "global_step", "run", "digest", "optimizers")


@dataclass(frozen=True, slots=True)
class Selection:
    """What to send of a checkpoint."""

    manifest: bytes
    header: bytes
    """Of the file of tensors that is sent."""
    ranges: Sequence[tuple[int, int]]
    """Its bytes after the header, as ranges of the checkpoint's file."""

    @property
    def tensors_bytes(self) -> int:
        """Size of the file of tensors."""
        return len(self.header) + sum(hi - lo for lo, hi in self.ranges)


def select(manifest: Mapping[str, Any], entries: Mapping[str, Entry]) -> Selection:
    """
    The state of the optimizers in a checkpoint of one process.

    Args:
        manifest: of the checkpoint.
        entries: the tensors of its file.

    Raises:
        StorageError, KeyError, TypeError, ValueError: it is not such a checkpoint.
    """
    if manifest.get("optimizers") is None:
        raise StorageError("the checkpoint does not describe its optimizers")
    optimizers = dict(manifest["tree"]["dict"])["optimizers"]
    found = sorted((entries[name] for name in set(_tensors(optimizers))), key=lambda e: e.lo)
    header, _, _ = tensorfile.plan(found)
    sent = {name: manifest[name] for name in _SENT}
    tree = {"dict": [["optimizers", optimizers]]}
    text = sealed({**sent, "facts": {}, "tree": tree})
    return Selection(text, header, [(e.lo, e.hi) for e in found if e.hi > e.lo])


def received(
    manifest: bytes, *, sha256: str, tensors_bytes: int, digest: str, run: str, step: int
) -> bytes:
    """
    The manifest to write for a state that has arrived.

    Args:
        manifest: as it was sent.
        sha256: of the file of tensors.
        tensors_bytes: its size.
        digest: of the layout of this learner's model.
        run: that the job is in.
        step: the state must be of this global step or a later one.

    Raises:
        StorageError, KeyError, TypeError, ValueError: it is not what was asked for.
    """
    data = unsealed(manifest)
    if data["digest"] != digest:
        raise StorageError("it is the state of another model")
    if data["run"] != run:
        raise StorageError("it is the state of another run")
    if data["optimizers"] is None:
        raise StorageError("it does not describe its optimizers")
    if int(data["global_step"]) < step:
        raise StorageError(f"it is of global step {data['global_step']}, expected {step} or later")
    return sealed({**data, "sha256": sha256, "bytes": tensors_bytes})


def _tensors(tree: Any) -> Iterator[str]:
    """The names of all tensors of a packed tree (trainer/trees.py)."""
    if not isinstance(tree, dict):
        return
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        yield inner
    elif kind == "dict":
        for key, value in inner:
            yield from _tensors(key)
            yield from _tensors(value)
    else:
        for value in inner:
            yield from _tensors(value)
