"""
Notices buffers that change while training though the job keeps them as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from diloco_worker.trainer.layout import ModelTensors, Named, local, pieces, unmatched
from diloco_worker.trainer.wrappers import bare, plain_names

MOST_READS = 3
"""
How often a buffer is read that is written with its own values, as DistributedDataParallel does. Then it counts as
constant.
"""
MOST_NAMES = 8
"""Named in the line about them."""


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
    """

    def __init__(
        self, model: nn.Module, *, constant: Iterable[Named], moving: Iterable[Named]
    ) -> None:
        self._model = bare(model)
        plain = plain_names(self._model)
        buffers = self._model.named_buffers(remove_duplicate=False)
        self._paths = {plain(name): name for name, _ in buffers}
        """By plain name, the one with the names of wrappers."""
        self._constant, self._moving = list(constant), list(moving)
        self._known: dict[str, _Known] = {}
        self.reset()

    def reset(self) -> None:
        """What was written until now does not count: it is the job's model."""
        self._known = {
            n.info.name: _Known(writes=_writes(n.tensor), digest=_digest(n.tensor))
            for n in self._constant
        }

    def changed(self) -> str:
        """A sentence about constant buffers that changed, and merged ones that were replaced; each once."""
        written, self._constant = _split(self._constant, self._has_changed)
        replaced, self._moving = _split(self._moving, self._is_replaced)
        sentences = []
        if written:
            sentences.append(
                f"{_listed(written)} changed while training and will be exported as of step 0: name what must "
                "move with the model in spec.sync.movingBuffers; if nothing must, ignore this line"
            )
        if replaced:
            sentences.append(
                f"{_listed(replaced)} was replaced by another tensor, so that it is neither averaged nor exported: "
                "change a buffer in place"
            )
        return "; ".join(sentences)

    def _has_changed(self, named: Named) -> bool:
        known = self._known[named.info.name]
        if self._is_replaced(named):
            return True
        if known.reads == MOST_READS or known.writes == _writes(named.tensor):
            return False
        known.writes, known.reads = _writes(named.tensor), known.reads + 1
        return known.digest != _digest(named.tensor)

    def _is_replaced(self, named: Named) -> bool:
        path = self._paths.get(named.info.name, named.info.name)
        try:
            return self._model.get_buffer(path) is not named.tensor
        except (AttributeError, RuntimeError):
            # The extra state of a module has a name of state_dict alone, and a scripted module does not tell.
            return False


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


def _listed(found: list[Named]) -> str:
    names = [n.info.name for n in found[:MOST_NAMES]]
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    noun = "buffer" if len(found) == 1 else "buffers"
    return f"{noun} {', '.join(names)}{more}"


MAX_PATTERNS = 8
"""Shown of those that match nothing."""

log = logging.getLogger(__name__)


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
