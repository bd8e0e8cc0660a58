"""
Exports the LoRA adapter that a job trained in the format of PEFT, or the base model with the adapter merged into it.

    adapter_model.safetensors, adapter_config.json    what `PeftModel.from_pretrained(base, folder)` loads
    model.safetensors … and the base's other files    merged: what `from_pretrained(folder)` loads without PEFT

Neither torch nor PEFT is needed: an adapter is renamed, and merging is W + s B A.
"""

from __future__ import annotations

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
from diloco.model import elements
from diloco.model.tensorfile import Entry
from diloco_local import base_model
from diloco_local.export import MODEL, finished_model
from diloco_local.pretrained import (
    SHARD_BYTES,
    TARGETS,
    Shard,
    chunks,
    converted,
    damage_of,
    entries_of,
    others_of,
    plan,
    refuse_weights,
    verify,
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

_FLOATS = (*TARGETS, "float64")
"""Element types to which a product can be added; others are codes of quantized weights."""

_MAX_CONFIG_BYTES = 1 << 20
_MOST_NAMED = 8

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Adapter:
    """The tensors of an adapter in the file of a run."""

    names: Mapping[str, str]
    """Names in the format of PEFT → names in the run's model."""
    others: tuple[str, ...]
    """Tensors of the run's model that are not part of it; those inside of wrapped modules are last."""


@dataclass(frozen=True, slots=True)
class Merge:
    """What changes in the base model."""

    pairs: dict[str, tuple[str, str, float]] = field(default_factory=dict)
    """Name of a weight → names of A and B in the run's model, and their scale."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Name of a tensor → name in the run's model."""
    transposed: set[str] = field(default_factory=set)
    """Names of the weights that are stored as (inputs, outputs)."""


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
        place in the format, `alsoReplaced` those of the base that the run changed besides the adapter.

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
        _refuse_ranks(adapter, entries, config, config_from / CONFIG)
        if base is None:
            renamed = [
                Entry(name=name, dtype=entry.dtype, shape=entry.shape)
                for name, entry in ((name, entries[own]) for name, own in adapter.names.items())
            ]
            return write_folder(
                to,
                [Shard(WEIGHTS, tuple(converted(entry, dtype) for entry in renamed))],
                lambda entry: chunks(data, entries[adapter.names[entry.name]], entry.dtype),
                facts={**facts, "leftOut": list(adapter.others)},
                others={CONFIG: config_from / CONFIG},
            )
        with base_model.opened(base) as places:
            weights = {name: entry for name, (_, entry) in places.items()}
            merge = merge_of(adapter, entries, weights, config, str(base))
            _refuse_tied(merge, weights, base)
            changed, left_out = _changed(adapter, merge, data, entries, places, str(base))
            own_names = {**changed, **merge.replaced}

            def chunks_of(entry: Entry) -> Iterator[bytes]:
                file, found = places[entry.name]
                if own := own_names.get(entry.name):
                    file, found = data, entries[own]
                if entry.name not in merge.pairs:
                    return chunks(file, found, entry.dtype)
                a, b, scale = merge.pairs[entry.name]
                product = scale * (_values(data, entries[b]) @ _values(data, entries[a]))
                if entry.name in merge.transposed:
                    product = product.T
                return _sum(_values(file, found), product, entry)

            stated = {key: value for key, value in facts.items() if key != "frozen"}
            return write_folder(
                to,
                plan([converted(entry, dtype) for entry in weights.values()], shard_bytes),
                chunks_of,
                facts={**stated, "leftOut": left_out, "alsoReplaced": sorted(changed)},
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
    for key in ("alpha_pattern", "rank_pattern"):
        if not _is_pattern(config.get(key) or {}):
            raise ConfigError(
                f"--adapter {path}: {key} is {str(config[key])[:200]}, expected names of modules, or regular "
                f"expressions of them, with positive numbers; {expected}"
            )
    return dict(config)


def _is_pattern(found: Any) -> bool:
    try:
        return isinstance(found, dict) and all(
            re.compile(_pattern(key)) and _is_number(value) and value > 0
            for key, value in found.items()
        )
    except re.error:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
    others.sort(key=lambda name: ".base_layer." in name or ".original_module." in name)
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
        if b not in entries or not _multiply(entries[b], entries[a]):
            problems.append(f"{module}: lora_A and lora_B are not two matrices of one rank")
            continue
        merge.pairs[f"{module}.weight"] = (a, b, scale_of(module, entries[a].shape[0], config))
    for name, (a, b, _) in merge.pairs.items():
        shape = (entries[b].shape[0], entries[a].shape[1])
        if name not in base:
            problems.append(f"{name} is missing")
        elif base[name].shape not in (shape, shape[::-1]):
            problems.append(f"{name} has shape {base[name].shape}, expected {shape}")
        elif base[name].dtype not in _FLOATS:
            problems.append(
                f"{name} is quantized ({base[name].dtype}), expected {', '.join(_FLOATS)}"
            )
    for name, own in merge.replaced.items():
        if name not in base or base[name].shape != entries[own].shape:
            problems.append(f"{name} is missing, or has another shape")
        elif not _replaces(entries[own], base[name]):
            problems.append(f"{name} is {base[name].dtype}, expected {entries[own].dtype}")
    _refuse(problems, where)
    merge.transposed.update(_transposed(merge, entries, base, config, where))
    return merge


def _refuse(problems: list[str], where: str) -> None:
    if problems:
        more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise ConfigError(
            f"--merge-into {where}: {'; '.join(problems[:_MOST_NAMED])}{more}; give the folder of the base model that "
            "was trained, or export the adapter and merge it with PEFT (merge_and_unload)"
        )


def _multiply(b: Entry, a: Entry) -> bool:
    matrices = len(a.shape) == len(b.shape) == 2 and {a.dtype, b.dtype} <= set(_FLOATS)
    return matrices and a.shape[0] == b.shape[1]


def _replaces(own: Entry, base: Entry) -> bool:
    """Whether a tensor of the run can be stored in the base: as it is, or converted."""
    return own.dtype == base.dtype or {own.dtype, base.dtype} <= set(_FLOATS)


def _transposed(
    merge: Merge,
    entries: Mapping[str, Entry],
    base: Mapping[str, Entry],
    config: Mapping[str, Any],
    where: str,
) -> set[str]:
    """
    Names of the weights that are stored as (inputs, outputs). Of a square one the configuration decides.

    PEFT sets fan_in_fan_out again at each module that it wraps, so that of a model with both kinds of layers it is
    right for the last one only. Therefore, the nearest weights whose shapes show how they are stored must agree.
    """
    stored = {}
    for name, (a, b, _) in merge.pairs.items():
        if base[name].shape[0] != base[name].shape[1]:
            stored[name] = base[name].shape != (entries[b].shape[0], entries[a].shape[1])
    square = merge.pairs.keys() - stored.keys()
    found = {name for name, transposed in stored.items() if transposed}
    expected = bool(config.get("fan_in_fan_out"))
    votes = _votes({**_by_bias(base), **stored})
    for name in sorted(square):
        path = name.split(".")
        nearest = next(
            filter(None, (votes.get(tuple(path[:n])) for n in range(len(path), -1, -1))), {expected}
        )
        # All layers that are stored transposed, those of GPT-2, have a bias.
        no_bias = expected and name.removesuffix("weight") + "bias" not in base
        if nearest != {expected} or no_bias:
            raise ConfigError(
                f"--merge-into {where}: {name} is square, and fan_in_fan_out is {expected}, but other layers of the "
                "model are stored in another way, so whether to transpose its product is unknown; export the adapter "
                "and merge it with PEFT (merge_and_unload)"
            )
    return found | square if expected else found


def _by_bias(base: Mapping[str, Entry]) -> dict[str, bool]:
    """Whether weights are stored as (inputs, outputs), of those that have a bias and are not square."""
    found = {}
    for name, entry in base.items():
        bias = base.get(name.removesuffix("weight") + "bias")
        if name.endswith(".weight") and bias is not None and len(entry.shape) == 2:
            rows, columns = entry.shape
            if rows != columns and bias.shape in ((rows,), (columns,)):
                found[name] = bias.shape == (columns,)
    return found


def _votes(stored: Mapping[str, bool]) -> dict[tuple[str, ...], set[bool]]:
    """How the weights inside of each module are stored."""
    found: dict[tuple[str, ...], set[bool]] = {}
    for name, transposed in stored.items():
        path = name.split(".")
        for length in range(len(path)):
            found.setdefault(tuple(path[:length]), set()).add(transposed)
    return found


def _refuse_tied(merge: Merge, base: Mapping[str, Entry], folder: Path) -> None:
    rows = base_model.tied_rows(folder, base)
    for name in sorted({*merge.pairs, *merge.replaced}):
        if base_model.is_embedding(base[name], rows):
            raise ConfigError(
                f"--merge-into {folder}: the adapter changes {name}, and the base ties its input and output embeddings "
                "(tie_word_embeddings), which were two different matrices in training; export the adapter, and load it "
                "with PEFT"
            )


def _changed(
    adapter: Adapter,
    merge: Merge,
    data: BinaryIO,
    entries: Mapping[str, Entry],
    places: base_model.Places,
    where: str,
) -> tuple[dict[str, str], list[str]]:
    """
    The tensors that the run has besides the adapter: those with other values than in the base, and those it lacks.

    Returns:
        Name of a tensor of the base → name in the run's model; names of the run's tensors that the base lacks.
    """
    changed, left_out, problems = {}, [], []
    for own in adapter.others:
        name = own.removeprefix(PREFIX).replace(".base_layer.", ".")
        if ".original_module." in name or name in merge.replaced:
            continue  # replaced by a module of modules_to_save
        if name not in places:
            left_out.append(own)
            continue
        file, entry = places[name]
        if entries[own].shape != entry.shape or not _replaces(entries[own], entry):
            problems.append(
                f"{name} has shape {entry.shape} of {entry.dtype}, expected "
                f"{entries[own].shape} of {entries[own].dtype}"
            )
        elif _differ(data, entries[own], file, entry):
            changed[name] = own
            if name in merge.pairs:
                problems.append(f"{name} has other values than in the run")
    _refuse(problems, where)
    return changed, left_out


def _differ(data: BinaryIO, own: Entry, file: BinaryIO, base: Entry) -> bool:
    """Whether two tensors differ in the element type of the first."""
    try:
        pairs = zip(chunks(data, own, own.dtype), chunks(file, base, own.dtype), strict=True)
        return any(trained != frozen for trained, frozen in pairs)
    except ConfigError:
        return True  # a value of the base is too large for the run's type


def scale_of(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """
    By what B A is multiplied.

    >>> scale_of("q", 8, {"lora_alpha": 16}), scale_of("q", 4, {"lora_alpha": 16, "use_rslora": True})
    (2.0, 8.0)
    """
    alpha = _setting(config, "alpha_pattern", module, config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _setting(config: Mapping[str, Any], patterns: str, module: str, default: Any) -> Any:
    """What the first pattern that fits a module sets."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.fullmatch(_pattern(pattern), module):
            return value
    return default


def _pattern(key: str) -> str:
    return rf"(.*\.)?({key})"


def _refuse_ranks(
    adapter: Adapter, entries: Mapping[str, Entry], config: Mapping[str, Any], path: Path
) -> None:
    """Refuse the configuration of another run, whose scale would be wrong."""
    if config.get("target_parameters"):
        return  # their matrices have a rank per expert
    for name, own in adapter.names.items():
        if match := re.fullmatch(r"(.+)\.(?:lora_A\.weight|lora_embedding_A)", name):
            rank = _setting(config, "rank_pattern", match[1].removeprefix(PREFIX), config.get("r"))
            if entries[own].shape[:1] != (rank,) or not rank:
                raise ConfigError(
                    f"--adapter {path}: r and rank_pattern give {match[1].removeprefix(PREFIX)} rank {rank}, but its "
                    f"lora_A in the run has shape {entries[own].shape}; expected the configuration of this run"
                )


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
    if not _is_number(config.get("lora_alpha")):
        variants.append("no lora_alpha")
    if variants:
        raise ConfigError(
            f"--merge-into: the adapter has {', '.join(variants)}, expected plain LoRA; export it without this option, "
            "and merge it with PEFT (merge_and_unload)"
        )


def _values(file: BinaryIO, entry: Entry) -> F32:
    file.seek(entry.lo)
    raw = file.read(entry.hi - entry.lo)
    if len(raw) != entry.hi - entry.lo:
        raise StorageError(f"{entry.name}: the file ended; copy it again")
    return elements.numbers(raw, entry.dtype).astype(np.float32).reshape(entry.shape)


def _sum(values: F32, product: F32, entry: Entry) -> Iterator[bytes]:
    try:
        yield elements.rounded((values + product).reshape(-1), entry.dtype)
    except ConfigError as error:
        raise ConfigError(f"{entry.name}: {error}; export it with another --dtype") from None
