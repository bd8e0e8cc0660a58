"""
Restart rules that the agent of a container and the local supervisor share.

Pure: how long to back off, and when a learner has crashed too often (diloco/runtime/exits.py: what a crash is).
"""

from __future__ import annotations

from diloco.runtime.backoff import doubled
from diloco.runtime.formatting import ending


def backoff_seconds(
    exits: int, *, immediate: int = 0, first_seconds: float, max_seconds: float
) -> float:
    """
    Delay before the next start; it doubles with each exit.

    Args:
        exits: in a row, without a healthy run between them; at least 1.
        immediate: number of exits that are followed by an immediate restart.
        first_seconds: the first delay after those.
        max_seconds: upper bound of the delay.
    """
    doublings = exits - 1 - immediate
    if doublings < 0:
        return 0.0
    return doubled(first_seconds, doublings, max_seconds)


def exit_cause(code: int, last_line: str) -> str:
    """
    How a process ended, with the last line of its log.

    >>> exit_cause(1, "no such file"), exit_cause(-9, "")
    ('exit code 1: no such file', 'signal 9 (SIGKILL)')
    """
    return f"{ending(code)}: {last_line}" if last_line else ending(code)


def limit_message(learner: str, *, crashes: int, limit: int | None, cause: str) -> str:
    """Why a learner is not restarted again; "" while its crashes are within the limit."""
    if limit is None or crashes <= limit:
        return ""
    times = "once" if crashes == 1 else f"{crashes} times"
    return f"learner {learner} crashed {times}, spec.runPolicy.learnerRestartLimit is {limit} ({cause})"
