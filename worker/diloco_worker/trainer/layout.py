"""
The named tensors of a torch model, and copies between its parameters and flat fp32 memory.

Trained: every parameter that requires a gradient, once, even if it is tied. Frozen: the other
parameters. Buffers: what else a state_dict has; the moving ones change while training, and are
merged with the parameters. The constants are the tensors that the job stores without merging them
(docs/adr/0023): they come from the learner that initializes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from diloco.errors import ConfigError, DamagedError
from diloco.model import integers, tensorfile
from diloco.model.fragments import Fragment, Layout, Tensor

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A parameter or buffer, and its view of the memory; that of integers is of their digits."""

EXTRA_STATE = "_extra_state"
"""What torch calls the extra state of a module in a state_dict: a copy, so that nothing written to it has an effect."""

PIECE_BYTES = 64 << 20
"""So much of a tensor is copied to the CPU at once, to read it."""

MAX_INTEGERS = 4096
"""Values of a buffer of integers that changes: each takes four of fp32, in a fragment that nothing compresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A tensor of the model and its description."""

    tensor: torch.Tensor
    info: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """Every tensor of a model, once; each kind sorted by name."""

    trained: tuple[Named, ...]
    frozen: tuple[Named, ...]
    """Parameters that require no gradient."""
    moving: tuple[Named, ...]
    """Persistent buffers that change while training."""
    buffers: tuple[Named, ...]
    """Other persistent buffers."""

    @property
    def merged(self) -> tuple[Named, ...]:
        """What each round merges, sorted by name."""
        return _by_name((*self.trained, *self.moving))

    def constants(self, *, ship_frozen: bool) -> tuple[Named, ...]:
        """
        What the job stores without merging it, sorted by name.

        Raises:
            ConfigError: a tensor cannot be stored.
        """
        constants = _by_name((*self.frozen, *self.buffers)) if ship_frozen else self.buffers
        problems = [
            f"constant {n.info.name} has dtype {n.info.dtype}; expected one of {', '.join(tensorfile.DTYPES)}"
            for n in constants
            if n.info.dtype not in tensorfile.DTYPES
        ]
        if problems:
            raise ConfigError("model: " + "; ".join(problems))
        return constants


def describe(model: nn.Module, *, moving: Sequence[str] | None = ()) -> ModelTensors:
    """
    Find every tensor of a model once.

    A tensor with several names (tied weights) gets the first of them in alphabetical order; the
    others are its aliases.

    Args:
        model: on its device; may be compiled.
        moving: patterns of names of buffers that change while training, besides the running statistics
            of normalization layers; None: no buffer is merged, whatever it does. The extra state of a
            module is none.

    Raises:
        ConfigError: nothing is trained, or a tensor cannot be merged.
    """
    model = uncompiled(model)
    statistics = set() if moving is None else _statistics(model)
    embeddings = {
        _key(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names: dict[object, list[str]] = {}
    tensors: dict[object, torch.Tensor] = {}
    for name, tensor in _reachable(model):
        _check_plain(name, tensor)
        key = _key(tensor)
        names.setdefault(key, []).append(name)
        # Of several tensors that share memory, the trained one represents all.
        if key not in tensors or tensor.requires_grad:
            tensors[key] = tensor
    trained: list[Named] = []
    frozen: list[Named] = []
    changing: list[Named] = []
    buffers: list[Named] = []
    for key, tensor in tensors.items():
        name, *aliases = sorted(set(names[key]))
        buffer = not tensor.requires_grad and parameters.isdisjoint(names[key])
        moves = buffer and (key in statistics or _matches(names[key], moving or ()))
        info = Tensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor),
            embedding=key in embeddings,
            aliases=tuple(aliases),
            buffer=moves,
        )
        fixed = changing if moves else buffers if buffer else frozen
        (trained if tensor.requires_grad else fixed).append(Named(tensor=tensor, info=info))
    _check(trained, changing, [*frozen, *buffers])
    return ModelTensors(
        trained=_by_name(trained),
        frozen=_by_name(frozen),
        moving=_by_name(changing),
        buffers=_by_name(buffers),
    )


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside the wrapper of torch.compile: the names of the user are its own."""
    return getattr(model, "_orig_mod", model)


def _statistics(model: nn.Module) -> set[object]:
    """
    Keys of the running statistics of normalization layers: they change with each forward pass.

    A module does not state whether another buffer changes, and a layout must not depend on when a
    learner looks: those that do are named in the manifest, and `buffers.Watch` notices the others.
    """
    return {
        _key(buffer)
        for module in model.modules()
        if isinstance(module, _NormBase)
        for buffer in module.buffers(recurse=False)
    }


def unmatched(tensors: ModelTensors, patterns: Iterable[str]) -> list[str]:
    """Those of the patterns of `describe` that are the name of no buffer that moves."""
    names = [name for n in tensors.moving for name in (n.info.name, *n.info.aliases)]
    return [pattern for pattern in patterns if not _matches(names, [pattern])]


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    own = [name for name in names if name.rpartition(".")[2] != EXTRA_STATE]
    return any(fnmatchcase(name, pattern) for name in own for pattern in patterns)


def _by_name(tensors: Iterable[Named]) -> tuple[Named, ...]:
    return tuple(sorted(tensors, key=lambda n: n.info.name))


def _reachable(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every name of every parameter and persistent buffer."""
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield name, value
    yield from model.named_parameters(remove_duplicate=False)


