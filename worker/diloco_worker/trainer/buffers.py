"""
Notices buffers that change while training though the job keeps them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from diloco_worker.trainer.layout import Named, uncompiled

MOST_NAMES = 8
"""Named in the line about them."""


class Watch:
    """
    Compares buffers with what they were at the last `reset`. It reads no values, so it costs no time.

    Args:
        model: whose buffers these are.
        constant: buffers that the job keeps as of step 0.
        moving: those that it merges, in place.
    """

    def __init__(
        self, model: nn.Module, *, constant: Iterable[Named], moving: Iterable[Named]
    ) -> None:
        self._model = uncompiled(model)
        self._constant, self._moving = list(constant), list(moving)
        self._writes: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """What was written until now does not count: it is the job's model."""
        self._writes = {n.info.name: _writes(n.tensor) for n in self._constant}

    def changed(self) -> str:
        """A sentence about constant buffers that are written, and merged ones that are replaced; each once."""
        written, self._constant = _split(self._constant, self._is_written)
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

    def _is_written(self, named: Named) -> bool:
        return self._is_replaced(named) or _writes(named.tensor) > self._writes[named.info.name]

    def _is_replaced(self, named: Named) -> bool:
        try:
            return self._model.get_buffer(named.info.name) is not named.tensor
        except AttributeError:
            return False  # extra state of a module has a name of state_dict alone


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
    return 0 if tensor.is_inference() else tensor._version


def _listed(found: list[Named]) -> str:
    names = [n.info.name for n in found[:MOST_NAMES]]
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    noun = "buffer" if len(found) == 1 else "buffers"
    return f"{noun} {', '.join(names)}{more}"
