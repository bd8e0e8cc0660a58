"""
Copies between a device and the host for which the training thread does not wait.

`CudaDevice` gives them to a stream of its own. Tests use a device whose copies finish late.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from diloco_worker.trainer.wrappers import bare

U8 = npt.NDArray[np.uint8]


class Event(Protocol):
    """The end of what a device was given until then."""

    def done(self) -> bool:
        """Whether it is over; does not wait."""

    def wait(self) -> None:
        """Block until it is over; never in a step."""


class Device(Protocol):
    """
    Where the model is.

    Work of two kinds: that of the stream which trains, and copies in a stream of their own. Each kind is done in order;
    only `after_training` orders copies after work.
    """

    def empty(self, elements: int) -> torch.Tensor:
        """An fp32 buffer on the device."""

    def pinned(self, elements: int) -> torch.Tensor:
        """
        An fp32 buffer of the host that the device copies from and to by itself.

        Raises:
            RuntimeError: there is no such memory.
        """

    def register(self, area: U8) -> str:
        """Let the device copy from and to this memory by itself; why that is impossible, or nothing."""

    def unregister(self) -> None:
        """Undo every `register`; nothing is being copied."""

    def train(self, work: Callable[[], None]) -> None:
        """Give the stream that trains this work, after all that the training loop gave it."""

    def after_training(self) -> None:
        """Copies that are given from now on begin after the work that was given until now."""

    def before_copies(self, work: Callable[[], None]) -> None:
        """Give the stream of the copies this work on the device: before copies that are given from now on."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy between a buffer on the device and memory of the host, of the same shape and element type."""

    def record(self) -> Event:
        """The end of the copies that were given until now."""

    def beside(self) -> AbstractContextManager[Any]:
        """For reads in another thread, which then wait for none of the training's work."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """
    A CUDA device; the stream that trains is the current one when `learner.step()` is called.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._registered: list[int] = []

    def empty(self, elements: int) -> torch.Tensor:
        """See `Device.empty`."""
        return torch.zeros(elements, dtype=torch.float32, device=self._device)

    def pinned(self, elements: int) -> torch.Tensor:
        """See `Device.pinned`."""
        return torch.zeros(elements, dtype=torch.float32, device="cpu", pin_memory=True)

    def register(self, area: U8) -> str:
        """See `Device.register`."""
        address = int(area.__array_interface__["data"][0])
        with torch.cuda.device(self._device):
            error = torch.cuda.cudart().cudaHostRegister(address, area.nbytes, 0)  # type: ignore[no-untyped-call]
            if int(error) == 0:
                self._registered.append(address)
                return ""
            # The runtime keeps the error until a launch is checked, which would fail in the user's program.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=self._device).fill_(0)
        return f"cudaHostRegister of {area.nbytes >> 20} MiB failed ({error}; ulimit -l is {locked_limit()})"

    def unregister(self) -> None:
        """See `Device.unregister`."""
        with torch.cuda.device(self._device):
            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._registered.clear()

    def train(self, work: Callable[[], None]) -> None:
        """See `Device.train`."""
        with torch.cuda.device(self._device):
            work()

    def after_training(self) -> None:
        """See `Device.after_training`."""
        self._copies.wait_stream(torch.cuda.current_stream(self._device))

    def before_copies(self, work: Callable[[], None]) -> None:
        """See `Device.before_copies`."""
        with torch.cuda.stream(self._copies):
            work()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `Device.copy`."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """See `Device.record`."""
        return _CudaEvent(self._copies)

    def beside(self) -> AbstractContextManager[Any]:
        """See `Device.beside`."""
        return torch.cuda.stream(self._reads)


def devices_of(model: nn.Module) -> tuple[set[torch.device], set[torch.device]]:
    """Those of the trained parameters, and those of the buffers."""
    own = bare(model)
    return {p.device for p in own.parameters() if p.requires_grad}, {
        b.device for b in own.buffers()
    }


def locked_limit() -> str:
    """The limit of memory that this process may lock, as `ulimit -l` shows it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