def _key(tensor: torch.Tensor) -> object:
    """Equal for tensors that share all of their memory."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """
    No part of a tensor may be in another process.

    Raises:
        ConfigError: it is a DTensor, as of `fully_shard` (FSDP2) or `parallelize_module`.
    """
    if hasattr(tensor, "placements") and hasattr(tensor, "to_local"):
        raise ConfigError(
            f"model: {name} is a {type(tensor).__name__} with placements {tensor.placements}, expected "
            "a plain tensor: each process of a learner must hold the whole model, as with "
            "DistributedDataParallel"
        )


def _check(trained: list[Named], moving: list[Named], others: list[Named]) -> None:
    if not trained:
        raise ConfigError(
            "the model has no parameter that requires a gradient; there is nothing to train"
        )
    problems = [
        f"parameter {n.info.name} has dtype {n.info.dtype}; only real floating point can be merged"
        for n in trained
        if not n.tensor.is_floating_point()
    ]
    problems += [
        f"{n.info.name} is on the meta device; materialize it before Learner.connect"
        for n in (*trained, *moving, *others)
        if n.tensor.device.type == "meta"
    ]
    problems += [
        f"buffer {n.info.name}, which changes, has dtype {n.info.dtype}; only real floating point can be "
        "averaged, and integers with a sign of up to 64 bits can be taken from the newest member"
        for n in moving
        if not n.tensor.is_floating_point() and not n.info.newest
    ]
    problems += [
        f"buffer {n.info.name}, which changes, has {n.info.elements} values of {n.info.dtype}, at most "
        f"{MAX_INTEGERS} are supported; leave it out of spec.sync.movingBuffers"
        for n in moving
        if n.info.newest and n.info.elements > MAX_INTEGERS
    ]
    if problems:
        raise ConfigError("model: " + "; ".join(problems))


class Copier:
    """
    Copies fragments between a model's parameters and buffers and flat memory.

    Args:
        tensors: of the model.
        layout: the fragments and the constants.
    """

    def __init__(self, tensors: ModelTensors, layout: Layout) -> None:
        self._by_name = {n.info.name: n.tensor for n in tensors.merged}
        stored = {t.name for t in layout.constants}
        others = (*tensors.frozen, *tensors.buffers)
        self._constants = _by_name(n for n in others if n.info.name in stored)
        self._layout = layout
        self._host: list[list[_Pair]] = []
        self._inbox: list[list[_Pair]] = []

    def attach(self, hosts: Sequence[F32], inboxes: Sequence[F32]) -> None:
        """Set the host copies and inboxes of all fragments; call this before copying."""
        self._host = [self._pairs(f, m) for f, m in zip(self._layout.fragments, hosts, strict=True)]
        self._inbox = [
            self._pairs(f, m) for f, m in zip(self._layout.fragments, inboxes, strict=True)
        ]

    def copy_out(self, fragment: int) -> None:
        """Write the fragment's parameters to its host copy as fp32."""
        with torch.no_grad():
            for parameter, view in self._host[fragment]:
                view.copy_(parameter if parameter.is_floating_point() else _digits(parameter))

    def copy_in(self, fragment: int) -> None:
        """
        Overwrite the fragment's parameters with its inbox.

        Values that a parameter cannot hold exactly (bf16) are written back to the inbox: it is the
        base of the next delta, which must not contain this rounding.
        """
        with torch.no_grad():
            for parameter, view in self._inbox[fragment]:
                if not parameter.is_floating_point():
                    parameter.copy_(_integers(view).view(parameter.shape))
                    continue
                parameter.copy_(view)
                if parameter.dtype not in (torch.float32, torch.float64):
                    view.copy_(parameter)

    def _pairs(self, fragment: Fragment, memory_N: F32) -> list[_Pair]:
        flat = torch.from_numpy(memory_N)
        return [
            (
                self._by_name[slot.tensor.name],
                flat[slot.offset : slot.offset + slot.tensor.length].view(
                    (-1,) if slot.tensor.newest else slot.tensor.shape
                ),
            )
            for slot in fragment.slots
        ]

    # ------------------------------------------------------------ constants

    def constants_bytes(self) -> int:
        """Size of the constants as a safetensors file."""
        return tensorfile.plan(self._entries())[2]

    def constants_out(self, memory: U8) -> None:
        """Write the constants as a safetensors file."""
        header, entries, size = tensorfile.plan(self._entries())
        memory[: len(header)] = np.frombuffer(header, np.uint8)
        flat = torch.from_numpy(memory[:size])
        for named, entry in zip(self._constants, entries, strict=True):
            if entry.hi > entry.lo:
                flat[entry.lo : entry.hi].copy_(as_bytes(named.tensor))

    def constants_in(self, memory: U8) -> None:
        """
        Overwrite the constants from a safetensors file.

        Raises:
            DamagedError: it is not one, or its tensors do not match the model's.
        """
        if not self._constants:
            return
        entries = tensorfile.parse(memory.data, memory.size)
        flat = torch.from_numpy(memory)
        for named in self._constants:
            entry = entries.get(named.info.name)
            if entry is None or (entry.dtype, entry.shape) != (named.info.dtype, named.info.shape):
                raise DamagedError(
                    f"constants: {named.info.name} came as {entry}, expected {named.info.dtype} {named.info.shape}"
                )
            from_bytes(flat[entry.lo : entry.hi], named.tensor)

    def _entries(self) -> list[tensorfile.Entry]:
        return [
            tensorfile.Entry(name=n.info.name, dtype=n.info.dtype, shape=n.info.shape)
            for n in self._constants
        ]


def _digits(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().to("cpu", torch.int64).reshape(-1).numpy()
    return torch.from_numpy(integers.to_digits(values))


def _integers(digits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(integers.from_digits(digits.numpy()))


def dtype_name(tensor: torch.Tensor) -> str:
    """The element type as `diloco.model.tensorfile.DTYPES` names it: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as a flat uint8 tensor on the CPU; shares memory if possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The values of a tensor as bytes, in order. One that is not contiguous is copied as a whole."""
    flat = tensor.detach().reshape(-1)
    step = max(1, PIECE_BYTES // max(1, flat.element_size()))
    for at in range(0, flat.numel(), step):
        yield flat[at : at + step].cpu().view(torch.uint8).numpy().data


def from_bytes(data: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite a tensor with the values of `as_bytes`, at any alignment."""
    with torch.no_grad():
        # clone: a view of another dtype needs an aligned address.
        out.copy_(data.clone().view(out.dtype).reshape(out.shape))
