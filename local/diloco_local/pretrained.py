"""
Writes a model as the folder that `from_pretrained` of Hugging Face's libraries loads.

    model.safetensors, or model-00001-of-00003.safetensors … and model.safetensors.index.json
    model.json                        what the run states about it, with the SHA-256 of each file
    config.json, tokenizer.json, …    copied from the folder of the model that the training began with
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from diloco.errors import ConfigError, DamagedError, StorageError
from diloco.model import elements, tensorfile
from diloco.model.tensorfile import DTYPES, Entry
from diloco.runtime import files
from diloco_local.export import FACTS, MODEL, finished_model

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
TARGETS = ("float32", "bfloat16", "float16")
"""Element types of an export."""

WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".index.json",
)
"""Ends of the names of files that hold weights: those of another model than the exported one."""

_HEADER_BYTES = 256 << 20
_CHUNK_ELEMENTS = 2 << 20
_MOST_FILES = 1000
_MOST_NAMED = 8
_MOST_BYTES = 1 << 30
"""Number and size of the files that are copied: a folder with more is not one of a model."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of weights."""

    name: str
    entries: tuple[Entry, ...]
    """With the element types that they get."""


def export_folder(
    run_dir: Path,
    to: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    files_from: Path | None = None,
) -> dict[str, Any]:
    """
    Write the model of a run into the directory `to`, created if missing.

    Args:
        run_dir: its model/ is verified first.
        to: must not hold weights.
        dtype: element type of all floating-point tensors, one of TARGETS; None: as they are.
        shard_bytes: largest size of the tensors in one file; a single tensor may be larger.
        files_from: folder whose files are copied, except weights.

    Returns:
        The content of the model.json that was written.

    Raises:
        ConfigError: there is no model, it lacks frozen tensors, `to` holds weights, or a value does not fit `dtype`.
        StorageError: the model does not match its SHA-256, or a file cannot be read or written.
    """
    facts = finished_model(run_dir, to)
    refuse_incomplete(run_dir, facts)
    refuse_weights(to)
    others = others_of(files_from) if files_from is not None else []
    source = run_dir / "model" / MODEL
    with damage_of(source, to), source.open("rb") as data:
        verify(data, source, facts)
        entries = entries_of(data)
        shards = plan([converted(entry, dtype) for entry in entries.values()], shard_bytes)
        return write_folder(
            to,
            shards,
            lambda entry: chunks(data, entries[entry.name], entry.dtype),
            facts=facts,
            others={path.name: path for path in others},
        )


