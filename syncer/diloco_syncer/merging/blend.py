"""
How the deltas of several learners become one outer gradient, per tensor (paper D.2).

Pure: numbers in, numbers out. Shape letters used in this file:
    M = members of positive weight, in the order of their names
    N = elements of one tensor

    Average   Δ = Σ w v / Σ w
    Radial    Δ = (Σ w ‖v‖ / Σ w) · φ(Σ w φ(v) / Σ w),   φ(v) = v / ‖v‖,  φ(0) = 0

Differs from the paper: its weighted form prints v for ‖v‖ in the first factor, a vector where a
length must stand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diloco_syncer.core.contribution import NORM_FLOOR

F32 = npt.NDArray[np.float32]

VANISHED = 1e-6
"""A mean direction shorter than this share of its terms is rounding noise of fp32: they cancel."""

NEGLIGIBLE = 1e-30
"""A delta shorter than this share of the longest one has no direction that fp32 could hold."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blend:
    """
    The factors that merge one tensor: Δ = scale(‖u‖) · u with u = Σ factor·v.

    For Radial, u is the mean direction times the longest norm: so no factor and no term of the sum
    leaves the range of fp32. Where u vanishes, Δ = Σ share·v.
    """

    factors: F32
    """Of each v in u, shape (M,)."""
    shares: F32
    """w / Σ w, clipped; shape (M,)."""
    radial: bool
    """False: u is Δ."""
    length: float = 0.0
    """‖Δ‖ of a radial merge."""
    terms: float = 0.0
    """What ‖u‖ is if all directions agree."""

    def rests_on(self, row: int) -> bool:
        """Whether the direction rests on the norm that this member states; never below NORM_FLOOR."""
        return self.radial and bool(self.factors[row])

    def scale(self, u_norm: float) -> float | None:
        """The factor that makes u the outer gradient; None: the directions cancel, use the weighted mean."""
        if not self.radial:
            return 1.0
        # Paper leaves this open: a mean direction of zero has no φ
        # (docs/algorithm.md, "Radial-directional merge").
        if u_norm <= VANISHED * self.terms:
            return None
        return self.length / u_norm


def blend(
    norms: Sequence[float], weights: Sequence[float], *, radial: bool,
    clipped: Sequence[float] | None = None,
) -> Blend:  # fmt: skip
    """
    The factors for one tensor.

    A single member is always averaged: Δ is its delta, bit by bit.

    Args:
        norms: ‖v‖ of each member, finite.
        weights: positive; a buffer of integers has one, 1, and zeros.
        radial: False: plain average.
        clipped: the norms that count, none larger than in `norms` (core/guard.py); None: `norms`.
    """
    merged = norms if clipped is None else clipped
    total = math.fsum(weights)
    shares = [w / total for w in weights]
    scaled = [s * (m / n) if m < n else s for s, m, n in zip(shares, merged, norms, strict=True)]
    shares_M = np.array(scaled, np.float32)
    longest = max(merged)
    if not radial or len(shares) == 1 or longest <= NORM_FLOOR:
        return Blend(factors=shares_M, shares=shares_M, radial=False)
    # Of a norm that cannot be confirmed, no direction: its factor could be anything.
    least = max(NORM_FLOOR, NEGLIGIBLE * longest)
    factors = [
        share * (longest / norm) if norm > least else 0.0
        for share, norm in zip(shares, norms, strict=True)
    ]
    return Blend(
        factors=np.array(factors, np.float32),
        shares=shares_M,
        radial=True,
        length=math.fsum(s * m for s, m in zip(shares, merged, strict=True)),
        terms=math.fsum(f * n for f, n in zip(factors, norms, strict=True)),
    )
