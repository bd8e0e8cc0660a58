"""
The Python interpreter, tuned for threads that wait for each other.
"""

from __future__ import annotations

import sys


def tune_interpreter() -> None:
    """Let threads take turns every 0.5 ms: at 5 ms, one busy thread slows transfers 20 times."""
    sys.setswitchinterval(5e-4)
