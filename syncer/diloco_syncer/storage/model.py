"""
The exported model: model.safetensors and, last, model.json with its SHA-256.

Shell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.model.tensorfile import parse
from diloco.runtime import files
from diloco.runtime.disk import LOCAL, Disk
from diloco_syncer.storage.durable import (
    Array,
    Fault,
    RawTensor,
    TensorFile,
    no_fault,
    os_errors,
    publish,
    write_temporary,
)


def export_model(
    directory: Path,
    tensors: Mapping[str, Array | RawTensor],
    meta: Mapping[str, Any],
    *,
    disk: Disk = LOCAL,
    fault: Fault = no_fault,
) -> str:
    """
    Write model.safetensors and, last, model.json: `meta` plus `bytes` and `sha256` of the file.

    An existing model.json always describes the model.safetensors beside it, also after a crash.

    Returns:
        The SHA-256 of model.safetensors, hex.

    Raises:
        StorageError: the disk reported an error; an older model there is intact unless only a rename was
            left to do.
    """
    data, facts = directory / "model.safetensors", directory / "model.json"
    unfinished = (files.temporary(data), files.temporary(facts))
    with os_errors(disk, directory, "exporting the model to", remove=unfinished):
        disk.make_directory(directory)
        file = TensorFile.of(tensors, metadata={"format": "pt"})
        [sha256] = write_temporary(disk, data, file.parts, hash_groups=[file.parts], fault=fault)
        description = {**meta, "bytes": file.size_bytes, "sha256": sha256}
        text = json.dumps(description, indent=2, sort_keys=True) + "\n"
        write_temporary(disk, facts, [text.encode()])
        fault("after-data")
        disk.remove(facts)
        publish(disk, data)
        fault("before-manifest")
        publish(disk, facts)
    return sha256


def raw_tensors(blob: bytes) -> dict[str, RawTensor]:
    """
    Split a safetensors blob into its tensors, views of the blob; keeps types that numpy lacks.

    Raises:
        DamagedError: the blob is not safetensors.
    """
    view = memoryview(blob)
    return {
        name: RawTensor(dtype=entry.dtype, shape=entry.shape, data=view[entry.lo : entry.hi])
        for name, entry in parse(blob, len(blob)).items()
    }
