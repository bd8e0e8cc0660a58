"""
Copies of a checkpoint's tensors, all from one step, most of them made while training continues.

Between two calls of an optimizer's step, forward and backward only read the parameters and the
optimizer's state: that is the time to copy them in another thread. A hook makes the optimizer wait
for what is not copied by then. See docs/adr/0014-local-checkpoint-copy.md.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

log = logging.getLogger(__name__)

SMALL_BYTES = 64 << 10
"""Smaller tensors are copied at once: that costs less than to watch them."""


class Copy:
    """The copies for one checkpoint; `complete` makes those that were deferred."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """By name; those that were deferred are filled by `complete`."""
        self.copied = threading.Event()
        """Nothing reads the model's memory any longer."""
        self.decided = threading.Event()
        """The step in which the copies were made has ended."""
        self.unguarded = False
        """The optimizers' hooks did not run in that step: something else may have changed it."""
        self._deferred: list[tuple[torch.Tensor, torch.Tensor, int, int]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def defer(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Have `tensor` copied by `complete`."""
        self._deferred.append((tensor, copy, tensor._version, tensor.data_ptr()))
        device = tensor.device
        if device.type == "cuda" and device not in self._streams:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Its copies come after the kernels of the step that was just made.
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def complete(self) -> bool:
        """
        Make the deferred copies.

        Returns:
            False: a tensor changed meanwhile, so the copies are not of one step.
        """
        try:
            for tensor, copy, _, _ in self._deferred:
                stream = self._streams.get(tensor.device)
                with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                    copy.copy_(tensor.detach())
            unchanged = all(t._version == v and t.data_ptr() == p for t, _, v, p in self._deferred)
        finally:
            self._deferred.clear()
            self.copied.set()
        return unchanged

    def guarded(self) -> bool:
        """Wait for the end of the step; False: the copies may not be of one step."""
        self.decided.wait()
        return not self.unguarded


class Copies:
    """
    The memory for copies, which is reused, and the hooks of the optimizers.

    Copies are deferred only after a step in which the hook of every optimizer ran: a loop that
    changes parameters in another way (a CUDA graph, a compiled or hand-written step) is found out,
    and its checkpoints are copied at once.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        self._optimizers = 0
        self._fired: set[int] = set()
        """Optimizers whose hook ran since the last boundary."""
        self._guarded = False
        """In the step before, all hooks ran."""
        self._trusted = True
        self._copy: Copy | None = None

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on, deferred copies are possible; the step hooks of these optimizers guard them."""
        self._optimizers = len(optimizers)
        for index, optimizer in enumerate(optimizers):
            optimizer.register_step_pre_hook(functools.partial(self._before_step, index))

    def boundary(self) -> None:
        """A step has ended: call it before anything else may change the parameters."""
        self._guarded = 0 < self._optimizers == len(self._fired)
        self._fired.clear()
        self._end(unguarded=not self._guarded)

    def finish(self) -> None:
        """No further step: let the copy that was begun complete."""
        self._end(unguarded=False)

    def distrust(self) -> None:
        """Something else changes parameters or state: from now on copy at once."""
        self._trusted = False

    def begin(
        self, tensors: Mapping[str, torch.Tensor], model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> Copy:
        """Copy what must be copied at once, and defer the rest."""
        copy = Copy()
        deferrable = _guarded_tensors(model, optimizers) if self._guarded and self._trusted else {}
        for name, tensor in tensors.items():
            room = copy.tensors[name] = self._room(name, tensor)
            if id(tensor) in deferrable:
                copy.defer(tensor, room)
            else:
                room.copy_(tensor.detach())
        if not deferrable:
            copy.copied.set()
            copy.decided.set()
            return copy
        self._copy = copy
        return copy

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._memory.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            # numpy requests huge pages, whose first access is four times faster.
            flat = torch.from_numpy(np.empty(tensor.numel() * tensor.element_size(), np.uint8))
            room = self._memory[name] = flat.view(tensor.dtype).reshape(tensor.shape)
        return room

    def _before_step(self, index: int, *_: object) -> None:
        # A compiled step would trace this; without it the step counts as unguarded.
        if torch.compiler.is_compiling():
            return
        self._fired.add(index)
        if self._copy is not None:
            self._copy.copied.wait()

    def _end(self, *, unguarded: bool) -> None:
        if self._copy is None:
            return
        self._copy.unguarded = unguarded
        self._copy.decided.set()
        self._copy.copied.wait()
        self._copy = None


def _guarded_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, torch.Tensor]:
    """By id, what only the step of these optimizers changes: their parameters and state."""
    stepped = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    found: dict[int, torch.Tensor] = {id(p): p for p in model.parameters() if id(p) in stepped}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                found |= {id(t): t for t in state.values() if isinstance(t, torch.Tensor)}
    return {
        key: tensor
        for key, tensor in found.items()
        if tensor.device.type in ("cpu", "cuda")
        and not tensor.is_inference()
        and tensor.numel() * tensor.element_size() >= SMALL_BYTES
    }
