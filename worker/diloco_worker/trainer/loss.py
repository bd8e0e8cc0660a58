"""The loss of a step, read without waiting for a device."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch


class Event(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Whether it is over."""


class LossReader:
    """Keeps the newest loss that is available; a loss on a GPU arrives one step later or more."""

    def __init__(self) -> None:
        self.value: float | None = None
        """None: not known yet, or not finite."""
        self.finite = True
        """Whether the newest loss that was given and is available is finite."""
        self.newly_finite: bool | None = None
        """The same of what the last `read` brought; None: nothing, the copy before is under way."""
        self._pending: tuple[torch.Tensor, Event] | None = None

    def read(self, loss: float | torch.Tensor | None) -> None:
        """
        Take the loss of this step, or start its copy to the host; none starts while one is under way.

        Raises:
            ValueError: it is not one number.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ValueError(
                f"loss: a tensor of shape {tuple(loss.shape)}, expected one number; pass its mean, "
                "loss.mean()"
            )
        if isinstance(loss, torch.Tensor) and loss.is_complex():
            raise ValueError(f"loss: a tensor of {loss.dtype}, expected a real number")
        self.newly_finite = None
        if self._pending is not None and self._pending[1].query():
            self._take(float(self._pending[0]))
            self._pending = None
        if isinstance(loss, torch.Tensor) and loss.device.type == "cuda":
            # A host that is always ahead of the device would read none if each replaced the one before.
            if self._pending is None:
                self._pending = _start_copy(loss)
            return
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()  # float() of a tensor on the CPU does not wait
        self._take(_number(loss))

    def _take(self, value: float | None) -> None:
        self.finite = value is None or math.isfinite(value)
        self.newly_finite = self.finite
        self.value = value if self.finite else None


def _start_copy(loss: torch.Tensor) -> tuple[torch.Tensor, Event]:
    copy = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
    copy.copy_(loss.detach().reshape(()), non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copy, event


def _number(loss: float | torch.Tensor | None) -> float | None:
    try:
        return None if loss is None else float(loss)
    except (TypeError, ValueError):
        raise ValueError(
            f"loss: {loss!r} is not a number; pass a number or a tensor with one element"
        ) from None
