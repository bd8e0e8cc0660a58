"""
Whether Θ grows as a model does, so that a job that goes wrong stops while there are good snapshots. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_GROWTH = 10.0
"""
Of the root mean square of a fragment since the last durable snapshot.

Paper leaves this open. No honest training comes near it; what does has lost its learning rate, or a
member without a guard (fewer than three) sent what it liked.
"""

MIN_SIZE = 0.1
"""Parameters smaller than this may grow: many begin at zero."""


@dataclass(slots=True)
class Growth:
    """Sizes of the fragments in the last durable snapshot, as far as they were merged since."""

    sizes: dict[int, float] = field(default_factory=dict)
    written: dict[int, float] | None = None
    """The same since the snapshot that is being written; None: none is."""

    def check(self, fragment: int, before: float, after: float) -> str:
        """Why a merged fragment must not become Θ; empty: it may."""
        allowed = MAX_GROWTH * max(MIN_SIZE, self.sizes.setdefault(fragment, before))
        if self.written is not None:
            self.written.setdefault(fragment, before)
        if after <= allowed and math.isfinite(after):
            return ""
        return (
            f"fragment {fragment} of Θ would grow from a root mean square of {before:.3g} to "
            f"{after:.3g}, at most {allowed:.3g} is plausible"
        )

    def snapshot(self) -> None:
        """A snapshot of the present sizes is taken; it counts once it is durable."""
        self.written = {}

    def snapshot_done(self, *, durable: bool) -> None:
        """The snapshot that was taken is durable, or failed."""
        if durable and self.written is not None:
            self.sizes = self.written
        self.written = None
