"""
Who takes part in a merge, and what is said about a member whose upload cannot be merged. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco import wire
from diloco.errors import DamagedError, NotFiniteError, ProtocolError
from diloco.fragments import Fragment

NORM_TOLERANCE = 1e-3
"""Largest relative difference between a norm in a header and the norm of what arrived."""

NORM_FLOOR = 1e-12
"""Norms closer than this agree: a learner may have summed squares that fp32 rounds to zero."""


class MemberError(ProtocolError):
    """One member's upload cannot be merged: drop `learner`, whoever's thread found it."""

    def __init__(self, message: str, *, learner: str) -> None:
        super().__init__(f"{learner}: {message}")
        self.learner = learner


class DamagedMemberError(MemberError, DamagedError):
    """A chunk of this member has another length than its format needs."""

    reason = DamagedError.reason


class NotFiniteMemberError(MemberError, NotFiniteError):
    """This member brought NaN or Inf, or values so large that the merged fragment would hold them."""

    reason = NotFiniteError.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One learner's part in a merge, from the header of its upload."""

    learner: str
    weight: float
    """tokens² / steps; 0: what it sends is ignored."""
    format: int
    """bulk_pb2.Format of its chunks."""
    norms: tuple[float, ...]
    """‖v‖ per tensor of the fragment, in fragment order, of the values as they were sent."""

    def check_header(self, fragment: Fragment) -> None:
        """
        Raises MemberError if the norms do not fit the fragment.

        A weight that `outer.weight` cannot have made is a ValueError: our own mistake.
        """
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"{self.learner} has weight {self.weight}, expected tokens² / steps")
        if len(self.norms) != len(fragment.slots):
            raise MemberError(
                f"{len(self.norms)} norms for a fragment of {len(fragment.slots)} tensors",
                learner=self.learner,
            )
        for norm, slot in zip(self.norms, fragment.slots, strict=True):
            if not math.isfinite(norm):
                raise NotFiniteMemberError(
                    f"the norm of {slot.tensor.name} is {norm}; look at its loss and learning rate",
                    learner=self.learner,
                )
            if norm < 0:
                raise MemberError(
                    f"the norm of {slot.tensor.name} is {norm}, less than 0", learner=self.learner
                )

    def check_chunk(self, fragment: Fragment, index: int, found_bytes: int) -> None:
        """Raises MemberError if the fragment has no such chunk, or its length does not fit."""
        if not 0 <= index < fragment.chunks:
            raise MemberError(
                f"chunk {index} of a fragment of {fragment.chunks}", learner=self.learner
            )
        lo, hi = fragment.chunk(index)
        expected = wire.encoded_bytes(self.format, hi - lo)
        if found_bytes != expected:
            raise DamagedMemberError(
                f"chunk {index} has {found_bytes} bytes, expected {expected}", learner=self.learner
            )

    def check_norm(self, slot: int, tensor: str, found: float) -> None:
        """Raises MemberError if what arrived of a tensor has another norm than its header says."""
        stated = self.norms[slot]
        if abs(found - stated) > NORM_TOLERANCE * stated + NORM_FLOOR:
            raise MemberError(
                f"the delta of {tensor} has norm {found:.6g}, its header says {stated:.6g}; "
                "not merged",
                learner=self.learner,
            )
