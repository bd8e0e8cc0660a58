"""Integers of tensors as digits of fp32, the form in which buffers of integers travel (diloco/model/integers.py)."""

from __future__ import annotations

import torch

from diloco.model import integers


def to_digits_on_host(values: torch.Tensor) -> torch.Tensor:
    """
    As `integers.to_digits`; waits for the device of the values.

    Args:
        values: integers or booleans of any shape and device, N in all.

    Returns:
        (N * DIGITS,) float32 on the host, the lowest digit of each value first.
    """
    return torch.from_numpy(
        integers.to_digits(values.detach().to("cpu", torch.int64).reshape(-1).numpy())
    )


def to_integers_on_host(digits: torch.Tensor) -> torch.Tensor:
    """
    As `integers.from_digits`.

    Args:
        digits: (N * DIGITS,) float32 on the host.

    Returns:
        (N,) int64 on the host.
    """
    return torch.from_numpy(integers.from_digits(digits.numpy()))


def to_digits(values: torch.Tensor) -> torch.Tensor:
    """
    As `integers.to_digits`, without waiting for the device.

    Args:
        values: integers or booleans of any shape, N in all.

    Returns:
        (N * DIGITS,) float32 on the device of the values, the lowest digit of each first.
    """
    shifts = torch.arange(0, 64, 16, device=values.device)
    digits = (values.detach().to(torch.int64).reshape(-1, 1) >> shifts) & 0xFFFF
    return digits.to(torch.float32).reshape(-1)


def to_integers(digits: torch.Tensor) -> torch.Tensor:
    """
    As `integers.from_digits`, without waiting for the device.

    Args:
        digits: (N * DIGITS,) float32.

    Returns:
        (N,) int64 on the device of the digits.
    """
    shifts = torch.arange(0, 64, 16, device=digits.device)
    whole_digits = digits.round().clamp(0, 0xFFFF).to(torch.int64)
    return (whole_digits.reshape(-1, integers.DIGITS) << shifts).sum(1)
