"""
One round of one fragment: who is in it, and how far it is. Pure; the engine moves it.

    COLLECTING ──quorum──► GRACE ──deadline or everyone here──► PULLING ──all answered──► MERGING ──► MERGED
        ▲                                                          │                         │
        └───────────────── a member was lost and fewer than K are left ───────────────────────┘
                           (K or more are left: PULLING again, next attempt)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_syncer.core.events import Answered, MemberFacts, Merged


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


def merge_line(
    round_: Round,
    merged: Merged,
    facts: Sequence[MemberFacts],
    *,
    quorum: int,
    receivers: int,
    now: float,
) -> dict[str, Any]:
    """The fields of a `merge` line of events.jsonl: what the audit needs to judge it."""
    return {
        "step": round_.step,
        "fragment": round_.fragment,
        "attempt": round_.attempt,
        "quorum": quorum,
        "quorumSeconds": round((round_.quorum_at or now) - round_.started, 6),
        "graceSeconds": round(round_.grace_seconds, 6),
        "syncSeconds": round(now - round_.pulled_at, 6),
        "bytesUp": merged.bytes_up,
        "bytesDown": merged.bytes_result * receivers,
        "deltaNorm": merged.delta_norm,
        "members": [
            {
                "learner": f.learner,
                "incarnation": f.incarnation,
                "step": f.local_step,
                "steps": f.steps,
                "tokens": f.tokens,
                "weight": f.weight,
                "base": None if f.base is None else f.base[1],
            }
            for f in facts
        ],
    }
