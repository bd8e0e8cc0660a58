"""
Notices a program that writes its own parameters over the results of merges, such as those of a vector or of a copy.

Each process compares what it holds itself, so each rank of a learner of several comes to a finding of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from diloco.model.fragments import Fragment
from diloco_worker.trainer.device import Device
from diloco_worker.trainer.layout import Pair, local

IN_ROW = 4
"""Results that are undone one after the other."""

PROBLEM = (
    f"the last {IN_ROW} results of merges were undone in the next step, so that this learner does not get "
    "what the others train: step the parameters of the model in place, and do not write a vector or a copy of "
    "them to the model"
)


def compared(fragment: Fragment, held: Iterable[Pair]) -> torch.Tensor | None:
    """
    The tensor of a fragment whose values show whether its results are undone: that of which this process holds most.

    Args:
        fragment: of the layout.
        held: the parts of its tensors that this process holds.

    Returns:
        None: the fragment has buffers, which a forward pass changes, or this process holds nothing of it.
    """
    if fragment.buffers:
        return None
    largest = max(held, key=lambda pair: pair.view.numel(), default=None)
    return None if largest is None else largest.tensor


class Undone:
    """
    Compares some values of each result with what they were before, and are one step and two steps later.

    A step of an optimizer goes anywhere; one that ends near where the parameters were before, several times in a row,
    has undone the results. It is much longer than the step that follows it: where a result takes the parameters back by
    about a step, as early in a training whose steps all go the same way, the next step ends there by itself.
    """

    LEAST_VALUES, MOST_VALUES, NEAR, LONG = 8, 1024, 0.5, 4.0
    """
    Of fewer values, as of a rank that holds a row of a small matrix, a step may end near them by chance. NEAR: in parts
    of the way that the result went. LONG: in steps.
    """

    def __init__(self) -> None:
        self._applied: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """A parameter, and its values before and after."""
        self._stepped: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """The same with the values one step later."""
        self._in_row = 0
        self.problem = ""
        """A sentence, once results were undone."""

    def apply(self, tensor: torch.Tensor | None, overwrite: Callable[[], object]) -> None:
        """
        Call `overwrite`, which puts a result into the tensor and others.

        Args:
            tensor: that is compared, of which a rank may hold a shard; None: none.
            overwrite: is called once.
        """
        before = None if tensor is None else self._some(tensor)
        overwrite()
        if tensor is not None and before is not None and before.numel() >= self.LEAST_VALUES:
            # With two results in two steps, the length of a step is not known.
            self._stepped = [known for known in self._stepped if known[0] is not tensor]
            self._applied.append((tensor, before, self._some(tensor)))

    def stepped(self) -> bool:
        """The program has made a step; whether `problem` is new."""
        for way, undone in self._found():
            if way > 0:
                self._in_row = self._in_row + 1 if undone else 0
        return self._judge(self._in_row)

    def _found(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """How far each result of the boundary before the last one has moved the values, and whether it was undone."""
        known, applied = self._stepped, self._applied
        self._applied = []
        self._stepped = [(*result, self._some(result[0])) for result in applied]
        found = []
        for tensor, before, after, later in known:
            way, left = (after - before).norm(), (later - before).norm()
            first, second = (later - after).norm(), (self._some(tensor) - later).norm()
            found.append((way, (left < self.NEAR * way) & (first > self.LONG * second)))
        return found

    def _judge(self, in_row: float) -> bool:
        """Whether `problem` is new, if so many results in a row were undone."""
        if self.problem or in_row < IN_ROW:
            return False
        self.problem = PROBLEM
        return True

    def _some(self, tensor: torch.Tensor) -> torch.Tensor:
        values = local(tensor).detach()
        flat = (values if values.is_contiguous() else values[:1]).reshape(-1)
        return flat[: self.MOST_VALUES].float().clone()


class UndoneBeside(Undone):
    """
    As `Undone`, on a device, which counts how many results in a row were undone: the host gets the number with the
    copies of a later step, so that no step waits.

    Args:
        device: of the model.

    Raises:
        RuntimeError: device or host have no memory for the number.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._counts, self._known = device.empty(2), device.pinned(2)
        """How many in a row, and the most so far; the same on the host, as of the last copy."""
        self._begun = False
        self._compares, self._counted = 0, False
        """At how many boundaries there are results to compare, and whether some were since the last copy."""

    def apply(self, tensor: torch.Tensor | None, overwrite: Callable[[], object]) -> None:
        """See `Undone.apply`."""
        self._device.train(partial(super().apply, tensor, overwrite))
        if tensor is not None:
            self._compares = 2

    def stepped(self) -> bool:
        """The program has made a step; `copied` states what the device has found."""
        if self._compares:
            self._device.train(self._compare)
            self._compares, self._counted = self._compares - 1, True
        return False

    def copy(self) -> bool:
        """The copies of a boundary begin; whether the number is among them."""
        counted, self._counted = self._counted, False
        if counted:
            self._device.copy(self._counts, self._known)
        return counted

    def copied(self) -> bool:
        """The copies of a boundary that had the number are complete; whether `problem` is new."""
        return self._judge(float(self._known[1]))

    def _compare(self) -> None:
        if not self._begun:
            self._begun = True
            self._counts.zero_()
        if not (found := self._found()):
            return
        in_row, most = self._counts.unbind()
        for way, undone in found:
            in_row = torch.where(way > 0, (in_row + 1) * undone, in_row)
            most = torch.maximum(most, in_row)
        self._counts.copy_(torch.stack([in_row, most]))
