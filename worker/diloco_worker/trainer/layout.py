"""
The named tensors of a torch model, and copies between its parameters and flat fp32 memory.

Trained: every parameter that requires a gradient, once, even if it is tied. Frozen: the other
parameters. Buffers: what else a state_dict has; the moving ones change while training, and are
merged with the parameters. The constants are the tensors that the job stores without merging them
(docs/adr/0023): they come from the learner that initializes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diloco.errors import ConfigError, DamagedError
from diloco.model import tensorfile
from diloco.model.fragments import Fragment, Layout, Slot, Tensor
from diloco_worker.core.shard_slices import Box, whole
from diloco_worker.trainer import digits, overlaps
from diloco_worker.trainer.wrappers import bare, distinct, plain_names, wraps

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_Index = tuple[slice, ...] | None
"""A part of a tensor; None: all of it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A part of a parameter or buffer, and its view of the memory; that of integers is of their digits."""

    tensor: torch.Tensor
    part: _Index
    """Of what this process holds of the tensor."""
    view: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """The part; to write to it changes the tensor."""
        held = local(self.tensor)
        return held if self.part is None else held[self.part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank of a learner holds of a tensor, and which part of that it copies out; None: nothing."""

    held: Box | None
    copied: Box | None


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
        ] + [
            f"constant {n.info.name} is a {type(n.tensor).__name__}, which the job cannot store; expected a plain "
            "tensor, or a frozen parameter with spec.sync.frozen: Keep"
            for n in constants
            if wraps(n.tensor)
        ]
        if problems:
            raise ConfigError("model: " + "; ".join(problems))
        return constants


