"""
The durable form of the syncer: engine and Θ ↔ snapshot, Θ → exported model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.journal import reader
from diloco.journal.parts import Position
from diloco.runtime.disk import LOCAL, Disk, read
from diloco.spec import RunSpec
from diloco_syncer.core.engine import Engine
from diloco_syncer.storage.capture import ExportedModel, Snapshot
from diloco_syncer.storage.model import export_model, raw_tensors
from diloco_syncer.storage.model_output import is_copied
from diloco_syncer.storage.parameters import Parameters
from diloco_syncer.storage.store import Store

log = logging.getLogger(__name__)

EVENTS = "events.jsonl"


def needed_part(store: Store) -> int:
    """
    The oldest part of events.jsonl that a start from any of the snapshots needs.

    Raises:
        StorageError: the disk reported an error.
    """
    return min((_position(meta).part for meta in store.metas()), default=1)


def resume(
    spec: RunSpec, directory: Path, snapshot: Snapshot | None, *, epoch: int, run: str,
    output: str = "", disk: Disk = LOCAL,
) -> tuple[Engine, Parameters | None]:  # fmt: skip
    """
    Engine and Θ from a snapshot; a new engine and None without one.

    Args:
        spec: of the job.
        directory: the run directory.
        snapshot: from `Store.start`.
        epoch: of this process.
        run: from `Store.run`; a model of another run does not complete this one.
        output: URL of the model; one that is not there does not complete the job; "": none.
        disk: holds the files.

    Raises:
        ConfigError: the snapshot is of a job with another spec.
    """
    if snapshot is None:
        engine = Engine(spec=spec, epoch=epoch)
        _replay(engine, directory, disk=disk)
        engine.scheduler.halted = ""  # no parameters are left of what has stopped the merges
        return engine, None
    stated = snapshot.meta["spec"]
    if stated != spec.hash:
        raise ConfigError(
            f"{directory}: its snapshots belong to run spec {stated}, this job has {spec.hash}; "
            "use the manifest that started this run, or another directory"
        )
    # Learners still hold what a person rejected: they must receive this state instead.
    parameters = Parameters.from_snapshot(
        snapshot.arrays, snapshot.meta["theta"], spec, epoch=epoch if snapshot.chosen else None
    )
    model = exported(directory, run=run, disk=disk)
    if model is not None and model.step > snapshot.step:
        # The snapshots were restored from an earlier copy. It would complete the job once that step is done again.
        log.warning(
            "model/model.json describes the lost step %d, and the job resumes from step %d; it is removed",
            model.step,
            snapshot.step,
        )
        disk.remove(directory / "model" / "model.json")
    engine = Engine.resume(
        spec,
        epoch=epoch,
        state=dict(snapshot.meta["engine"]),
        exported=model is not None
        and model.step == snapshot.step
        and (not output or is_copied(directory, model, output, disk=disk)),
    )
    # The new versions become durable with the first commit; until then the file `from-snapshot` stays.
    if snapshot.chosen:
        engine.durability.snapshot_step -= spec.syncer_checkpoint.every_steps
    _replay(engine, directory, since=_position(snapshot.meta), disk=disk)
    if snapshot.chosen:
        engine.scheduler.halted = ""  # a person has decided
    if engine.scheduler.halted:
        log.warning("nothing is merged: %s", engine.waiting_for())
    log.info("resumed from step %d, epoch %d begins", snapshot.step, epoch)
    return engine, parameters


def _replay(engine: Engine, directory: Path, *, since: Position | None = None, disk: Disk) -> None:
    path = directory / EVENTS
    lines = engine.scheduler.replayed(reader.read(path, since=since, disk=disk))
    damaged = engine.learners.replay(lines)
    if damaged:
        log.warning("%s: damaged lines were left out (%d); diloco audit names them", path, damaged)


def export(
    directory: Path, parameters: Parameters, spec: RunSpec, *, step: int, tokens: int, run: str,
    disk: Disk = LOCAL,
) -> ExportedModel:  # fmt: skip
    """
    Write model/ so that `model.load_state_dict(load_file(path))` works: parameters, tied names, constants.

    Frozen parameters that stayed with the learners are only described; `strict=False` loads such a model.

    Raises:
        StorageError: the disk reported an error.
    """
    tensors: dict[str, Any] = dict(parameters.named())
    constants = raw_tensors(parameters.constants) if parameters.constants else {}
    aliases = {t.name: t.aliases for t in parameters.layout.constants}
    for name, tensor in constants.items():
        for each in (name, *aliases.get(name, ())):
            tensors.setdefault(each, tensor)
    meta = {
        "job": spec.job,
        "run": run,
        "step": step,
        "tokens": tokens,
        "specHash": spec.hash,
        "seed": spec.seed,
        "recipe": spec.recipe,
        "config": spec.recipe_config,
        "parameters": parameters.layout.elements,
        "tensors": [t.to_json() for t in parameters.layout.tensors],
        "frozen": [t.to_json() for t in parameters.layout.frozen],
    }
    digest = export_model(directory / "model", tensors, meta, disk=disk)
    return ExportedModel(
        path=str(directory / "model" / "model.safetensors"), sha256=digest, step=step
    )


def exported(directory: Path, *, run: str, disk: Disk = LOCAL) -> ExportedModel | None:
    """
    The model that an earlier process of this run exported; None if there is none.

    One of another run holds what a person rejected, also if it is of the same step. An earlier version
    wrote no name of a run.
    """
    facts = directory / "model" / "model.json"
    try:
        stated = json.loads(read(disk, facts))
        digest, step, of = str(stated["sha256"]), int(stated["step"]), stated.get("run", run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if of != run:
        return None
    path = str(facts.with_name("model.safetensors"))
    return ExportedModel(path=path, sha256=digest, step=step)


def _position(meta: Mapping[str, Any]) -> Position:
    found = meta.get("events") or {}
    return Position(int(found.get("part", 1)), int(found.get("offset", 0)))
