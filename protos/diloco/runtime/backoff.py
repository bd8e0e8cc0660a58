"""
Delays between retries, from a random generator that is given.
"""

from __future__ import annotations

import random


def doubled(first: float, times: int, most: float) -> float:
    """
    `first` · 2^times, at most `most`.

    >>> [doubled(0.5, times, 3.0) for times in (0, 1, 2, 3, 10**9)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    # 2^64 is beyond any limit; a larger exponent would overflow after days of trying.
    return min(most, first * 2.0 ** min(times, 64))


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
        limit = doubled(self._base_seconds, self._tries, self._cap_seconds)
        self._tries += 1
        return self._rng.uniform(0.0, limit)

    def reset(self) -> None:
        """After a success: start with the shortest delay again."""
        self._tries = 0
