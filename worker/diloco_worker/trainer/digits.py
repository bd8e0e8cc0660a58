"""Integers of tensors as digits of fp32, the form in which buffers of integers travel (diloco/model/integers.py)."""

from __future__ import annotations

import torch

from diloco.model import integers


def on_the_host(values: torch.Tensor) -> torch.Tensor:
    """As `integers.to_digits`; waits for the device of the values."""
    return torch.from_numpy(
        integers.to_digits(values.detach().to("cpu", torch.int64).reshape(-1).numpy())
    )


def to_integers_on_the_host(digits: torch.Tensor) -> torch.Tensor:
    """As `integers.from_digits`; the digits are on the host."""
    return torch.from_numpy(integers.from_digits(digits.numpy()))


def of(values: torch.Tensor) -> torch.Tensor:
    """As `integers.to_digits`, on the device of the values."""
    shifts = torch.arange(0, 64, 16, device=values.device)
    digits = (values.detach().to(torch.int64).reshape(-1, 1) >> shifts) & 0xFFFF
    return digits.to(torch.float32).reshape(-1)


def to_integers(digits: torch.Tensor) -> torch.Tensor:
    """As `integers.from_digits`, on the device of the digits."""
    shifts = torch.arange(0, 64, 16, device=digits.device)
    whole_digits = digits.round().clamp(0, 0xFFFF).to(torch.int64)
    return (whole_digits.reshape(-1, integers.DIGITS) << shifts).sum(1)
