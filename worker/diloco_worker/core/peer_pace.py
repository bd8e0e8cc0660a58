"""
How fast a peer sends its state: slowly, below its own uploads. Pure.
"""

from __future__ import annotations

LEAST_BYTES_PER_SECOND = 8 << 20
MOST_BYTES_PER_SECOND = 256 << 20

SHARE = 0.125
"""Of the time that the newcomer may wait, in which it does not train; the job may wait for it."""

YIELD_SECONDS = 1.0
"""Longest pause for uploads before each piece."""


def bytes_per_second(size: int, *, interval: int, step_seconds: float) -> float:
    """
    The rate at which `size` bytes are sent.

    Args:
        size: of the state.
        interval: H.
        step_seconds: of a step of this learner; 0: not known.
    """
    seconds = SHARE * interval * step_seconds
    rate = size / seconds if seconds > 0 else MOST_BYTES_PER_SECOND
    return min(MOST_BYTES_PER_SECOND, max(LEAST_BYTES_PER_SECOND, rate))


class Pace:
    """
    Spreads bytes over time.

    Args:
        rate: bytes per second.
        now: monotonic seconds, when the first may be sent.
    """

    def __init__(self, rate: float, *, now: float) -> None:
        self._rate, self._due_at = rate, now

    def wait_seconds(self, size: int, *, now: float) -> float:
        """How long to wait before the next `size` bytes, which are then counted; time lost is not made up for."""
        wait = max(0.0, self._due_at - now)
        self._due_at = now + wait + size / self._rate
        return wait
