"""Copies a run's model out of its run directory, and proves that the copy is whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, StorageError

MODEL = "model.safetensors"
FACTS = "model.json"


def export_model(run_dir: Path, to: Path) -> dict[str, Any]:
    """
    Copy model.safetensors and, last, model.json into the directory `to`, which is made if need be.

    Returns:
        What model.json says.

    Raises:
        ConfigError: the run has no model yet, or `to` is a file.
        StorageError: the model does not match its SHA-256, or a disk refused.
    """
    source = run_dir / "model"
    if not (source / FACTS).is_file():
        raise ConfigError(
            f"{source}: no model there yet; a run writes it when it is complete (see diloco status)"
        )
    if to.exists() and not to.is_dir():
        raise ConfigError(f"{to}: is a file; give a directory")
    facts: dict[str, Any] = json.loads((source / FACTS).read_text())
    half_made = [to / f".{name}.part" for name in (MODEL, FACTS)]
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name, part in zip((MODEL, FACTS), half_made, strict=True):
            shutil.copyfile(source / name, part)
        with half_made[0].open("rb") as file:
            copied = hashlib.file_digest(file, "sha256").hexdigest()
        if copied != facts["sha256"]:
            raise StorageError(
                f"{source / MODEL}: SHA-256 is {copied}, {FACTS} says {facts['sha256']}; nothing "
                "was exported, run the job again"
            )
        for name, part in zip((MODEL, FACTS), half_made, strict=True):
            os.replace(part, to / name)
    except OSError as error:
        raise StorageError(
            f"{error.filename or to}: {error.strerror}; nothing was exported"
        ) from None
    finally:
        for part in half_made:
            part.unlink(missing_ok=True)
    return facts
