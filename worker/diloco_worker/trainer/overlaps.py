"""Tensors that have some values in common without being one tensor: they cannot be merged as two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from diloco_worker.trainer.wrappers import distinct


@dataclass(frozen=True, slots=True)
class _Span:
    """The memory from the first value of a tensor to the end of its last one."""

    name: str
    tensor: torch.Tensor

    @property
    def lo(self) -> int:
        return self.tensor.data_ptr()

    @property
    def hi(self) -> int:
        sides = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return self.lo + self.tensor.element_size() * (1 + sum((n - 1) * s for n, s in sides))

    def overlaps(self, other: _Span) -> bool:
        """Whether both have a value in common; `other` begins within this one."""
        size = self.tensor.element_size()
        if other.tensor.element_size() != size or (other.lo - self.lo) % size:
            return True
        # Columns of one matrix are within each other and have nothing in common.
        values = (max(self.hi, other.hi) - self.lo) // size
        taken = torch.zeros(values, dtype=torch.bool, device="cpu")
        taken.as_strided(self.tensor.shape, self.tensor.stride()).fill_(True)
        at = (other.lo - self.lo) // size
        return bool(taken.as_strided(other.tensor.shape, other.tensor.stride(), at).any())


def overlapping(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
    """
    Names of tensors that have values in common, in pairs.

    Args:
        tensors: with memory of their own; each once.
    """
    found: list[tuple[str, str]] = []
    by_device: dict[torch.device, list[_Span]] = {}
    for name, tensor in tensors:
        by_device.setdefault(tensor.device, []).append(_Span(name, distinct(tensor.detach())))
    for spans in by_device.values():
        ordered = sorted(((span.lo, span.hi, span) for span in spans), key=lambda entry: entry[:2])
        for index, (_, end, span) in enumerate(ordered):
            for begin, _, other in ordered[index + 1 :]:
                if begin >= end:
                    break
                if span.overlaps(other):
                    found.append((span.name, other.name))
    return found
