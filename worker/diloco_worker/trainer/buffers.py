"""
Notices what this learner alone has: buffers and frozen parameters that change while training though the job keeps them
as they were, parameters and buffers that the job does not know, and those that are no longer the job's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from diloco_worker.trainer.device import Device
from diloco_worker.trainer.layout import ModelTensors, Named, is_dtensor, local, pieces, unmatched
from diloco_worker.trainer.wrappers import bare, plain_names, tensors_of

log = logging.getLogger(__name__)

MOST_READS = 3
"""
How often a buffer is read that is written with its own values, as DistributedDataParallel does. Then it counts as
constant.
"""
MOST_NAMES = 8
"""Named in the line about them."""

CLOSE_SECONDS = 5.0
"""How long `WatchBeside.close` waits."""


@dataclass(slots=True)
class _Known:
    writes: int
    digest: int
    reads: int = 0


class Watch:
    """
    Compares buffers with what they were at the last `reset`; reads only those that were written since.

    Args:
        model: whose buffers these are.
        constant: buffers that the job keeps as of step 0.
        moving: those that it merges, in place.
        frozen: parameters that are not trained; those that are written count as changed, because to read them all
            would take long.
        trained: the parameters that it merges.
    """

    def __init__(
        self, model: nn.Module, *, constant: Iterable[Named], moving: Iterable[Named],
        frozen: Iterable[Named] = (), trained: Iterable[Named] = (),
    ) -> None:  # fmt: skip
        self._model = bare(model)
        plain = plain_names(self._model)
        buffers = self._model.named_buffers(remove_duplicate=False)
        self._paths = {plain(name): name for name, _ in buffers}
        """By plain name, the one with the names of wrappers."""
        self._seen = set(self._paths.values())
        """Of buffers that need no sentence, or had one."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        self._sharded = {name for name, p in parameters.items() if is_dtensor(p)}
        """Names in whose place FSDP2 has whole parameters during a forward pass, and after one without a gradient."""
        self._trained = {id(p): p for p in parameters.values() if p.requires_grad}
        self._first = {n: p for n, p in parameters.items() if p.requires_grad}
        """By name, those that were trained at first and have been found since."""
        self._plain = {name: plain(name) for name in self._first}
        self._merged = [(n, n.tensor.dtype) for n in trained]
        self.refused = ""
        """A sentence about parameters with which the learner cannot continue, as of the last `changed`."""
        self.problem = ""
        """A sentence about what is trained here alone, or no longer; it stays, because the result lacks it."""
        self.has_changed = False
        """Whether a constant buffer or a frozen parameter was written with other values."""
        self._constant, self._moving, self._frozen = list(constant), list(moving), list(frozen)
        self._known: dict[str, _Known] = {}
        self.reset()

    def reset(self) -> None:
        """What was written until now does not count: it is the job's model."""
        self._known = {
            n.info.name: _Known(writes=_writes(n.tensor), digest=_digest(n.tensor))
            for n in self._constant
        }
        self._frozen_writes = {n.info.name: _writes(n.tensor) for n in self._frozen}

    def changed(self) -> str:
        """
        A sentence about constant buffers that changed, merged ones that were replaced, frozen parameters that were
        written, parameters that are trained since, those that were removed or renamed, and new buffers; each once.
        """
        found = dict(self._model.named_parameters(remove_duplicate=False)) if self._first else {}
        self.refused = self._other_types() or self._other_parameters(found)
        if self.refused:
            return ""
        written, self._constant = _split(self._constant, self._has_changed)
        replaced, self._moving = _split(self._moving, self._is_replaced)
        sentences = []
        if written:
            sentences.append(
                f"{_listed('buffer', _names(written))} changed while training and will be exported as of step 0: name "
                "what must move with the model in spec.sync.movingBuffers; if nothing must, ignore this line"
            )
        rewritten, self._frozen = _split(self._frozen, self._is_written)
        if rewritten:
            sentences.append(
                f"{_listed('frozen parameter', _names(rewritten), 'was', 'were')} written while training, which no "
                "other learner gets, and a start without the local checkpoint begins with the first values: make what "
                "moves, such as a teacher, buffers named in spec.sync.movingBuffers; if those values come back, ignore "
                "this line"
            )
        self.has_changed = self.has_changed or bool(sentences)
        problems = [*self._problems(found, _names(replaced))]
        self.problem = "; ".join([*filter(None, [self.problem]), *problems])
        return "; ".join([*sentences, *problems])

    def _problems(
        self, found: Mapping[str, torch.Tensor], replaced: Sequence[str]
    ) -> Iterator[str]:
        """Sentences about what the job does not have as the program does."""
        if replaced:
            yield (
                f"{_listed('buffer', replaced, 'was', 'were')} replaced by another tensor, and what is there now is "
                "neither averaged nor exported: change a buffer in place"
            )
        removed, renamed = self._lost(found)
        if removed:
            yield (
                f"since Learner.connect, the program has removed {_listed('parameter', removed)} from the model; the "
                "job and the exported model keep what was removed, as it was: complete the model before Learner.connect"
            )
        if renamed:
            yield (
                f"since Learner.connect, the program has given {_listed('parameter', renamed)} another name, as a mask "
                "or a parametrization does; the exported model has the value under the first one, and not what is "
                "computed from it: complete the model before Learner.connect"
            )
        if unknown := self._new_buffers():
            yield (
                f"since Learner.connect, the program has added {_listed('buffer', unknown)}, so that each learner has "
                "its own, and the exported model none: complete the model before Learner.connect, and list what "
                "changes in spec.sync.movingBuffers"
            )
        if added := self._newly_trained():
            yield (
                f"a gradient is computed for {_listed('parameter', added)}, and was not when this learner connected, "
                "so that they are trained here alone and not merged: build the model, and choose what is trained, "
                "before Learner.connect"
            )

    def _newly_trained(self) -> list[str]:
        known, found = self._trained, self._model.named_parameters()
        added = {
            name: p
            for name, p in found
            if p.requires_grad and id(p) not in known and not self._is_whole(name, p)
        }
        known |= {id(p): p for p in added.values()}
        plain = plain_names(self._model) if added else str
        return [plain(name) for name in added]

    def _other_types(self) -> str:
        other = [(n, dtype) for n, dtype in self._merged if n.tensor.dtype is not dtype]
        if not other:
            return ""
        named, dtype = other[0]
        return _other_type(_names(n for n, _ in other), dtype, named.tensor.dtype)

    def _other_parameters(self, found: Mapping[str, torch.Tensor]) -> str:
        other = [
            name
            for name, first in self._first.items()
            if (p := found.get(name, first)) is not first and not self._is_whole(name, p)
        ]
        if not other:
            return ""
        plain = plain_names(self._model)
        return (
            "since Learner.connect, the program has put another tensor in the place of "
            f"{_listed('parameter', [plain(n) for n in other])}, so that no merge has what this learner trains; "
            "expected the same parameters until the end: complete the model before Learner.connect, and change values "
            "in place"
        )

    def _is_whole(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether it may be one that FSDP2 has gathered."""
        return name in self._sharded and not is_dtensor(parameter)

    def _lost(self, found: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str]]:
        """Names of parameters that were removed, and of those that have another name."""
        if self._first.keys() <= found.keys():
            return [], []
        names, plain = {id(p): name for name, p in found.items()}, plain_names(self._model)
        lost = {name: self._first.pop(name) for name in [*self._first] if name not in found}
        now = {self._plain[name]: plain(names.get(id(p), "")) for name, p in lost.items()}
        known = {*self._plain.values()}  # one that is tied has another of its names
        return (
            [name for name, other in now.items() if not other],
            [f"{name} ({o})" for name, o in now.items() if o and o not in known],
        )

    def _new_buffers(self) -> list[str]:
        added = [
            n for n, _ in self._model.named_buffers(remove_duplicate=False) if n not in self._seen
        ]
        if not added:
            return []
        self._seen.update(added)
        plain = plain_names(self._model)
        return [plain(n) for n in added if plain(n) not in self._paths and self._is_persistent(n)]

    def _is_persistent(self, name: str) -> bool:
        path, _, own = name.rpartition(".")
        module = self._model.get_submodule(path)
        return own not in getattr(module, "_non_persistent_buffers_set", ())

    def _has_changed(self, named: Named) -> bool:
        known = self._known[named.info.name]
        if self._is_replaced(named):
            return True
        if known.reads == MOST_READS or known.writes == _writes(named.tensor):
            return False
        known.writes, known.reads = _writes(named.tensor), known.reads + 1
        return known.digest != _digest(named.tensor)

    def _is_written(self, named: Named) -> bool:
        # One that is trained by now is named for that.
        trained = named.tensor.requires_grad
        return not trained and self._frozen_writes[named.info.name] != _writes(named.tensor)

    def _is_replaced(self, named: Named) -> bool:
        path = self._paths.get(named.info.name, named.info.name)
        try:
            return self._model.get_buffer(path) is not named.tensor
        except (AttributeError, RuntimeError):
            # The extra state of a module has a name of state_dict alone, and a scripted module does not tell.
            return False


class WatchBeside:
    """
    Inspects the buffers of a device in a thread of its own, which may wait for the device, and shows what it finds.

    Args:
        watch: what inspects them.
        device: of the model.
        show: a sentence.
    """

    def __init__(self, watch: Watch, device: Device, show: Callable[[str], None]) -> None:
        self._watch, self._device, self._show = watch, device, show
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Inspect them, unless that is under way; does not wait."""
        # What is read while it is written counts as changed if its values change, and those do.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._inspect, name="diloco-buffers", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Wait for what is under way, for a few seconds."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _inspect(self) -> None:
        with self._device.beside():
            if changed := self._watch.changed():
                self._show(changed)


def _split(
    found: Iterable[Named], test: Callable[[Named], bool]
) -> tuple[list[Named], list[Named]]:
    """Those that pass the test, and the others."""
    parts: tuple[list[Named], list[Named]] = ([], [])
    for named in found:
        parts[not test(named)].append(named)
    return parts


def _writes(tensor: torch.Tensor) -> int:
    """How often it was written in place; tensors of inference mode do not count."""
    held = local(tensor)
    # What is written to a DTensor counts there, and what is written to its local part counts here.
    both = (held,) if held is tensor else (held, tensor)
    return sum(0 if part.is_inference() else part._version for part in both)


def _digest(tensor: torch.Tensor) -> int:
    state = xxhash.xxh3_64()
    for piece in pieces(tensor):
        state.update(piece)
    return state.intdigest()


SAMPLES = 64
"""Values of a parameter that `Loaded` keeps."""

WRITTEN = (
    "written between Learner.connect and the first step of the optimizer, so that this learner does not begin with "
    "what the job has trained: load weights, and checkpoints of your own, before Learner.connect"
)


class Loaded:
    """
    What `Learner.connect` has put into a model, to notice a program that overwrites it with other values.

    A parameter that is written with its own values, as DistributedDataParallel does when it is made, is as before; so
    are shards that FSDP2 puts into other memory before its first forward pass. Some values of each are kept for that.

    Args:
        model: holds the parameters of the job, or what this rank has of them.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = [(name, p) for name, p in tensors_of(model) if p.requires_grad]
        self._known = [(name, p, _writes(p), _some(p)) for name, p in trained]

    def written(self) -> str:
        """A sentence about trained parameters that were written since; call it before an optimizer's first step."""
        names = [
            name
            for name, parameter, writes, some in self._known
            if writes != _writes(parameter) and _differ(some, _some(parameter))
        ]
        return f"{_listed('parameter', names, 'was', 'were')} {WRITTEN}" if names else ""


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Values from all of what this process holds of a tensor, or from its first row."""
    values = local(tensor).detach()
    flat = (values if values.is_contiguous() else values[:1]).reshape(-1)
    return flat[:: flat.numel() // SAMPLES + 1].clone()


def _differ(before: torch.Tensor, now: torch.Tensor) -> bool:
    if (before.device, before.dtype, before.shape) != (now.device, now.dtype, now.shape):
        return True
    return not torch.equal(before, now)


def other_type(model: nn.Module, parameter: torch.Tensor, dtype: torch.dtype) -> str:
    """A sentence about a parameter of an optimizer that had this element type at `Learner.connect`, and has another."""
    names = [name for name, tensor in tensors_of(model) if tensor is parameter]
    return _other_type(names or ["of an optimizer"], dtype, parameter.dtype)


def _other_type(names: Sequence[str], dtype: torch.dtype, found: torch.dtype) -> str:
    return (
        f"the element type of {_listed('parameter', names)} is {_plain(found)}, and was {_plain(dtype)} at "
        "Learner.connect; expected the same until the end: convert the model before the optimizers are made and before "
        "Learner.connect, or compute in another type by torch.autocast"
    )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(found: Iterable[Named]) -> list[str]:
    return [n.info.name for n in found]


def _listed(noun: str, names: Sequence[str], *verbs: str) -> str:
    """The names after their noun, and before the verb for one or for several."""
    several = len(names) > 1
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    verb = f" {verbs[several]}" if verbs else ""
    return f"{noun}{'s' * several} {', '.join(names[:MOST_NAMES])}{more}{verb}"


MAX_PATTERNS = 8
"""Shown of those that match nothing."""


def log_unmatched(tensors: ModelTensors, patterns: Sequence[str]) -> None:
    """Warn of the patterns of `movingBuffers` that match nothing."""
    if not (without := unmatched(tensors, patterns)):
        return
    more = f" and {len(without) - MAX_PATTERNS} more" if len(without) > MAX_PATTERNS else ""
    log.warning(
        "spec.sync.movingBuffers: no buffer of the model has the name %s%s; expected patterns such as *.usage, "
        "for persistent buffers",
        ", ".join(map(repr, without[:MAX_PATTERNS])), more,
    )  # fmt: skip
