"""
Reads the folder of the base model into which an adapter is merged: its tensors, and whether its embeddings are tied.

Only a complete model is read: `from_pretrained` would initialize what is missing at random.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from diloco.errors import ConfigError
from diloco.model.tensorfile import Entry
from diloco_local.export import MODEL
from diloco_local.pretrained import INDEX, damage_of, entries_of

Places = dict[str, tuple[BinaryIO, Entry]]
"""The open file and the place in it of each tensor, by name."""

_PART = re.compile(r"(?P<model>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors")
_MOST_FILES = 500
"""All are open at once."""
_MAX_INDEX_BYTES = 64 << 20
_MAX_CONFIG_BYTES = 1 << 20
_AGAIN = "download the base model again"


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Places]:
    """
    The tensors of a model's folder, which stay readable inside of the `with` statement.

    Raises:
        ConfigError: there is no model, more than one, or a part of one.
        StorageError: a file is damaged, or cannot be read.
    """
    index = _index(folder)
    names = sorted(set(index.values())) if index else _files(folder)
    if len(names) > _MOST_FILES:
        raise ConfigError(
            f"--merge-into {folder}: {len(names)} files of weights, expected at most {_MOST_FILES}; "
            "save the model again with larger ones"
        )
    with contextlib.ExitStack() as stack:
        found: Places = {}
        for name in names:
            path = folder / name
            with damage_of(path, path, advice=_AGAIN):
                file = stack.enter_context(path.open("rb"))
                entries = entries_of(file)
            for tensor, entry in entries.items():
                if index and index.get(tensor) != name:
                    continue
                if tensor in found:
                    raise ConfigError(
                        f"--merge-into {folder}: {tensor} is in two files; remove those of other models"
                    )
                found[tensor] = (file, entry)
        if missing := sorted(index.keys() - found.keys()):
            raise ConfigError(
                f"--merge-into {folder}: {INDEX} names {len(missing)} tensors that its files lack, "
                f"such as {missing[0]}; {_AGAIN}"
            )
        yield found


def _index(folder: Path) -> dict[str, str]:
    """Name of each tensor → its file; empty without an index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    found = _json(path, _MAX_INDEX_BYTES).get("weight_map")
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(name, str) and Path(name).name == name for name in found.values())
    ):
        raise ConfigError(
            f"--merge-into {path}: has no weight_map of tensors and files of this folder; {_AGAIN}"
        )
    names = set(found.values())
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise ConfigError(
            f"--merge-into {folder}: lacks {missing[0]}, which {INDEX} names; {len(missing)} of {len(names)} "
            f"files are missing; {_AGAIN}"
        )
    if MODEL not in names and (folder / MODEL).exists():
        raise ConfigError(
            f"--merge-into {folder}: has {MODEL} and {INDEX}, which does not name it: two models; remove one"
        )
    return found


def _files(folder: Path) -> list[str]:
    """The files of a model without an index."""
    names = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    if not names:
        raise ConfigError(
            f"--merge-into {folder}: has no *.safetensors; expected the folder of the base model"
        )
    parts = [_PART.fullmatch(name) for name in names]
    if len(names) == 1 and parts[0] is None:
        return names
    first = parts[0]
    expected = range(1, int(first["count"]) + 1) if first is not None else range(0)
    found = [
        int(part["number"])
        for part in parts
        if part and first and (part["model"], part["count"]) == (first["model"], first["count"])
    ]
    if len(found) != len(names) or sorted(found) != list(expected):
        raise ConfigError(
            f"--merge-into {folder}: has {len(names)} files of weights, {names[0]} to {names[-1]}, and no {INDEX}; "
            "expected one file, or all of model-00001-of-0000N.safetensors and no other; download the base model "
            "again, or remove the files of other models"
        )
    return names


def tied_rows(folder: Path, base: Mapping[str, Entry]) -> frozenset[int]:
    """
    Numbers of rows of the embeddings that are also the output's: `from_pretrained` makes one matrix of both.

    Raises:
        ConfigError: config.json cannot be read.
    """
    path = folder / "config.json"
    config = _json(path, _MAX_CONFIG_BYTES) if path.is_file() else {}
    sizes = {size for size in _settings(config, "vocab_size") if isinstance(size, int)}
    ties = _settings(config, "tie_word_embeddings")
    if not ties:
        # Left out, it is the default of the model's class; a tied matrix is stored once.
        ties = [sum(is_embedding(entry, sizes) for entry in base.values()) < 2]
    return frozenset(sizes) if any(ties) else frozenset()


def is_embedding(entry: Entry, rows: frozenset[int] | set[int]) -> bool:
    """Whether it is a matrix with a row for each token, and not in one of the numbered layers."""
    numbered = any(part.isdigit() for part in entry.name.split("."))
    return len(entry.shape) == 2 and entry.shape[0] in rows and not numbered


def _settings(config: Mapping[str, Any], key: str) -> list[Any]:
    """Values of a setting of a model and of the models that it consists of, one level deep."""
    inner = [value for value in config.values() if isinstance(value, dict)]
    return [found[key] for found in (config, *inner) if key in found]


def _json(path: Path, most: int) -> dict[str, Any]:
    with damage_of(path, path, advice=_AGAIN), path.open("rb") as file:
        data = file.read(most + 1)
    try:
        if len(data) > most:
            raise ValueError(f"expected at most {most} bytes")
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--merge-into {path}: {error}; {_AGAIN}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--merge-into {path}: expected a JSON object; {_AGAIN}")
    return found
