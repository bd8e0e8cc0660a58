"""
One learner's part in one merge, and the checks of what its upload states. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from diloco.codec import formats
from diloco.errors import DamagedError, NotFiniteError, ProtocolError
from diloco.model.fragments import Fragment
from diloco_syncer.core import outer

NORM_TOLERANCE = 1e-3
"""Largest relative difference between a norm in a header and the norm of what arrived."""

NORM_FLOOR = 1e-12
"""
A tensor with a smaller norm did not change: below, a norm cannot be confirmed, because a learner may
have summed squares that fp32 rounds to zero. No factor of a merge rests on such a norm.
"""

MAX_EXCESS = 1e100
"""Kept of a norm beyond its limit; JSON has no infinity."""

Version = tuple[int, int]
"""(epoch, global step) of the commit that made a fragment; (epoch, 0) is Θ^(0)."""


class ContributionError(ProtocolError):
    """The contribution of `learner` cannot be merged; another learner's thread may have detected it."""

    def __init__(self, message: str, *, learner: str) -> None:
        super().__init__(f"{learner}: {message}")
        self.learner = learner


class DamagedContributionError(ContributionError, DamagedError):
    """A chunk has another length than its format needs."""

    reason = DamagedError.reason


class NotFiniteContributionError(ContributionError, NotFiniteError):
    """The contribution holds NaN or Inf, or values so large that the merged fragment would hold them."""

    reason = NotFiniteError.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One learner's part in one attempt of one round, as the header of its upload states it."""

    learner: str
    incarnation: int
    round: int
    attempt: int
    local_step: int
    """t_m of the copy that is uploaded."""
    steps: int
    """c_steps of the fragment at t_m."""
    tokens: int
    """c_tokens of the fragment at t_m."""
    base: Version | None
    """What the delta is against; None: the fragment came whole."""
    format: int
    """bulk_pb2.Format of the chunks that are merged."""
    norms: tuple[float, ...]
    """‖v‖ per tensor of the fragment, in fragment order, of the values as they were sent."""
    weight_limit: float = math.inf
    """The most weight beside the other members (core/guard.py)."""
    buffers: bool = False
    """Of buffers: running statistics may change by any length in any number of steps."""
    digests: bytes = b""
    """Of the values at the learner (diloco/model/digests.py), for the tape; empty: not stated."""
    norm_limits: tuple[float, ...] = ()
    """The largest norm per tensor beside the other members; longer deltas are clipped. Empty: none."""

    @property
    def weight(self) -> float:
        """tokens² / steps (paper 3.2), within its limit; 0: its values are ignored."""
        return min(outer.weight(tokens=self.tokens, steps=self.steps), self.weight_limit)

    @property
    def norm(self) -> float:
        """‖v‖ of the whole fragment."""
        return math.hypot(*self.norms)

    @property
    def merged_norms(self) -> tuple[float, ...]:
        """`norms` after the limits."""
        if not self.norm_limits:
            return self.norms
        return tuple(map(min, self.norms, self.norm_limits))

    @property
    def excess(self) -> float:
        """Largest norm of a tensor in multiples of its limit; 0: there are no limits."""
        pairs = zip(self.norms, self.norm_limits, strict=False)
        return max((_ratio(norm, limit) for norm, limit in pairs), default=0.0)

    @property
    def clipped(self) -> int:
        """How many of its tensors are clipped."""
        return sum(norm > limit for norm, limit in zip(self.norms, self.norm_limits, strict=False))

    def credited(self, most_steps: int) -> Contribution:
        """
        The same contribution, of at most `most_steps` steps at its own tokens per step.

        A learner that was cut off for hours comes back with hours of steps, all from a Θ that the
        others have left behind. Their number must not outweigh all others.
        """
        if self.steps <= most_steps:
            return self
        return replace(self, steps=most_steps, tokens=self.tokens * most_steps // self.steps)

    def check_norms(self, fragment: Fragment) -> None:
        """Raises ContributionError unless there is a finite norm for each tensor of the fragment."""
        if len(self.norms) != len(fragment.slots):
            raise ContributionError(
                f"{len(self.norms)} norms for a fragment of {len(fragment.slots)} tensors",
                learner=self.learner,
            )
        for norm, slot in zip(self.norms, fragment.slots, strict=True):
            if not math.isfinite(norm):
                raise NotFiniteContributionError(
                    f"the norm of {slot.tensor.name} is {norm}; check its loss and learning rate",
                    learner=self.learner,
                )
            if norm < 0:
                raise ContributionError(
                    f"the norm of {slot.tensor.name} is {norm}, less than 0", learner=self.learner
                )

    def check_chunk(self, fragment: Fragment, index: int, found_bytes: int) -> None:
        """Raises ContributionError if the fragment has no such chunk, or its length does not fit."""
        if not 0 <= index < fragment.chunks:
            raise ContributionError(
                f"chunk {index} of a fragment of {fragment.chunks}", learner=self.learner
            )
        lo, hi = fragment.chunk(index)
        expected = formats.encoded_bytes(self.format, hi - lo)
        if found_bytes != expected:
            raise DamagedContributionError(
                f"chunk {index} has {found_bytes} bytes, expected {expected}", learner=self.learner
            )

    def check_norm(self, slot: int, tensor: str, found: float) -> None:
        """Raises ContributionError if the values of a tensor have another norm than the header states."""
        stated = self.norms[slot]
        if max(found, stated) <= NORM_FLOOR:
            return
        if not abs(found - stated) <= NORM_TOLERANCE * stated:
            raise ContributionError(
                f"the delta of {tensor} has norm {found:.6g}, its header states {stated:.6g}; "
                "not merged",
                learner=self.learner,
            )


def _ratio(norm: float, limit: float) -> float:
    if norm == 0:
        return 0.0
    return min(norm / limit, MAX_EXCESS) if limit > 0 else MAX_EXCESS
