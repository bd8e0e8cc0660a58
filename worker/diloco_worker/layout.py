"""
A torch model as the job sees it: named tensors, and the copies between its parameters and flat fp32
memory.

Trained: every parameter that requires a gradient, once, whatever it is called or tied to. Constant:
frozen parameters and persistent buffers; they are the same in all learners and are never merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from diloco.errors import ConfigError, DamagedError
from diloco.fragments import Fragment, Layout, Tensor
from diloco_worker.core import tensorfile

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A parameter, and its place in the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A tensor of the model and what is said about it."""

    tensor: torch.Tensor
    info: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """What of a model is trained and what is constant; both sorted by name."""

    trained: tuple[Named, ...]
    constants: tuple[Named, ...]


def describe(model: nn.Module) -> ModelTensors:
    """
    Find every tensor of a model once.

    A tensor that is reachable under several names (tied weights) gets the first of them in
    alphabetical order; the others are its aliases.

    Raises:
        ConfigError: nothing is trained, or a tensor is of a kind that cannot be merged.
    """
    model = getattr(
        model, "_orig_mod", model
    )  # torch.compile wraps; the names inside are the user's
    embeddings = {
        _key(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    names: dict[object, list[str]] = {}
    tensors: dict[object, torch.Tensor] = {}
    for name, tensor in _reachable(model):
        key = _key(tensor)
        names.setdefault(key, []).append(name)
        # Of several tensors on one storage the trained one stands for all.
        if key not in tensors or tensor.requires_grad:
            tensors[key] = tensor
    trained: list[Named] = []
    constants: list[Named] = []
    for key, tensor in tensors.items():
        name, *aliases = sorted(set(names[key]))
        info = Tensor(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            embedding=key in embeddings,
            aliases=tuple(aliases),
        )
        (trained if tensor.requires_grad else constants).append(Named(tensor=tensor, info=info))
    _check(trained, constants)
    return ModelTensors(
        trained=tuple(sorted(trained, key=lambda n: n.info.name)),
        constants=tuple(sorted(constants, key=lambda n: n.info.name)),
    )


def _reachable(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every name of every parameter and persistent buffer."""
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield name, value
    yield from model.named_parameters(remove_duplicate=False)


def _key(tensor: torch.Tensor) -> object:
    """Equal for tensors that are one and the same memory."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _check(trained: list[Named], constants: list[Named]) -> None:
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
        f"{n.info.name} is on the meta device; give it memory before Learner.connect"
        for n in (*trained, *constants)
        if n.tensor.device.type == "meta"
    ]
    problems += [
        f"constant {n.info.name} has dtype {n.info.dtype}; expected one of {', '.join(tensorfile.CODES)}"
        for n in constants
        if n.info.dtype not in tensorfile.CODES
    ]
    if problems:
        raise ConfigError("model: " + "; ".join(problems))


class Copier:
    """
    Copies fragments between a model's parameters and flat memory.

    Args:
        tensors: of the model.
        layout: their cut into fragments.
    """

    def __init__(self, tensors: ModelTensors, layout: Layout) -> None:
        self._by_name = {n.info.name: n.tensor for n in tensors.trained}
        self._constants = tensors.constants
        self._layout = layout
        self._host: list[list[_Pair]] = []
        self._inbox: list[list[_Pair]] = []

    def attach(self, hosts: Sequence[F32], inboxes: Sequence[F32]) -> None:
        """Say where the host copies and inboxes of all fragments are; call before copying."""
        self._host = [self._pairs(f, m) for f, m in zip(self._layout.fragments, hosts, strict=True)]
        self._inbox = [
            self._pairs(f, m) for f, m in zip(self._layout.fragments, inboxes, strict=True)
        ]

    def copy_out(self, fragment: int) -> None:
        """Write the fragment's parameters to its host copy as fp32."""
        with torch.no_grad():
            for parameter, view in self._host[fragment]:
                view.copy_(parameter)

    def copy_in(self, fragment: int) -> None:
        """
        Overwrite the fragment's parameters with its inbox.

        What a parameter cannot hold exactly (bf16) is written back: the inbox is the base of the
        next delta, and that must not contain this rounding.
        """
        with torch.no_grad():
            for parameter, view in self._inbox[fragment]:
                parameter.copy_(view)
                if parameter.dtype not in (torch.float32, torch.float64):
                    view.copy_(parameter)

    def _pairs(self, fragment: Fragment, memory_N: F32) -> list[_Pair]:
        flat = torch.from_numpy(memory_N)
        return [
            (
                self._by_name[slot.tensor.name],
                flat[slot.offset : slot.offset + slot.tensor.elements].view(slot.tensor.shape),
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
        Take the constants of the job from a safetensors file.

        Raises:
            DamagedError: it is none, or holds other tensors than the model.
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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as a flat uint8 tensor on the CPU; shares memory where it can."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite a tensor with values that `as_bytes` gave, from any address."""
    with torch.no_grad():
        # clone: a view of another type needs an address that fits the type.
        out.copy_(data.clone().view(out.dtype).reshape(out.shape))
