"""The loss of a step, read without waiting for a device."""

from __future__ import annotations

import math

import torch


class LossReader:
    """Keeps the newest loss that is available; a loss on a GPU arrives one step later."""

    def __init__(self) -> None:
        self.value: float | None = None
        """None: not known yet, or not finite."""
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self, loss: float | torch.Tensor | None) -> None:
        """Take the loss of this step, or start its copy to the host."""
        if self._pending is not None and self._pending[1].query():  # type: ignore[no-untyped-call]
            self.value, self._pending = _finite(float(self._pending[0])), None
        if isinstance(loss, torch.Tensor) and loss.device.type == "cuda":
            copy = torch.empty((), dtype=torch.float32, pin_memory=True)
            copy.copy_(loss.detach(), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._pending = copy, event
            return
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()  # float() of a tensor on the CPU does not wait
        self.value = None if loss is None else _finite(float(loss))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
