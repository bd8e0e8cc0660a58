"""Copies the model out of a run directory and verifies the copy."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, StorageError
from diloco.runtime import files, untrusted_json

MODEL = "model.safetensors"
FACTS = "model.json"

_COPY_BYTES = 8 << 20
_MAX_FACTS_BYTES = 64 << 20
"""Of model.json: hundreds of bytes for each of 65,536 frozen tensors."""


def export_model(run_dir: Path, to: Path) -> dict[str, Any]:
    """
    Copy model.safetensors and, last, model.json into the directory `to`, created if missing.

    Returns:
        The content of model.json.

    Raises:
        ConfigError: the run has no model yet, or `to` is a file.
        StorageError: the model does not match its SHA-256, or a file cannot be written.
    """
    facts = finished_model(run_dir, to)
    source = run_dir / "model"
    partial = [files.temporary(to / name) for name in (MODEL, FACTS)]
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name, part in zip((MODEL, FACTS), partial, strict=True):
            _copy(source / name, part)
        with partial[0].open("rb") as file:
            copied = hashlib.file_digest(file, "sha256").hexdigest()
        if copied != facts["sha256"]:
            raise StorageError(
                f"{source / MODEL}: SHA-256 is {copied}, expected {facts['sha256']}; nothing "
                "was exported; run the job again"
            )
        for name in (MODEL, FACTS):
            files.publish(to / name, durable=False)
    except OSError as error:
        raise StorageError(
            f"{error.filename or to}: {error.strerror}; nothing was exported"
        ) from None
    finally:
        for part in partial:
            part.unlink(missing_ok=True)
    return facts


def finished_model(run_dir: Path, to: Path) -> dict[str, Any]:
    """
    The content of model.json, which has the SHA-256 of the model.

    Raises:
        ConfigError: the run has no model yet, or `to`, where it is to be written, is a file.
        StorageError: model.json cannot be read.
    """
    source = run_dir / "model"
    if not (source / FACTS).is_file():
        raise ConfigError(
            f"{source}: no model yet; a run writes it when it is complete (see diloco status)"
        )
    if to.exists() and not to.is_dir():
        raise ConfigError(f"{to}: is a file; give a directory")
    return _facts(source / FACTS)


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(_MAX_FACTS_BYTES + 1)
    if len(data) > _MAX_FACTS_BYTES:
        raise StorageError(
            f"{path}: has more than {_MAX_FACTS_BYTES} bytes, the maximum; run the job again"
        )
    try:
        found = untrusted_json.parse(data, finite=False)
    except ValueError as error:
        raise StorageError(f"{path}: {error}; run the job again") from None
    if not isinstance(found, dict) or not isinstance(found.get("sha256"), str):
        raise StorageError(f"{path}: has no sha256 of the model; run the job again")
    frozen = found.get("frozen", [])
    if not isinstance(frozen, list) or not all(isinstance(t, dict) and "name" in t for t in frozen):
        raise StorageError(
            f"{path}: frozen is not a list of tensors with their names; run the job again"
        )
    return found


def _copy(source: Path, part: Path) -> None:
    part.unlink(missing_ok=True)
    # A new file: a link that was planted under this name is not written through.
    with source.open("rb") as data, part.open("xb") as copy:
        shutil.copyfileobj(data, copy, _COPY_BYTES)
