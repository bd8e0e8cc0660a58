"""
The outer optimizer and the weight of a contribution (paper 3.2). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """
    SGD with momentum in fp32; its state is one buffer as long as the fragment.

        buf ← μ·buf + Δ;   Θ ← Θ − lr·(Δ + μ·buf)  with Nesterov,   Θ ← Θ − lr·buf  without

    Paper leaves this open: it names Nesterov as an example and gives no values
    (docs/algorithm.md, "Outer optimizer").
    """

    learning_rate: float
    momentum: float
    nesterov: bool

    @property
    def factors(self) -> tuple[np.float32, np.float32, np.float32, np.float32]:
        """lr, μ, a, b of  buf ← μ·buf + Δ;  Θ ← Θ − lr·(a·Δ + b·buf)."""
        from_delta, from_momentum = (1.0, self.momentum) if self.nesterov else (0.0, 1.0)
        return (
            np.float32(self.learning_rate),
            np.float32(self.momentum),
            np.float32(from_delta),
            np.float32(from_momentum),
        )


REPLACE = OuterOptimizer(learning_rate=1.0, momentum=0.0, nesterov=False)
"""Of buffers: Θ − Δ, what the members sent, averaged."""


def weight(*, tokens: int, steps: int) -> float:
    """
    w = tokens² / steps: quantity times quality (paper 3.2).

    Paper leaves this open: 0/0. A learner without a step or a token since it last received the
    fragment has weight 0 (docs/algorithm.md, "Weights").

    >>> weight(tokens=600, steps=3)
    120000.0
    """
    if tokens <= 0 or steps <= 0:
        return 0.0
    return tokens**2 / steps
