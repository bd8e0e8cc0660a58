"""
Delays between retries, from a random generator that is given.
"""

from __future__ import annotations

import random


class Backoff:
    """
    How long to wait before the next attempt: exponential with full jitter.

    Pure but for `rng`. Full jitter, because all learners lose a syncer at the same moment.
    """

    def __init__(self, base_seconds: float, cap_seconds: float, rng: random.Random) -> None:
        self._base_seconds = base_seconds
        self._cap_seconds = cap_seconds
        self._rng = rng
        self._tries = 0

    def next(self) -> float:
        """Seconds to wait: uniform in 0 … min(cap, base · 2^tries)."""
        # 2^64 is beyond any cap; a larger exponent would overflow after days of trying.
        limit = min(self._cap_seconds, self._base_seconds * 2.0 ** min(self._tries, 64))
        self._tries += 1
        return self._rng.uniform(0.0, limit)

    def reset(self) -> None:
        """After a success: start with the shortest delay again."""
        self._tries = 0