@contextlib.contextmanager
def damage_of(source: Path, to: Path, *, advice: str = "run the job again") -> Iterator[None]:
    """Report a disk that fails, and files that are not safetensors, as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or to}: {error.strerror}; the export is not complete"
        ) from None
    except DamagedError as error:
        raise StorageError(f"{source}: {error}; {advice}") from None


def verify(data: BufferedReader, source: Path, facts: Mapping[str, Any]) -> None:
    """
    Compare a model with the SHA-256 in its model.json.

    Raises:
        StorageError: they do not match.
    """
    digest = hashlib.file_digest(data, "sha256").hexdigest()
    if digest != facts["sha256"]:
        raise StorageError(
            f"{source}: SHA-256 is {digest}, expected {facts['sha256']}; nothing was exported; "
            "run the job again"
        )


def write_folder(
    to: Path,
    shards: Sequence[Shard],
    chunks_of: Callable[[Entry], Iterator[bytes]],
    *,
    facts: Mapping[str, Any],
    others: Mapping[str, Path],
) -> dict[str, Any]:
    """
    Write files of weights, an index if there are several, other files, and model.json as the last.

    Args:
        to: directory; created if missing.
        shards: the files of weights.
        chunks_of: the bytes of a tensor, with the element type of its entry.
        facts: about the model; SHA-256 and size are replaced by those of the files.
        others: files to copy, by their names in `to`.

    Returns:
        The content of the model.json that was written.
    """
    written: list[Path] = []
    try:
        to.mkdir(parents=True, exist_ok=True)
        digests = {}
        for shard in shards:
            written.append(to / shard.name)
            digests[shard.name] = _write(files.temporary(written[-1]), shard, chunks_of)
        for name, other in others.items():
            written.append(to / name)
            _copy(other, files.temporary(written[-1]))
        if len(shards) > 1:
            written.append(to / INDEX)
            _write_text(files.temporary(written[-1]), _index(shards))
        stated = {key: value for key, value in facts.items() if key not in ("sha256", "bytes")}
        stated["files"] = digests
        written.append(to / FACTS)
        text = json.dumps(stated, indent=2, sort_keys=True) + "\n"
        _write_text(files.temporary(written[-1]), text)
        for path in written:
            files.publish(path, durable=False)
    finally:
        for path in written:
            files.temporary(path).unlink(missing_ok=True)
    return stated


def plan(entries: Sequence[Entry], shard_bytes: int) -> list[Shard]:
    """
    Distribute tensors over files, in their order.

    >>> [s.name for s in plan([Entry(name=n, dtype="int8", shape=(3,)) for n in "abc"], 6)]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    groups: list[list[Entry]] = [[]]
    free = shard_bytes
    for entry in entries:
        if groups[-1] and entry.size_bytes > free:
            groups.append([])
            free = shard_bytes
        groups[-1].append(entry)
        free -= entry.size_bytes
    if len(groups) == 1:
        return [Shard(MODEL, tuple(groups[0]))]
    return [
        Shard(f"model-{number:05}-of-{len(groups):05}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def refuse_incomplete(run_dir: Path, facts: Mapping[str, Any]) -> None:
    """Refuse a model that lacks its frozen tensors."""
    # The libraries would initialize what is missing at random.
    if frozen := facts.get("frozen"):
        names = [str(tensor["name"]) for tensor in frozen]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise ConfigError(
            f"{run_dir / 'model' / MODEL}: lacks the frozen tensors, which stay with the learners: "
            f"{', '.join(names[:_MOST_NAMED])}{more}; expected a whole model. Of LoRA, give --adapter; else copy it "
            "without --dtype, --shard-size, --files-from and --dcp, and load it into the base model in a program "
            "(load_state_dict with strict=False), or run the job with sync.frozen: Ship"
        )


def refuse_weights(to: Path) -> None:
    """Refuse a directory that holds weights: the libraries load whichever they find first."""
    found = sorted(p.name for p in to.iterdir() if p.name.endswith(WEIGHTS)) if to.is_dir() else []
    if found:
        raise ConfigError(
            f"{to}: already holds {found[0]}; give an empty directory, "
            "and delete this one if an earlier export did not end"
        )


def others_of(folder: Path, *, option: str = "--files-from") -> list[Path]:
    """The files of a model's folder that are not weights."""
    if not folder.is_dir():
        raise ConfigError(f"{option} {folder}: no such directory")
    # Links count: a cache of downloaded models consists of them.
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.name != FACTS
    ]
    size = sum(path.stat().st_size for path in found)
    if not found or len(found) > _MOST_FILES or size > _MOST_BYTES:
        raise ConfigError(
            f"{option} {folder}: {len(found)} files of {size / 1e6:.0f} MB besides weights, expected config.json, "
            f"the tokenizer's files and the like: 1 to {_MOST_FILES} files of at most {_MOST_BYTES / 1e6:.0f} MB"
        )
    return found


def entries_of(data: BinaryIO) -> dict[str, Entry]:
    """The tensors of a safetensors file."""
    size = data.seek(0, 2)
    data.seek(0)
    head = data.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if length > _HEADER_BYTES:
        raise DamagedError(
            f"safetensors: a header of {length} bytes, expected at most {_HEADER_BYTES}"
        )
    return tensorfile.parse(head + data.read(length), size)


def converted(entry: Entry, dtype: str | None) -> Entry:
    """The entry with the element type that it gets; integers keep theirs."""
    floating = entry.dtype in (*TARGETS, "float64")
    return replace(entry, dtype=dtype) if dtype is not None and floating else entry


def _write(part: Path, shard: Shard, chunks_of: Callable[[Entry], Iterator[bytes]]) -> str:
    """Write one file; its SHA-256, hex."""
    header, placed, _ = tensorfile.plan(shard.entries, metadata={"format": "pt"})
    digest = hashlib.sha256(header)
    with _new(part) as file:
        file.write(header)
        for entry in placed:
            for chunk in chunks_of(entry):
                digest.update(chunk)
                file.write(chunk)
    return digest.hexdigest()


def chunks(data: BinaryIO, source: Entry, dtype: str) -> Iterator[bytes]:
    """The bytes of a tensor of a file, converted to an element type."""
    width = DTYPES[source.dtype].size
    for lo in range(source.lo, source.hi, _CHUNK_ELEMENTS * width):
        data.seek(lo)
        raw = data.read(min(_CHUNK_ELEMENTS * width, source.hi - lo))
        if dtype == source.dtype:
            yield raw
            continue
        try:
            yield elements.rounded(elements.numbers(raw, source.dtype), dtype)
        except ConfigError as error:
            raise ConfigError(f"{source.name}: {error}; export it with another --dtype") from None


def _copy(source: Path, part: Path) -> None:
    with source.open("rb") as data, _new(part) as copy:
        shutil.copyfileobj(data, copy)


def _write_text(part: Path, text: str) -> None:
    with _new(part) as file:
        file.write(text.encode())


def _new(part: Path) -> BinaryIO:
    """A new file: a link that was planted under this name is not written through."""
    part.unlink(missing_ok=True)
    return part.open("xb")


def _index(shards: Sequence[Shard]) -> str:
    total = sum(entry.size_bytes for shard in shards for entry in shard.entries)
    found = {
        "metadata": {"total_size": total},
        "weight_map": {entry.name: shard.name for shard in shards for entry in shard.entries},
    }
    return json.dumps(found, indent=2, sort_keys=True) + "\n"
