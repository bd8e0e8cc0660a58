"""
Copies of a checkpoint's tensors, all from one step, most of them made while training continues.

Between two calls of an optimizer's step, forward and backward only read the parameters and the
optimizer's state: that is the time to copy them in another thread. A hook makes the optimizer wait
for what is not copied by then, at most for a share of a step: then the attempt is abandoned
(`core.copy_budget`). See docs/adr/0014-local-checkpoint-copy.md.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from diloco_worker.core.copy_budget import CopyBudget

SMALL_BYTES = 64 << 10
"""Smaller tensors are copied at once: that costs less than to watch them."""

PIECE_BYTES = 8 << 20
"""Bytes after which a copy looks whether it was abandoned."""

TOUCHED_BYTES = 2 << 20
"""Bytes of new memory that are touched at a time."""

TOUCHING_SHARE = 0.2
"""Of one core: what the first access to the copies' memory takes."""


class Result(Enum):
    """What became of a copy."""

    COPIED = "copied"
    CHANGED = "changed"
    """Something changed a tensor meanwhile, so the copies are not of one step."""
    ABANDONED = "abandoned"


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
        self.abandoned = False
        """It is not needed any longer; set by `abandon`."""
        self.spent_seconds = 0.0
        """For which the training thread did nothing else, so far."""
        self._lock = threading.Lock()
        self._deferred: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unchanged: list[Callable[[], bool]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def defer(
        self, tensor: torch.Tensor, copy: torch.Tensor, owner: torch.Tensor | None = None
    ) -> None:
        """Have `tensor` copied by `complete`; `owner`: whose part it is, such as a DTensor: it counts its changes."""
        owner = tensor if owner is None else owner
        version, address = owner._version, tensor.data_ptr()
        self._deferred.append((tensor, copy))
        self._unchanged.append(lambda: owner._version == version and tensor.data_ptr() == address)
        device = tensor.device
        if device.type == "cuda" and device not in self._streams:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Its copies come after the kernels of the step that was just made.
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def complete(self) -> Result:
        """Make the deferred copies, from another thread than the training one."""
        result = Result.ABANDONED
        try:
            for tensor, copy in self._deferred:
                if self.abandoned:
                    break
                stream = self._streams.get(tensor.device)
                with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                    for _ in _copy_in_pieces(tensor, copy):
                        if self.abandoned:
                            break
            unchanged = all(check() for check in self._unchanged)
        finally:
            # Who abandons a copy may change the tensors at once: the answer must be older.
            with self._lock:
                if not self.abandoned:
                    result = Result.COPIED if unchanged else Result.CHANGED
                self.copied.set()
            self._deferred.clear()
            self._unchanged.clear()
        return result

    def abandon(self) -> bool:
        """Let the deferred copies end soon, unfinished; False: they are made."""
        with self._lock:
            self.abandoned = self.abandoned or not self.copied.is_set()
            return self.abandoned

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
        self.budget = CopyBudget()
        """How long copies may stop a step."""
        self.wait_seconds: float | None = None
        """How long the optimizers waited in the step that ended; None: nothing was copied beside it."""
        self._memory: dict[str, torch.Tensor] = {}
        self._optimizers = 0
        self._fired: set[int] = set()
        """Optimizers whose hook ran since the last boundary."""
        self._guarded = False
        """In the step before, all hooks ran."""
        self._trusted = True
        self._copy: Copy | None = None
        self._waited: float | None = None
        self._spent_seconds = 0.0
        """What copies took of the training thread's time since the last boundary."""
        self._boundary_at: float | None = None

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
        now = time.monotonic()
        if self._boundary_at is not None:
            seconds = now - self._boundary_at - self._spent_seconds
            self.budget = self.budget.after_step(seconds)
        self._boundary_at, self._spent_seconds = now, 0.0
        self.wait_seconds, self._waited = self._waited, None

    def finish(self) -> None:
        """No further step: let the copy that was begun complete."""
        self._end(unguarded=False)

    def distrust(self) -> None:
        """Something else changes parameters or state: from now on copy at once."""
        self._trusted = False

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """
        Allocate memory for copies of `tensors`.

        Returns:
            What is new. Its first access is many times slower than any later one: see `touch`.
        """
        new = []
        for name, tensor in tensors.items():
            room = self._memory.get(name)
            if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                # numpy requests huge pages, whose first access is four times faster. torch cannot view no bytes.
                flat = torch.from_numpy(
                    np.empty(max(1, tensor.numel()) * tensor.element_size(), np.uint8)
                )
                elements = flat.view(tensor.dtype)[: tensor.numel()]
                self._memory[name] = elements.reshape(tensor.shape)
                new.append(self._memory[name])
        return new

    def begin(
        self, tensors: Mapping[str, torch.Tensor], model: nn.Module, optimizers: Sequence[Optimizer], *,
        owners: Mapping[str, torch.Tensor] | None = None,
    ) -> Copy:  # fmt: skip
        """
        Copy what must be copied at once, and defer the rest.

        Args:
            tensors: what to copy, by name.
            model: of the optimizers.
            optimizers: step it.
            owners: by name, the parameter or state of which `tensors` has a part.
        """
        began, copy, owners = time.monotonic(), Copy(), owners or {}
        deferrable = _guarded_tensors(model, optimizers) if self._guarded and self._trusted else {}
        self.reserve(tensors)
        for name, tensor in tensors.items():
            room = copy.tensors[name] = self._memory[name]
            owner = owners.get(name, tensor)
            if id(owner) in deferrable:
                copy.defer(tensor, room, owner)
            else:
                room.copy_(tensor.detach())
        self._waited = 0.0
        self._spend(copy, time.monotonic() - began)
        if not deferrable:
            copy.copied.set()
            copy.decided.set()
            return copy
        self._copy = copy
        return copy

    def _before_step(self, index: int, *_: object) -> None:
        # A compiled step would trace this; without it the step counts as unguarded.
        if torch.compiler.is_compiling():
            return
        self._fired.add(index)
        copy = self._copy
        if copy is None or copy.abandoned or copy.copied.is_set():
            return
        began = time.monotonic()
        wait_seconds = self.budget.wait_seconds(spent_seconds=copy.spent_seconds)
        if not copy.copied.wait(wait_seconds) and copy.abandon():
            self.budget = self.budget.after_abandoned()
        seconds = time.monotonic() - began
        self._waited = (self._waited or 0.0) + seconds
        self._spend(copy, seconds)

    def _spend(self, copy: Copy, seconds: float) -> None:
        copy.spent_seconds += seconds
        self._spent_seconds += seconds

    def _end(self, *, unguarded: bool) -> None:
        copy, self._copy = self._copy, None
        if copy is None:
            return
        copy.unguarded = unguarded
        copy.decided.set()
        if unguarded:
            copy.abandon()
        elif not copy.abandoned:
            copy.copied.wait()
            self.budget = self.budget.after_copied(spent_seconds=copy.spent_seconds)


def touch(memory: Iterable[torch.Tensor], stop: threading.Event) -> None:
    """
    Access new memory for the first time, piece by piece, in a small share of one core's time.

    Args:
        memory: of `Copies.reserve`; it is overwritten.
        stop: ends it early, after a piece.
    """
    for tensor in memory:
        data = _as_bytes(tensor)
        for lo in range(0, data.size, TOUCHED_BYTES):
            began = time.monotonic()
            data[lo : lo + TOUCHED_BYTES] = 0
            if stop.wait((time.monotonic() - began) * (1 / TOUCHING_SHARE - 1)):
                return


def _copy_in_pieces(tensor: torch.Tensor, copy: torch.Tensor) -> Iterator[None]:
    source = tensor.detach()
    if not source.is_contiguous():
        copy.copy_(source)
        yield
    elif source.device.type == "cpu":
        # numpy: torch would start a second team of threads, which takes the cores from training.
        data, room = _as_bytes(source), _as_bytes(copy)
        for lo in range(0, data.size, PIECE_BYTES):
            np.copyto(room[lo : lo + PIECE_BYTES], data[lo : lo + PIECE_BYTES])
            yield
    else:
        flat, flat_copy = source.reshape(-1), copy.reshape(-1)
        step = PIECE_BYTES // tensor.element_size()
        for lo in range(0, flat.numel(), step):
            flat_copy[lo : lo + step].copy_(flat[lo : lo + step])
            yield


def _as_bytes(tensor: torch.Tensor) -> npt.NDArray[Any]:
    flat: npt.NDArray[Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


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
