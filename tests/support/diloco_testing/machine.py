"""The load of this machine, for time bounds that also hold under load."""

from __future__ import annotations

import os

MAX_FACTOR = 6.0


def slowdown() -> float:
    """
    How many times longer than alone a program takes now: processes that want a core, for each core.

    1 on a quiet machine, so that bounds are strict there; no more than MAX_FACTOR.
    """
    return min(MAX_FACTOR, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
