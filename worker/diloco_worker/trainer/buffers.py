"""
Notices what this learner alone has: buffers and frozen parameters that change while training though the job keeps them
as they were, and parameters that it trains though the job does not know them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from diloco_worker.trainer.device import Device
from diloco_worker.trainer.layout import ModelTensors, Named, is_dtensor, local, pieces, unmatched
from diloco_worker.trainer.wrappers import bare, plain_names

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
    """

    def __init__(
        self, model: nn.Module, *, constant: Iterable[Named], moving: Iterable[Named],
        frozen: Iterable[Named] = (),
    ) -> None:  # fmt: skip
        self._model = bare(model)
        plain = plain_names(self._model)
        buffers = self._model.named_buffers(remove_duplicate=False)
        self._paths = {plain(name): name for name, _ in buffers}
        """By plain name, the one with the names of wrappers."""
        parameters = [*self._model.parameters()]
        # Those of FSDP2 are others while they are whole.
        whole = not any(map(is_dtensor, parameters))
        self._trained = {id(p): p for p in parameters if p.requires_grad} if whole else None
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
        written, and parameters that are trained since; each once.
        """
        written, self._constant = _split(self._constant, self._has_changed)
        replaced, self._moving = _split(self._moving, self._is_replaced)
        sentences = []
        if written:
            sentences.append(
                f"{_listed('buffer', _names(written))} changed while training and will be exported as of step 0: name "
                "what must move with the model in spec.sync.movingBuffers; if nothing must, ignore this line"
            )
        if replaced:
            sentences.append(
                f"{_listed('buffer', _names(replaced))} was replaced by another tensor, so that it is neither averaged "
                "nor exported: change a buffer in place"
            )
        rewritten, self._frozen = _split(self._frozen, self._is_written)
        if rewritten:
            sentences.append(
                f"{_listed('frozen parameter', _names(rewritten))} was written while training, which no other learner "
                "gets, and a start without the local checkpoint begins with the first values: make what moves, such as "
                "a teacher, buffers named in spec.sync.movingBuffers; if those values come back, ignore this line"
            )
        if added := self._newly_trained():
            sentences.append(
                f"a gradient is computed for {_listed('parameter', added)}, and was not when this learner connected, "
                "so that they are trained here alone and not merged: build the model, and choose what is trained, "
                "before Learner.connect"
            )
        return "; ".join(sentences)

    def _newly_trained(self) -> list[str]:
        if self._trained is None:
            return []
        known, found = self._trained, self._model.named_parameters()
        added = {name: p for name, p in found if p.requires_grad and id(p) not in known}
        known |= {id(p): p for p in added.values()}
        plain = plain_names(self._model) if added else str
        return [plain(name) for name in added]

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
    Inspects the buffers of a device in a thread of its own, which may wait for the device, and logs what it finds.

    Args:
        watch: what inspects them.
        device: of the model.
    """

    def __init__(self, watch: Watch, device: Device) -> None:
        self._watch, self._device = watch, device
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
                log.warning("%s", changed)


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
    return 0 if held.is_inference() else held._version


def _digest(tensor: torch.Tensor) -> int:
    state = xxhash.xxh3_64()
    for piece in pieces(tensor):
        state.update(piece)
    return state.intdigest()


def _names(found: Iterable[Named]) -> list[str]:
    return [n.info.name for n in found]


def _listed(noun: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:MOST_NAMES])}{more}"


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
