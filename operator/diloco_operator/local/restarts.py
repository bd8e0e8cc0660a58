"""
When a process that died is started again, and whose fault its death was; for the supervisor of one
machine and for the first process of a container. Pure.
"""

from __future__ import annotations

import signal

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


def pause_seconds(
    deaths: int, *, at_once: int = 0, first_seconds: float, most_seconds: float
) -> float:
    """
    Pause before the next start; it doubles with each death.

    Args:
        deaths: in a row, without a healthy life between them; at least 1.
        at_once: so many of them are answered without any pause.
        first_seconds: the pause after those.
        most_seconds: no pause is longer.
    """
    doublings = deaths - 1 - at_once
    if doublings < 0:
        return 0.0
    # 2.0**64 is past every cap, and larger powers overflow.
    return min(most_seconds, first_seconds * 2.0 ** min(doublings, 64))


def is_own_fault(code: int) -> bool:
    """
    Whether a death counts against learnerRestartLimit: not leaving, not being killed from outside.

    Args:
        code: exit code; minus the signal's number when a signal ended the process.
    """
    return code > 0 or -code in _CRASHES