def describe(
    model: nn.Module, *, moving: Sequence[str] | None = (), sharded: bool = False
) -> ModelTensors:
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
    model = bare(model)
    statistics = set() if moving is None else _statistics(model)
    embeddings = {
        _key(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    plain = plain_names(model)
    parameters = {plain(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    names: dict[object, list[str]] = {}
    tensors: dict[object, torch.Tensor] = {}
    for name, tensor in _reachable(model, plain):
        _check_kind(name, tensor, sharded=sharded)
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
    _check(trained, changing, frozen, buffers)
    return ModelTensors(
        trained=_by_name(trained),
        frozen=_by_name(frozen),
        moving=_by_name(changing),
        buffers=_by_name(buffers),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor; to write to it changes the tensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        held: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return held


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is distributed over processes, as by `fully_shard` or `parallelize_module`."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def _statistics(model: nn.Module) -> set[object]:
    """
    Keys of the running statistics of normalization layers: they change with each forward pass.

    A module does not state whether another buffer changes, and a layout must not depend on when a
    learner looks: those that do are named in the manifest, and `buffers.Watch` notices the others.
    """
    return {
        _key(buffer)
        for module in model.modules()
        if _normalizes(module)
        for buffer in module.buffers(recurse=False)
    }


def _normalizes(module: nn.Module) -> bool:
    # A scripted module has the name of its class, in another class.
    kind = getattr(nn, str(getattr(module, "original_name", "")), type(module))
    return isinstance(kind, type) and issubclass(kind, _NormBase)


def unmatched(tensors: ModelTensors, patterns: Iterable[str]) -> list[str]:
    """Those of the patterns of `describe` that are the name of no buffer that moves."""
    names = [name for n in tensors.moving for name in (n.info.name, *n.info.aliases)]
    return [pattern for pattern in patterns if not _matches(names, [pattern])]


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    own = [name for name in names if name.rpartition(".")[2] != EXTRA_STATE]
    return any(fnmatchcase(name, pattern) for name in own for pattern in patterns)


def _by_name(tensors: Iterable[Named]) -> tuple[Named, ...]:
    return tuple(sorted(tensors, key=lambda n: n.info.name))


def _reachable(model: nn.Module, plain: Callable[[str], str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every plain name of every parameter and persistent buffer."""
    parameters = {plain(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    buffers = {plain(n): b for n, b in model.named_buffers(remove_duplicate=False)}
    own = [*parameters.values(), *buffers.values()]
    states = _states(model)
    tensors = {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
    known = set(map(id, own))
    others = {name: value for name, value in tensors.items() if id(value) not in known}
    copies = _computed(others, _states(model), own) if others else set()
    for name, value in tensors.items():
        own_name = plain(name)
        if name not in others:
            yield own_name, value
        elif own_name in buffers:
            yield own_name, buffers[own_name]  # a hook put another tensor in its place
        elif own_name not in parameters and name not in copies:
            yield own_name, value
    yield from parameters.items()


def _states(model: nn.Module) -> Mapping[str, object]:
    """Its state_dict with the tensors themselves."""
    try:
        return model.state_dict(keep_vars=True)
    except TypeError:  # one of the user's, without arguments
        return nn.Module.state_dict(model, keep_vars=True)


def _computed(
    others: Mapping[str, torch.Tensor], again: Mapping[str, object], own: Iterable[torch.Tensor]
) -> set[str]:
    """
    Names of what a hook of `state_dict` computes from parameters, such as parts of a fused matrix.

    Args:
        others: tensors of a state_dict that are neither a parameter nor a buffer.
        again: that of another call, which computes them again.
        own: the parameters and buffers.
    """
    keys = {_key(tensor): memory_key(tensor) for tensor in own}
    held = set(keys.values())

    def computed(name: str, value: torch.Tensor) -> bool:
        if _key(value) in keys or name.rpartition(".")[2] == EXTRA_STATE:
            return False
        second = again.get(name)
        kept = isinstance(second, torch.Tensor) and _key(second) == _key(value)
        return not kept or memory_key(value) in held or not value.is_leaf

    return {name for name, value in others.items() if computed(name, value)}


def memory_key(tensor: torch.Tensor) -> object:
    """Equal for tensors of which one is a part of the other."""
    held = local(tensor)
    return held.untyped_storage().data_ptr() if _has_memory(held) else id(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor) or _kind(tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.device.type != "meta" and tensor.numel() > 0


def _kind(tensor: torch.Tensor) -> str:
    """How a tensor is stored that has no dense values; "": it has them."""
    if tensor.is_nested:
        return "nested"
    return "" if tensor.layout == torch.strided else str(tensor.layout)


def _key(tensor: torch.Tensor) -> object:
    """Equal for tensors that share all of their memory."""
    # A DTensor itself has no memory: its `data_ptr` is 0.
    held = local(tensor)
    if not _has_memory(held):
        return id(tensor)
    return held.device, held.data_ptr(), tuple(tensor.shape), held.stride(), held.dtype


def _check_kind(name: str, tensor: torch.Tensor, *, sharded: bool) -> None:
    """
    Only tensors whose values can be copied are merged.

    Raises:
        ConfigError: a tensor without a shape yet or without dense values, a DTensor where this process must hold
            the whole, or another subclass of Tensor.
    """
    if is_lazy(tensor):
        raise ConfigError(
            f"model: {name} has no shape yet, because it is that of a lazy module; run one forward pass before "
            "Learner.connect"
        )
    if tensor.requires_grad and tensor.is_inference():
        raise ConfigError(
            f"model: {name} was made in torch.inference_mode; make what is trained outside of it"
        )
    if kind := _kind(tensor):
        raise ConfigError(
            f"model: {name} is a {kind} tensor, expected a dense one; if it is a buffer that every learner builds for "
            "itself, register it with persistent=False"
        )
    if is_dtensor(tensor):
        if not sharded:
            raise ConfigError(
                f"model: {name} is a {type(tensor).__name__} with placements {tensor.placements}, expected "  # type: ignore[attr-defined]
                "a plain tensor: of a sharded model, every rank calls Learner.connect after "
                "torch.distributed.init_process_group"
            )
        tensor = local(tensor)
    if tensor.requires_grad and is_traceable_wrapper_subclass(tensor):
        raise ConfigError(
            f"model: the trained parameter {name} is a {type(tensor).__name__}, a subclass of Tensor that is not "
            "known here; expected a plain tensor or a DTensor"
        )


_COMPLEX = ": train torch.view_as_real of it, and call torch.view_as_complex in forward"


def _check(
    trained: list[Named], moving: list[Named], frozen: list[Named], buffers: list[Named]
) -> None:
    if not trained:
        raise ConfigError(
            "the model has no parameter that requires a gradient; there is nothing to train"
        )
    problems = [
        f"parameter {n.info.name} has dtype {n.info.dtype}; only real floating point can be merged"
        + (_COMPLEX if n.tensor.is_complex() else "")
        for n in trained
        if not n.tensor.is_floating_point()
    ]
    problems += [
        f"{n.info.name} is on the meta device; materialize it before Learner.connect"
        for n in (*trained, *moving, *frozen, *buffers)
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
    merged = {n.info.name for n in (*trained, *moving)}
    held = [(n.info.name, local(n.tensor)) for n in (*trained, *moving, *frozen)]
    problems += overlaps.problems([(name, t) for name, t in held if _has_memory(t)], merged)
    if problems:
        raise ConfigError("model: " + "; ".join(problems))


class Copier:
    """
    Copies fragments between a model's parameters and buffers and flat memory.

    Args:
        tensors: of the model.
        layout: the fragments and the constants.
        shares: by name, what this rank holds and copies out; None: everything.
    """

    def __init__(
        self, tensors: ModelTensors, layout: Layout, *, shares: Mapping[str, Share] | None = None
    ) -> None:
        self._by_name = {n.info.name: n.tensor for n in tensors.merged}
        stored = {t.name for t in layout.constants}
        others = (*tensors.frozen, *tensors.buffers)
        self._constants = _by_name(n for n in others if n.info.name in stored)
        self._layout, self._shares = layout, shares
        self.out: list[list[list[Pair]]] = []
        """By fragment and place."""
        self.held: list[list[Pair]] = []
        self.back: list[list[Pair]] = []
        """Those whose rounding is written to the inbox."""

    def attach(self, hosts: Sequence[Sequence[F32]], inboxes: Sequence[F32]) -> None:
        """Set the places of host copies and the inboxes of all fragments; call this before copying."""
        fragments = self._layout.fragments
        self.out = [
            [self._pairs(f, memory, out=True) for memory in places]
            for f, places in zip(fragments, hosts, strict=True)
        ]
        pairs = zip(fragments, inboxes, strict=True)
        both = [(self._pairs(f, m, out=False), self._pairs(f, m, out=True)) for f, m in pairs]
        self.held = [held for held, _ in both]
        self.back = [[pair for pair in copied if _rounds(pair.tensor)] for _, copied in both]

    def copy_out(self, fragment: int, place: int = 0) -> None:
        """Write this rank's part of the fragment to a place of its host copy as fp32."""
        with torch.no_grad():
            for pair in self.out[fragment][place]:
                values = pair.values
                pair.view.copy_(
                    values if values.is_floating_point() else digits.to_digits_on_host(values)
                )

    def copy_in(self, fragment: int) -> None:
        """
        Overwrite what this rank holds of the fragment's parameters with its inbox.

        Values that a parameter cannot hold exactly (bf16) are written back to the inbox: it is the
        base of the next delta, which must not contain this rounding.
        """
        with torch.no_grad():
            for pair in self.held[fragment]:
                values = pair.values
                if values.is_floating_point():
                    values.copy_(pair.view)
                else:
                    values.copy_(digits.to_integers_on_host(pair.view).view(values.shape))
            for pair in self.back[fragment]:
                pair.view.copy_(pair.values)

    def _pairs(self, fragment: Fragment, memory_N: F32 | torch.Tensor, *, out: bool) -> list[Pair]:
        flat = memory_N if isinstance(memory_N, torch.Tensor) else torch.from_numpy(memory_N)
        pairs = (self._pair(slot, flat, out=out) for slot in fragment.slots)
        return [pair for pair in pairs if pair is not None]

    # ------------------------------------------------------------ by way of a buffer on the device

    def stage_out(self, fragment: int, buffer_N: torch.Tensor) -> None:
        """Write the fragment to a flat fp32 buffer on the model's device, without waiting for the device."""
        described = self._layout.fragments[fragment]
        with torch.no_grad():
            for slot in described.slots:
                if slot.offset + slot.tensor.length < slot.end:
                    buffer_N[slot.offset + slot.tensor.length : slot.end].zero_()
            for pair in self._pairs(described, buffer_N, out=True):
                values = pair.values
                pair.view.copy_(values if values.is_floating_point() else digits.to_digits(values))

    def stage_in(self, fragment: int, buffer_N: torch.Tensor) -> None:
        """
        Overwrite the fragment's parameters from a buffer on their device, without waiting for the device.

        Where they round, the buffer gets the rounded values, as the inbox does in `copy_in`.
        """
        with torch.no_grad():
            for pair in self._pairs(self._layout.fragments[fragment], buffer_N, out=False):
                values = pair.values
                if not values.is_floating_point():
                    values.copy_(digits.to_integers(pair.view).view(values.shape))
                    continue
                values.copy_(pair.view)
                if _rounds(pair.tensor):
                    pair.view.copy_(values)

    def rounds(self, fragment: int) -> bool:
        """Whether parameters of the fragment cannot hold all values of fp32."""
        return bool(self.back[fragment])

    # ------------------------------------------------------------ pairs

    def _pair(self, slot: Slot, flat: torch.Tensor, *, out: bool) -> Pair | None:
        info = slot.tensor
        view = flat[slot.offset : slot.offset + info.length]
        tensor = self._by_name[info.name]
        parts = self._parts(info, out=out)
        if parts is None:
            return None
        inside, outside = parts
        if info.newest:  # whole: its digits have no shape
            return Pair(tensor, None, view)
        view = view.view(info.shape)
        return Pair(tensor, inside, view if outside is None else view[outside])

    def _parts(self, info: Tensor, *, out: bool) -> tuple[_Index, _Index] | None:
        """The part within what this rank holds, and within the whole tensor; None: it has no part."""
        if self._shares is None:
            return None, None
        share = self._shares[info.name]
        box = share.copied if out else share.held
        if box is None or share.held is None:
            return None
        inside = None if box == share.held else box.slices(share.held.lo)
        return inside, None if box == whole(info.shape) else box.slices()

    # ------------------------------------------------------------ constants

    def constants_bytes(self) -> int:
        """Size of the constants as a safetensors file."""
        return tensorfile.plan(self._entries())[2]

    def constants_out(self, memory: U8) -> None:
        """Write this rank's part of the constants as a safetensors file."""
        header, entries, size = tensorfile.plan(self._entries())
        memory[: len(header)] = np.frombuffer(header, np.uint8)
        flat = torch.from_numpy(memory[:size])
        for named, entry in zip(self._constants, entries, strict=True):
            parts = self._parts(named.info, out=True)
            if entry.hi == entry.lo or parts is None:
                continue
            inside, outside = parts
            held = local(named.tensor)
            values = held if inside is None else held[inside]
            _bytes_view(flat, entry, outside).copy_(as_bytes(values).view((*values.shape, -1)))

    def constants_in(self, memory: U8) -> None:
        """
        Overwrite what this rank holds of the constants from a safetensors file.

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
            parts = self._parts(named.info, out=False)
            if entry.hi > entry.lo and parts is not None:
                from_bytes(_bytes_view(flat, entry, parts[1]).reshape(-1), local(named.tensor))

    def _entries(self) -> list[tensorfile.Entry]:
        return [
            tensorfile.Entry(name=n.info.name, dtype=n.info.dtype, shape=n.info.shape)
            for n in self._constants
        ]


def _bytes_view(flat: torch.Tensor, entry: tensorfile.Entry, part: _Index) -> torch.Tensor:
    """The bytes of a part of a tensor in a file, by element: at any alignment."""
    view = flat[entry.lo : entry.hi].view((*entry.shape, -1))
    return view if part is None else view[part]


def _rounds(tensor: torch.Tensor) -> bool:
    """Whether a parameter cannot hold all values of fp32."""
    return tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64)


def dtype_name(tensor: torch.Tensor) -> str:
    """The element type as `diloco.model.tensorfile.DTYPES` names it: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor as a flat uint8 tensor on the CPU; shares memory if possible."""
    return local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """What this process holds of a tensor as bytes, in order. One that is not contiguous is copied as a whole."""
    flat = local(tensor).detach().reshape(-1)
    step = max(1, PIECE_BYTES // max(1, flat.element_size()))
    for at in range(0, flat.numel(), step):
        yield flat[at : at + step].cpu().contiguous().view(torch.uint8).numpy().data


def from_bytes(data: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite a tensor with the values of `as_bytes`, at any alignment."""
    with torch.no_grad():
        # clone: a view of another dtype needs an aligned address.
        values, part = data.clone().view(out.dtype).reshape(out.shape), distinct(out)
        part.copy_(values[tuple(map(slice, part.shape))])
