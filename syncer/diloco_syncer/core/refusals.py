"""
Which refusals are written in full, and which are only counted. Pure.

A peer may be refused any number of times per second; lines in the log and in events.jsonl, which lies
on the volume of the snapshots, must not follow that number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FULL_REFUSALS = 10
"""Refusals of each reason that are written in full per window; the others are counted."""

WINDOW_SECONDS = 60.0
"""Length of a window; the count of what was not written follows at its end."""


@dataclass(slots=True)
class Refusals:
    """Counts the refusals of the current window by reason; reasons are a fixed set (diloco.errors)."""

    _begun: float | None = None
    """When the window began; None: no refusal since the last one ended."""
    _seen: Counter[str] = field(default_factory=Counter)

    def refused(self, reason: str, *, now: float) -> bool:
        """Count a refusal; True: write it in full. Call `ended` first."""
        if self._begun is None:
            self._begun = now
        self._seen[reason] += 1
        return self._seen[reason] <= FULL_REFUSALS

    def ended(self, *, now: float) -> dict[str, int]:
        """If the window is over, begin another; returns reason → refusals that were not written."""
        if self._begun is None or now < self._begun + WINDOW_SECONDS:
            return {}
        found = {
            reason: count - FULL_REFUSALS
            for reason, count in sorted(self._seen.items())
            if count > FULL_REFUSALS
        }
        self._begun = None
        self._seen.clear()
        return found
