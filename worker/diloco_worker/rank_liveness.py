"""
The liveness of the other ranks of a learner of several pods: rank 0 alone is a `Learner`, whose link
reports for it.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from diloco.runtime.health import Health, HealthFile
from diloco_worker import settings


class RankProgress:
    """
    Reports the steps of one rank to the first process of its container; used from one thread.

    Args:
        path: file to write; None: nothing is reported.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = HealthFile(path)
        self._steps = 0

    def step(self, now: float) -> None:
        """The rank made a step; `now` is in monotonic seconds."""
        self._steps += 1
        why = f"step {self._steps} of this process"
        self._file.write(Health(at=now, ready=True, why=why, progress_at=now))


@cache
def _progress() -> RankProgress:
    return RankProgress(settings.progress_file())


def report_progress() -> None:
    """
    Report to the pod that this rank makes progress; call it in each step of a rank above 0.

    From the first call on, the pod's liveness probe fails when there is no further call for
    DILOCO_STUCK_SECONDS (900 s), and the kubelet restarts the container. The file is written once a
    second at most. In rank 0, and outside a cluster, it does nothing.
    """
    _progress().step(time.monotonic())
