"""
Writes a model as a checkpoint of torch.distributed.checkpoint, which `dcp.load` reads into a model of any sharding.

    .metadata, __0_0.distcp    what `dcp.save` writes
    model.json                 what the run states about it, with the SHA-256 of each file
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, StorageError
from diloco.runtime import files
from diloco_local.export import FACTS, MODEL, finished_model
from diloco_local.pretrained import damage_of, refuse_incomplete, verify


def export_dcp(run_dir: Path, to: Path) -> dict[str, Any]:
    """
    Write the model of a run into the directory `to`, created if missing.

    Returns:
        The content of the model.json that was written.

    Raises:
        ConfigError: there is no model, it lacks frozen tensors, or `to` has files.
        StorageError: the model does not match its SHA-256, or a file cannot be read or written.
    """
    facts = finished_model(run_dir, to)
    refuse_incomplete(run_dir, facts)
    if to.is_dir() and any(to.iterdir()):
        raise ConfigError(
            f"{to}: has files; give an empty directory, and delete this one if an earlier export did not end"
        )
    source = run_dir / "model" / MODEL
    with damage_of(source, to):
        with source.open("rb") as data:
            verify(data, source, facts)
        to.mkdir(parents=True, exist_ok=True)
        _write(source, to)
        digests = {path.name: _sha256(path) for path in sorted(to.iterdir())}
        stated = {key: value for key, value in facts.items() if key not in ("sha256", "bytes")}
        stated["files"] = digests
        files.replace(to / FACTS, json.dumps(stated, indent=2, sort_keys=True) + "\n")
    return stated


def _write(source: Path, to: Path) -> None:
    # In its own process: the command line never imports torch.
    argv = [sys.executable, "-m", "diloco_worker.dcp_writer", f"--model={source}", f"--to={to}"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise StorageError(f"{to}: torch.distributed.checkpoint: {last}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
