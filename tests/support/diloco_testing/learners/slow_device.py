"""
A device without a GPU: its memory is the host's, its work is done late, and nothing may wait for it.

Work of the stream that trains and copies are queued. Each queue is processed in order, one independently of the
other, some time after the host has gone on. What a copy writes to is garbage until the copy is done; that it reads
late what it copies shows a buffer that was reused too early.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from diloco_worker.trainer.device import U8

WAITING = {
    "item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__", "__index__", "is_nonzero", "nonzero", "equal",
    "allclose", "__array__", "__repr__", "__format__", "synchronize",
}  # fmt: skip
"""Functions that wait for the device of their tensor."""


class WaitedError(AssertionError):
    """A step waits for the device."""


class NoWaiting(TorchFunctionMode):
    """Raises where a tensor on the device is read by the host, or copied between both by a blocking copy."""

    allowed = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        given = [a for b in (*args, *kwargs.values()) for a in (b if isinstance(b, list) else [b])]
        tensors = [a for a in given if isinstance(a, torch.Tensor)]
        device = [t for t in tensors if on_device(t)]
        name = getattr(func, "__name__", "")
        if device and not self.allowed:
            to_host = name == "to" and any(str(a) == "cpu" for a in (*args[1:], *kwargs.values()))
            if name in WAITING or to_host:
                raise WaitedError(f"{name} waits for the device")
            if name in ("copy_", "set_") and len(device) < len(tensors):
                raise WaitedError(f"{name} between host and device, not by Device.copy")
        result = func(*args, **kwargs)
        if device and isinstance(result, torch.Tensor) and not on_device(result):
            result.on_device = True  # type: ignore[attr-defined]
        return result


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the device."""
    return getattr(tensor, "on_device", False)


def to_device(model: torch.nn.Module) -> None:
    """Let a model's tensors count as being on the device."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.on_device = True  # type: ignore[attr-defined]


class _Queue:
    def __init__(self) -> None:
        self.given = self.finished = 0
        self.work: deque[Callable[[], bool]] = deque()

    def give(self, work: Callable[[], bool]) -> None:
        """Work that returns whether it was done; if not, it is tried again."""
        self.work.append(work)
        self.given += 1

    def advance(self) -> bool:
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        self.finished += 1
        return True


class SlowDevice:
    """
    See `diloco_worker.trainer.device.Device`.

    Args:
        seed: of the delays.
        registers: whether memory of the host can be registered.
        pins: whether the host has other memory for copies.
    """

    def __init__(self, seed: int, *, registers: bool = True, pins: bool = True) -> None:
        self.no_waiting = NoWaiting()
        self.full = False
        """Work before copies ends because memory ran out, after it has given the device something to do."""
        self.copied_bytes = 0
        self.registered = 0
        self._random = random.Random(seed)
        self._registers, self._pins = registers, pins
        self._training, self._copies = _Queue(), _Queue()

    # ------------------------------------------------------------ as the replica sees it

    def empty(self, elements: int) -> torch.Tensor:
        buffer = torch.full((elements,), float("nan"))
        buffer.on_device = True  # type: ignore[attr-defined]
        return buffer

    def pinned(self, elements: int) -> torch.Tensor:
        if not self._pins:
            raise RuntimeError("no memory")
        return torch.full((elements,), float("nan"))

    def register(self, area: U8) -> str:
        if not self._registers:
            return "cudaHostRegister failed"
        self.registered += area.nbytes
        return ""

    def unregister(self) -> None:
        assert not self._copies.work, "memory is unregistered while it is being copied"
        self.registered = 0

    def train(self, work: Callable[[], None]) -> None:
        self._training.give(self._guarded(work))

    def before_copies(self, work: Callable[[], None]) -> None:
        self._copies.give(self._guarded(work))
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def _guarded(self, work: Callable[[], None]) -> Callable[[], bool]:
        def do() -> bool:
            with self.no_waiting, torch.no_grad():
                work()
            return True

        return do

    def after_training(self) -> None:
        target = self._training.given
        self._copies.give(lambda: self._training.finished >= target)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert on_device(source) != on_device(target), "a copy between host and device"
        assert source.shape == target.shape
        assert source.dtype == target.dtype
        assert source.is_contiguous()
        assert target.is_contiguous()
        self.copied_bytes += source.nbytes
        inward = on_device(target)
        source, target = source.detach(), target.detach()

        def spoil() -> bool:
            with self.unguarded():
                # NaN as well, if read as fp32
                target.fill_(float("nan") if target.is_floating_point() else 0xFF)
            return True

        def do() -> bool:
            with self.unguarded():
                target.copy_(source)
            return True

        # On the device, only work that a copy does not come after can find it half made.
        if inward:
            self._copies.give(spoil)
        else:
            spoil()
        self._copies.give(do)

    def record(self) -> SlowEvent:
        return SlowEvent(self, self._copies.given)

    def beside(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    # ------------------------------------------------------------ as a test sees it

    def pass_time(self, work: int) -> None:
        """Do up to so much work, of either queue."""
        for _ in range(work):
            self._random.choice((self._training, self._copies)).advance()

    def finish_training(self) -> None:
        """Do the work of the stream that trains; copies may be under way."""
        while self._training.advance():
            pass

    def finish(self) -> None:
        """Do all work."""
        while self._training.work or self._copies.work:
            self._training.advance()
            self._copies.advance()

    @contextlib.contextmanager
    def unguarded(self) -> Iterator[None]:
        """In the block, waiting for the device is allowed."""
        before, self.no_waiting.allowed = self.no_waiting.allowed, True
        try:
            yield
        finally:
            self.no_waiting.allowed = before


class SlowEvent:
    """The end of the first copies of a `SlowDevice`."""

    def __init__(self, device: SlowDevice, target: int) -> None:
        self._device, self._target = device, target

    def done(self) -> bool:
        return self._device._copies.finished >= self._target

    def wait(self) -> None:
        if self._device.no_waiting in torch.overrides._get_current_function_mode_stack():
            raise WaitedError("Event.wait in a step")
        self._device.finish()


def garbage(values: np.ndarray) -> bool:
    """Whether values are those of memory that a copy has not reached."""
    return bool(np.isnan(values).any())
