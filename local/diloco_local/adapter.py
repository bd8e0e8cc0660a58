"""
Exports the LoRA adapter that a job trained in the format of PEFT, or the base model with the adapter merged into it.

    adapter_model.safetensors, adapter_config.json    what `PeftModel.from_pretrained(base, folder)` loads
    model.safetensors … and the base's other files    merged: what `from_pretrained(folder)` loads without PEFT

Neither torch nor PEFT is needed: an adapter is renamed, and merging is W + s B A.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from diloco.errors import ConfigError, StorageError
from diloco.model.tensorfile import Entry
from diloco_local.export import MODEL, finished_model
from diloco_local.pretrained import (
    SHARD_BYTES,
    Shard,
    chunks,
    convert,
    converted,
    damage_of,
    entries_of,
    others_of,
    plan,
    refuse_weights,
    verify,
    widened,
    write_folder,
)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the names of the base model in those of PEFT."""

_LORA = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))"
    r"\.(?P<adapter>[^.]+)(?P<rest>(?:\.(?:weight|bias))?)"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")

_MERGEABLE = ("True", "False", "gaussian", "eva", "orthogonal")
"""Initializations that leave the base model as it is; PiSSA and others subtract their product from it."""

_VARIANTS = (
    *(
        "lora_bias",
        "target_parameters",
        "trainable_token_indices",
        "layer_replication",
        "alora_invocation_tokens",
    ),
    *("megatron_config", "arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
"""Settings with which a layer is not W + s B A; so are all that begin with use_, except use_rslora."""

_MAX_CONFIG_BYTES = 1 << 20
_MOST_NAMED = 8

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The tensors of an adapter in the file of a run."""

    names: Mapping[str, str]
    """Names in the format of PEFT → names in the run's model."""
    others: tuple[str, ...]
    """Tensors of the run's model that are not part of it."""


@dataclass(frozen=True, slots=True)
class Merge:
    """What changes in the base model."""

    pairs: dict[str, tuple[str, str, float]] = field(default_factory=dict)
    """Name of a weight → names of A and B in the run's model, and their scale."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Name of a tensor → name in the run's model."""


def export_adapter(
    run_dir: Path,
    to: Path,
    *,
    config_from: Path,
    base: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """
    Write the adapter of a run into the directory `to`, created if missing, or the merged model.

    Args:
        run_dir: its model/ is verified first.
        to: must not hold weights.
        config_from: folder with the adapter_config.json that `peft_config["default"].save_pretrained` wrote.
        base: folder of the base model, in safetensors: the adapter is merged into it; None: the adapter alone.
        dtype: element type of floating-point tensors; None: float32 for an adapter, else that of the base.
        shard_bytes: largest size of the tensors in one file of a merged model.

    Returns:
        The content of the model.json that was written; `leftOut` names tensors of the run's model that have no
        place in the format.

    Raises:
        ConfigError: the run's model has no LoRA adapter, or it cannot be merged into this base.
        StorageError: a file cannot be read or written.
    """
    facts = finished_model(run_dir, to)
    config = read_config(config_from)
    refuse_weights(to)
    source = run_dir / "model" / MODEL
    with damage_of(source, to), source.open("rb") as data:
        verify(data, source, facts)
        entries = entries_of(data)
        adapter = adapter_of(entries, str(source))
        facts = {**facts, "leftOut": list(adapter.others[:_MOST_NAMED])}
        if base is None:
            renamed = [
                Entry(name=name, dtype=entry.dtype, shape=entry.shape)
                for name, entry in ((name, entries[own]) for name, own in adapter.names.items())
            ]
            return write_folder(
                to,
                [Shard(WEIGHTS, tuple(converted(entry, dtype) for entry in renamed))],
                lambda entry: chunks(data, entries[adapter.names[entry.name]], entry.dtype),
                facts=facts,
                others={CONFIG: config_from / CONFIG},
            )
        with _base(base) as places:
            weights = {name: entry for name, (_, entry) in places.items()}
            merge = merge_of(adapter, entries, weights, config, str(base))

            def chunks_of(entry: Entry) -> Iterator[bytes]:
                file, found = places[entry.name]
                if own := merge.replaced.get(entry.name):
                    file, found = data, entries[own]
                if entry.name not in merge.pairs:
                    return chunks(file, found, entry.dtype)
                a, b, scale = merge.pairs[entry.name]
                product = scale * (_values(data, entries[b]) @ _values(data, entries[a]))
                if _transposed(product, found.shape, config):
                    product = product.T
                return _sum(_values(file, found), product, entry)

            return write_folder(
                to,
                plan([converted(entry, dtype) for entry in weights.values()], shard_bytes),
                chunks_of,
                facts={key: value for key, value in facts.items() if key != "frozen"},
                others={path.name: path for path in others_of(base, option="--merge-into")},
            )


def read_config(folder: Path) -> dict[str, Any]:
    """
    The configuration of an adapter.

    Raises:
        ConfigError: there is none, or it is not one of LoRA.
    """
    path = folder / CONFIG
    expected = (
        "expected what model.peft_config['default'].save_pretrained(folder) writes; call it in the "
        "training program after get_peft_model"
    )
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--adapter {path}: {reason}; {expected}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ConfigError(
            f"--adapter {path}: peft_type is {kind!r}, expected 'LORA'; load the model into other adapters in a "
            "program (docs/learners.md)"
        )
    return dict(config)


def adapter_of(names: Iterable[str], source: str) -> Adapter:
    """
    Which tensors of a run's model belong to its adapter, and what PEFT calls them.

    >>> adapter_of(["base_model.model.q.lora_A.default.weight"], "").names
    {'base_model.model.q.lora_A.weight': 'base_model.model.q.lora_A.default.weight'}

    Raises:
        ConfigError: there is no adapter, or more than one.
    """
    found, others, adapters = {}, [], set()
    for name in names:
        if match := _LORA.fullmatch(name):
            own = f"{match['module']}.{match['kind']}{match['rest']}"
        elif match := _SAVED.fullmatch(name):
            own = f"{match['module']}.{match['rest']}"
        else:
            others.append(name)
            continue
        adapters.add(match["adapter"])
        # A loop may train the module inside of the PeftModel.
        found[own if own.startswith(PREFIX) else PREFIX + own] = name
    if len(adapters) != 1:
        seen = (
            f"the adapters {', '.join(sorted(adapters)[:_MOST_NAMED])}"
            if adapters
            else "no tensor of LoRA"
        )
        raise ConfigError(
            f"{source}: has {seen}, expected one adapter: tensors such as <module>.lora_A.default.weight, of a job "
            "that trains the model that get_peft_model returns"
        )
    return Adapter(dict(sorted(found.items())), tuple(others))


def merge_of(
    adapter: Adapter,
    entries: Mapping[str, Entry],
    base: Mapping[str, Entry],
    config: Mapping[str, Any],
    where: str,
) -> Merge:
    """
    What to change in a base model.

    Raises:
        ConfigError: the adapter changes the base in another way than by adding s B A, or does not fit it.
    """
    _refuse_variants(config)
    merge, problems = Merge(), []
    for name in adapter.names:
        module, _, kind = name.removeprefix(PREFIX).rpartition(".lora_A.")
        if not module or kind != "weight":
            if ".lora_" not in name:
                merge.replaced[name.removeprefix(PREFIX)] = adapter.names[name]
            elif not name.endswith(".lora_B.weight"):
                problems.append(f"{name} cannot be merged")
            continue
        a, b = (adapter.names[name], adapter.names.get(f"{PREFIX}{module}.lora_B.weight", ""))
        if b not in entries or len(entries[a].shape) != 2 or len(entries[b].shape) != 2:
            problems.append(f"{module}: lora_A and lora_B are not two matrices")
            continue
        merge.pairs[f"{module}.weight"] = (a, b, scale_of(module, entries[a].shape[0], config))
    for name, (a, b, _) in merge.pairs.items():
        shape = (entries[b].shape[0], entries[a].shape[1])
        if name not in base:
            problems.append(f"{name} is missing")
        elif base[name].shape not in (shape, shape[::-1]):
            problems.append(f"{name} has shape {base[name].shape}, expected {shape}")
    for name, own in merge.replaced.items():
        if name not in base or base[name].shape != entries[own].shape:
            problems.append(f"{name} is missing, or has another shape")
    if problems:
        more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise ConfigError(
            f"--merge-into {where}: {'; '.join(problems[:_MOST_NAMED])}{more}; give the folder of the base model that "
            "was trained, or export the adapter and merge it with PEFT (merge_and_unload)"
        )
    return merge


def scale_of(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """
    By what B A is multiplied.

    >>> scale_of("q", 8, {"lora_alpha": 16}), scale_of("q", 4, {"lora_alpha": 16, "use_rslora": True})
    (2.0, 8.0)
    """
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _refuse_variants(config: Mapping[str, Any]) -> None:
    initial = str(config.get("init_lora_weights", True))
    variants = [
        f"{key}={value!r}"
        for key, value in config.items()
        if value and (key in _VARIANTS or (key.startswith("use_") and key != "use_rslora"))
    ]
    if config.get("bias", "none") != "none":
        variants.append(f"bias={config['bias']!r}")
    if initial not in _MERGEABLE:
        variants.append(f"init_lora_weights={initial!r}")
    if not isinstance(config.get("lora_alpha"), int | float):
        variants.append("no lora_alpha")
    if variants:
        raise ConfigError(
            f"--merge-into: the adapter has {', '.join(variants)}, expected plain LoRA; export it without this option, "
            "and merge it with PEFT (merge_and_unload)"
        )


def _transposed(product: F32, shape: tuple[int, ...], config: Mapping[str, Any]) -> bool:
    if product.shape == product.shape[::-1]:
        return bool(config.get("fan_in_fan_out"))
    return product.shape != shape


@contextlib.contextmanager
def _base(folder: Path) -> Iterator[dict[str, tuple[BinaryIO, Entry]]]:
    """The tensors of a model's folder: the open file and the place in it, by name."""
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise ConfigError(
            f"--merge-into {folder}: has no *.safetensors; expected the folder of the base model"
        )
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, Entry]] = {}
        for path in paths:
            file = stack.enter_context(path.open("rb"))
            for name, entry in entries_of(file).items():
                if name in places:
                    raise ConfigError(
                        f"--merge-into {folder}: {name} is in two files; remove those of other models"
                    )
                places[name] = (file, entry)
        yield places


def _values(file: BinaryIO, entry: Entry) -> F32:
    file.seek(entry.lo)
    raw = file.read(entry.hi - entry.lo)
    if len(raw) != entry.hi - entry.lo:
        raise StorageError(f"{entry.name}: the file ended; copy it again")
    kind = "uint16" if entry.dtype == "bfloat16" else entry.dtype
    return widened(np.frombuffer(raw, np.dtype(kind))).astype(np.float32).reshape(entry.shape)


def _sum(values: F32, product: F32, entry: Entry) -> Iterator[bytes]:
    try:
        yield convert((values + product).reshape(-1), entry.dtype).tobytes()
    except ConfigError as error:
        raise ConfigError(f"{entry.name}: {error}; export it with another --dtype") from None
