"""
What the syncer keeps on disk, put together and taken apart: snapshot ↔ engine and Θ, Θ → exported model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco import wire
from diloco.errors import ConfigError
from diloco.fragments import CHUNK
from diloco.spec import RunSpec
from diloco_syncer.core.engine import Engine
from diloco_syncer.store import Snapshot, Store, export_model, raw_tensors
from diloco_syncer.theta import Theta, tensor_to_json

log = logging.getLogger(__name__)


def keep_old(spec: RunSpec) -> int:
    """How many replaced fragments stay in memory: those of the rounds in flight and as many again."""
    return 2 * spec.overlap


def down_format(spec: RunSpec) -> int:
    """The wire format of results."""
    return wire.format_of(spec.wire_down)


def chunk_bytes(spec: RunSpec) -> int:
    """Encoded size of a full chunk on its way up."""
    return wire.encoded_bytes(wire.format_of(spec.wire_up), CHUNK)


def write_snapshot(
    store: Store, step: int, epoch: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]
) -> None:
    """Make engine and Θ durable; raises StorageError."""
    store.write(Snapshot(step=step, epoch=epoch, arrays=arrays, meta=meta))


def resume(
    spec: RunSpec, directory: Path, store: Store, *, epoch: int
) -> tuple[Engine, Theta | None]:
    """
    Engine and Θ from the newest snapshot that verifies; fresh ones if there is none.

    Raises:
        ConfigError: the snapshot is of a job with another spec.
    """
    snapshot = store.newest()
    events = directory / "events.jsonl"
    if snapshot is None:
        engine = Engine(spec=spec, epoch=epoch)
        engine.members.replay(_audit_lines(events, 0))
        return engine, None
    stated = snapshot.meta["spec"]
    if stated != spec.hash:
        raise ConfigError(
            f"{directory}: its snapshots are of run spec {stated}, this job's is {spec.hash}; "
            "use the manifest that began this run, or another directory"
        )
    theta = Theta.from_snapshot(
        snapshot.arrays, snapshot.meta["theta"], spec, keep_old=keep_old(spec)
    )
    engine = Engine.resume(spec, epoch=epoch, state=dict(snapshot.meta["engine"]))
    engine.members.replay(_audit_lines(events, int(snapshot.meta["eventsBytes"])))
    log.info("resumed from step %d, epoch %d begins", snapshot.step, epoch)
    return engine, theta


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def _audit_lines(path: Path, offset: int) -> Iterator[dict[str, Any]]:
    """Lines of events.jsonl from a byte offset on; torn ones are left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def export(
    directory: Path, theta: Theta, spec: RunSpec, *, step: int, tokens: int
) -> tuple[str, str]:
    """
    Write model/ so that `model.load_state_dict(load_file(path))` works: parameters, tied names, buffers.

    Returns:
        Path and SHA-256 of model.safetensors.

    Raises:
        StorageError: the disk refused.
    """
    tensors: dict[str, Any] = dict(theta.named())
    for name, tensor in (raw_tensors(theta.constants) if theta.constants else {}).items():
        tensors.setdefault(name, tensor)
    meta = {
        "job": spec.job,
        "step": step,
        "tokens": tokens,
        "specHash": spec.hash,
        "seed": spec.seed,
        "recipe": spec.recipe,
        "config": spec.recipe_config,
        "parameters": theta.layout.elements,
        "tensors": [tensor_to_json(t) for t in theta.layout.tensors],
    }
    digest = export_model(directory / "model", tensors, meta)
    return str(directory / "model" / "model.safetensors"), digest


def exported(directory: Path) -> tuple[str, str]:
    """Path and SHA-256 of a model exported before; empty strings if there is none."""
    facts = directory / "model" / "model.json"
    try:
        return str(facts.with_name("model.safetensors")), str(
            json.loads(facts.read_text())["sha256"]
        )
    except (OSError, ValueError, KeyError):
        return "", ""
