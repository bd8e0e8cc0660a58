"""Settings of the local runtime: environment, interpreter, cores."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEVICES = "CUDA_VISIBLE_DEVICES"
"""The GPUs that a program may use; an empty value, -1 and what follows it mean none."""

OURS = (
    *("DILOCO_JOB", "DILOCO_LEARNER", "DILOCO_SYNCER", "DILOCO_SPEC", "DILOCO_CONFIG"),
    *("DILOCO_STATE", "DILOCO_TLS", "DILOCO_METRICS_PORT", "DILOCO_LISTEN"),
    *("DILOCO_PEER", "DILOCO_PEER_HOST", "DILOCO_CLUSTER"),
    *("DILOCO_SYNCER_PROXY", "DILOCO_RESTARTS", "DILOCO_HEALTH_FILE", "DILOCO_PROGRESS_FILE"),
    *(
        "DILOCO_POD_UID",
        "DILOCO_LOG_FORMAT",
        "DILOCO_EXAMINATION",
        "DILOCO_EXAMINATION_STEP",
        "DILOCO_REPLAY",
        "DILOCO_MACHINE",
        "DILOCO_RELAY_PORT",
        "DILOCO_ENCODE_ON",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
)
"""Variables of the contract: values set in the user's shell must not reach our processes."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Read once at start."""

    environment: Mapping[str, str]
    """What every process inherits; PATH begins with the directory of our interpreter."""
    python: str
    """The interpreter that "python" in a plan stands for."""
    cores: int
    """Cores that this process may use."""
    devices: tuple[str, ...] = ()
    """GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings of this process."""
        environment = {name: value for name, value in os.environ.items() if name not in OURS}
        own = str(Path(sys.executable).parent)
        # So that scripts started by name (torchrun, the user's tools) use our interpreter.
        environment["PATH"] = os.pathsep.join([own, environment.get("PATH", os.defpath)])
        # Unbuffered: logs are read while the process runs.
        environment.setdefault("PYTHONUNBUFFERED", "1")
        return cls(
            environment=environment,
            python=sys.executable,
            cores=_cores(),
            devices=_devices(environment.get(DEVICES)),
        )

    def threads(self, *, learners: int) -> dict[str, str]:
        """
        The number of threads per learner, as variables for math libraries; the user's values win.

        Without it every learner starts one thread per core, and learners slow each other down.
        """
        each = str(max(1, self.cores // max(1, learners)))
        return {name: each for name in THREAD_VARIABLES if name not in self.environment}

    def devices_of(self, index: int, *, learners: int) -> dict[str, str]:
        """
        The GPUs of a learner, as a variable; none without GPUs.

        Each GPU belongs to one learner, as evenly as possible; with fewer GPUs than learners, each
        learner has one and shares it.
        """
        if not self.devices:
            return {}
        if learners >= len(self.devices):
            own = self.devices[index % len(self.devices) :][:1]
        else:
            own = self.devices[index::learners]
        return {DEVICES: ",".join(own)}


def quiet_grpc() -> None:
    """
    Turn off gRPC's own log lines, unless the user asked for them.

    Call it before the first import of grpc, which reads the setting.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _devices(visible: str | None) -> tuple[str, ...]:
    if visible is None:
        return tuple(str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*")))
    devices = [device.strip() for device in visible.split(",")]
    return tuple(itertools.takewhile(lambda device: device not in ("", "-1"), devices))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
