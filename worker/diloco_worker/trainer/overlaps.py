"""Tensors that have some values in common, within one or without being one tensor: they cannot be merged."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from diloco_worker.trainer.wrappers import distinct


@dataclass(frozen=True, slots=True)
class _Span:
    """The memory from the first value of a tensor to the end of its last one, in bytes."""

    lo: int
    hi: int
    name: str
    tensor: torch.Tensor

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Span:
        sides = zip(tensor.shape, tensor.stride(), strict=True)
        size = tensor.element_size() * (1 + sum((n - 1) * s for n, s in sides))
        return cls(tensor.data_ptr(), tensor.data_ptr() + size, name, tensor)


def problems(tensors: Sequence[tuple[str, torch.Tensor]], merged: Container[str]) -> list[str]:
    """
    A sentence for each tensor, or pair of tensors, that cannot be merged because of its memory.

    Args:
        tensors: with memory of their own; each once.
        merged: names of those that are merged.
    """
    expanded = [name for name, t in tensors if name in merged and distinct(t) is not t]
    return [
        f"{name} is expanded: some of its values are one in memory, so that neither an optimizer nor a merge can write "
        "them; expected a tensor of its own, as clone() returns it"
        for name in expanded
    ] + [
        f"{a} and {b} have values in common in memory, but are not one parameter; expected a copy, or the same "
        "parameter in both places, transposed in forward if need be"
        for a, b in overlapping(tensors)
        if a in merged or b in merged
    ]


def overlapping(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
    """
    Names of tensors that have values in common, in pairs.

    Takes a byte for each value, or less, where tensors interleave as columns of one matrix do.

    Args:
        tensors: with memory of their own; each once.
    """
    by_device: dict[torch.device, list[_Span]] = {}
    for name, tensor in tensors:
        span = _Span.of(name, distinct(tensor.detach()))
        by_device.setdefault(tensor.device, []).append(span)
    return [
        pair for spans in by_device.values() for group in _groups(spans) for pair in _pairs(group)
    ]


def _groups(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Those whose memory is between one another's, in order."""
    group: list[_Span] = []
    end = 0
    for span in sorted(spans, key=lambda span: (span.lo, span.hi)):
        if span.lo >= end and group:
            yield group
            group = []
        group.append(span)
        end = max(end, span.hi)
    yield group


def _pairs(group: list[_Span]) -> Iterator[tuple[str, str]]:
    if len(group) == 1:
        return
    first, end = group[0].lo, max(span.hi for span in group)
    # The largest unit of which all tensors are whole numbers: usually one value.
    unit = math.gcd(*(n for s in group for n in (s.tensor.element_size(), s.lo - first)))
    taken = torch.zeros((end - first) // unit, dtype=torch.bool, device="cpu")
    for index, span in enumerate(group):
        part = _part(taken, span, first, unit)
        if part.any():
            yield from (
                (name, span.name) for name in _others(taken, group[:index], part, first, unit)
            )
            # `_others` has used the memory for its comparisons.
            for earlier in group[:index]:
                _part(taken, earlier, first, unit).fill_(True)
        part.fill_(True)


def _part(taken: torch.Tensor, span: _Span, first: int, unit: int) -> torch.Tensor:
    """Which units of a tensor are taken, as a view."""
    size = span.tensor.element_size() // unit
    shape, stride = span.tensor.shape, span.tensor.stride()
    return taken.as_strided(
        (*shape, size), (*(s * size for s in stride), 1), (span.lo - first) // unit
    )


def _others(
    taken: torch.Tensor, earlier: list[_Span], part: torch.Tensor, first: int, unit: int
) -> Iterator[str]:
    """Names of those that have units in common with this part of the memory."""
    for span in earlier:
        taken.zero_()
        _part(taken, span, first, unit).fill_(True)
        if part.any():
            yield span.name
