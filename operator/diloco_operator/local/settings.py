"""What the local runtime takes from its surroundings: environment, interpreter, cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OURS = (
    *("DILOCO_JOB", "DILOCO_LEARNER", "DILOCO_SYNCER", "DILOCO_SPEC", "DILOCO_CONFIG"),
    *("DILOCO_STATE", "DILOCO_TLS", "DILOCO_METRICS_PORT", "DILOCO_LISTEN"),
    *("DILOCO_RESTARTS", "DILOCO_HEALTH_FILE", "DILOCO_LOG_FORMAT"),
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of the contract: a value left over in the user's shell must not reach a child."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Read once at start."""

    environment: Mapping[str, str]
    """What every child inherits; PATH begins with the folder of our interpreter."""
    python: str
    """What the word "python" in a plan stands for."""
    cores: int
    """Cores that this process may use."""

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings of this process."""
        environment = {name: value for name, value in os.environ.items() if name not in OURS}
        own = str(Path(sys.executable).parent)
        # A script started by name (torchrun, a user's tool) then finds the interpreter we have.
        environment["PATH"] = os.pathsep.join([own, environment.get("PATH", os.defpath)])
        # A log is read while the process lives: lines must not wait in a buffer.
        environment.setdefault("PYTHONUNBUFFERED", "1")
        return cls(environment=environment, python=sys.executable, cores=_cores())

    def threads(self, *, learners: int) -> dict[str, str]:
        """
        The cores dealt to learners, as variables for math libraries; the user's own are left alone.

        Without it every learner starts as many threads as there are cores, and they wait for each
        other.
        """
        each = str(max(1, self.cores // max(1, learners)))
        return {name: each for name in THREAD_VARIABLES if name not in self.environment}


def quiet_grpc() -> None:
    """
    Keep gRPC's own log lines off the terminal, unless the user asked for them.

    Call it before grpc is imported for the first time: that is when it looks.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
