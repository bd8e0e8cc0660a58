"""
One round of one fragment: who is in it, and how far it is. Pure; the engine moves it.

    COLLECTING ──quorum──► GRACE ──deadline or everyone here──► PULLING ──all answered──► MERGING ──► MERGED
        ▲                                                          │                         │
        └───────────────── a member was lost and fewer than K are left ───────────────────────┘
                           (K or more are left: PULLING again, next attempt)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from diloco_syncer.core.events import Answered, Merged


class Phase(enum.Enum):
    """How far a round is."""

    COLLECTING = "Collecting"
    GRACE = "Grace"
    PULLING = "Pulling"
    MERGING = "Merging"
    MERGED = "Merged"


@dataclass(slots=True, kw_only=True)
class Round:
    """State of the round for global step `step`."""

    step: int
    fragment: int
    started: float
    phase: Phase = Phase.COLLECTING
    attempt: int = 0
    deadline: float | None = None
    """End of the grace window or of the wait for answers, monotonic."""
    retry_at: float = 0.0
    """No pull before this time: an attempt in which nobody could deliver is not repeated at once."""
    quorum_at: float | None = None
    pulled_at: float = 0.0
    grace_seconds: float = 0.0
    """What the window really took."""
    previous: dict[str, int] = field(default_factory=dict)
    """Members of this attempt → their pulled_step before it, given back if the attempt comes to nothing."""
    answers: dict[str, Answered] = field(default_factory=dict)
    merged: Merged | None = None

    @property
    def open(self) -> bool:
        """Still collecting reports."""
        return self.phase in (Phase.COLLECTING, Phase.GRACE)

    @property
    def askable(self) -> bool:
        """A learner may still be asked for the fragment."""
        return self.open or self.phase is Phase.PULLING
