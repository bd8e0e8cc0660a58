"""The loss of a step, read without waiting for a device."""

from __future__ import annotations

import math

import torch


class LossReader:
    """Keeps the newest loss that is available; a loss on a GPU arrives one step later."""

    def __init__(self) -> None:
        self.value: float | None = None
        """None: not known yet, or not finite."""
        self.finite = True
        """Whether the newest loss that was given and is available is finite."""
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self, loss: float | torch.Tensor | None) -> None:
        """
        Take the loss of this step, or start its copy to the host.

        Raises:
            ValueError: it is not one number.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ValueError(
                f"loss: a tensor of shape {tuple(loss.shape)}, expected one number; pass its mean, "
                "loss.mean()"
            )
        if self._pending is not None and self._pending[1].query():  # type: ignore[no-untyped-call]
            self._take(float(self._pending[0]))
            self._pending = None
        if isinstance(loss, torch.Tensor) and loss.device.type == "cuda":
            copy = torch.empty((), dtype=torch.float32, pin_memory=True)
            copy.copy_(loss.detach().reshape(()), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._pending = copy, event
            return
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()  # float() of a tensor on the CPU does not wait
        self._take(_number(loss))

    def _take(self, value: float | None) -> None:
        self.finite = value is None or math.isfinite(value)
        self.value = value if self.finite else None


def _number(loss: float | torch.Tensor | None) -> float | None:
    try:
        return None if loss is None else float(loss)
    except (TypeError, ValueError):
        raise ValueError(
            f"loss: {loss!r} is not a number; pass a number or a tensor with one element"
        ) from None
