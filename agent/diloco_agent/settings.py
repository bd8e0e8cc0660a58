"""The settings of the agent, from its command line and its environment."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.runtime.env import Environment
from diloco_agent.policy import Limits, Role

PYTHON = "python"
"""First word of our own programs; replaced by the interpreter that runs this."""

MASTER_PORT = 29500
"""Port at which the pods of one learner rendezvous (torchrun's default)."""

_GRACE_SECONDS = {Role.LEARNER: 60.0, Role.SYNCER: 60.0, Role.EVALUATOR: 30.0}
"""terminationGracePeriodSeconds of their pods."""

_MARGIN_SECONDS = 5.0
"""Part of the grace period that is reserved for SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Read once at start."""

    role: Role
    name: str
    """For messages: the learner's name, or the role."""
    rank: int
    """Of this pod among those of its learner."""
    num_ranks: int
    """Pods of its learner."""
    rank_zero: tuple[str, int]
    """Host and port of the agent of rank 0, for the other ranks."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Complete environment of the process, except its restart count."""
    limits: Limits
    stuck_seconds: float
    """A process without progress for this long is stuck."""
    state: Path | None
    """Directory that outlives the container, and the pod if it is on a claim; None: there is none."""
    pod_uid: str
    """Of this pod, not of one with the same name before it; "": not known."""
    health_file: Path
    """Where the process reports its health."""
    health_port: int
    termination_log: Path
    kernels: tuple[Path, Path] | None
    """Directory of the image's compiled kernels, and numba's cache directory."""
    json_logs: bool


def read(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """
    The settings in the arguments of `python -m diloco_agent` and in the environment.

    Raises:
        ConfigError: something is missing or cannot be used; the message names all of it.
    """
    variables = os.environ if environ is None else environ
    env = Environment(variables)
    role, argv = _command(arguments)
    own = {"DILOCO_HEALTH_FILE": _health_file(env, role)}
    if role is Role.LEARNER:
        own |= _learner(env)
        if int(own.get("RANK", "0")):
            # Rank 0 is a Learner, which reports its health by itself.
            own["DILOCO_PROGRESS_FILE"] = own["DILOCO_HEALTH_FILE"]
    grace = env.number("DILOCO_GRACE_SECONDS", _GRACE_SECONDS[role], least=0)
    limit = env.integer("DILOCO_RESTART_LIMIT", -1)
    stuck = env.number("DILOCO_STUCK_SECONDS", 900, least=0)
    port = env.port("DILOCO_HEALTH_PORT", 8080)
    env.check()
    path = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    target = env.path("NUMBA_CACHE_DIR")
    return Settings(
        role=role,
        name=own.get("DILOCO_LEARNER", role.value),
        rank=int(own.get("RANK", "0")),
        num_ranks=int(own.get("WORLD_SIZE", "1")),
        rank_zero=(own.get("MASTER_ADDR", ""), port),
        argv=(sys.executable, *argv[1:]) if argv[0] == PYTHON else argv,
        # Unbuffered: any line may be the last one before a kill.
        environment={"PYTHONUNBUFFERED": "1", **variables, "PATH": path, **own},
        limits=Limits(
            leave_seconds=max(0.0, grace - _MARGIN_SECONDS),
            learner_restarts=limit if limit >= 0 else None,
        ),
        stuck_seconds=stuck,
        state=env.path("DILOCO_STATE"),
        pod_uid=env.text("DILOCO_POD_UID"),
        health_file=Path(own["DILOCO_HEALTH_FILE"]),
        health_port=port,
        termination_log=termination_log(variables),
        kernels=(
            (Path(env.text("DILOCO_KERNELS", "/opt/diloco/numba")), target) if target else None
        ),
        json_logs=env.text("DILOCO_LOG_FORMAT") == "json",
    )


def termination_log(environ: Mapping[str, str] | None = None) -> Path:
    """Where the kubelet reads why a container exited."""
    env = Environment(os.environ if environ is None else environ)
    return Path(env.text("DILOCO_TERMINATION_LOG", "/dev/termination-log"))


def _command(arguments: Sequence[str]) -> tuple[Role, tuple[str, ...]]:
    roles = [role.value for role in Role]
    if len(arguments) < 3 or arguments[0] not in roles or arguments[1] != "--":
        raise ConfigError(
            f"arguments: {' '.join(arguments)!r}, expected {'|'.join(roles)} -- COMMAND ..."
        )
    return Role(arguments[0]), tuple(arguments[2:])


def _health_file(env: Environment, role: Role) -> str:
    """In the temporary directory: on the syncer's volume it would cost one write per second."""
    folder = env.text("TMPDIR") or tempfile.gettempdir()
    return str(Path(folder, f"diloco-{role.value}-{os.getpid()}.json"))


def _learner(env: Environment) -> dict[str, str]:
    """The learner's name, and where its pods meet."""
    job = env.required("DILOCO_JOB", "the job's name")
    region = env.required("DILOCO_REGION", "the region's name")
    pod = env.required("DILOCO_POD", "the pod's name")
    size = env.integer("DILOCO_PODS_PER_LEARNER", 1, least=1)
    rendezvous = env.port("DILOCO_RENDEZVOUS_PORT", MASTER_PORT)
    ordinal = re.fullmatch("(?s:(.*)-)([0-9]+)", pod)
    if ordinal is None:
        if pod:
            env.problem(f"DILOCO_POD: {pod!r}, expected a name that ends in -<ordinal>")
        return {}
    index, rank = divmod(int(ordinal[2]), size)
    own = {"DILOCO_LEARNER": f"{region}/{index}"}
    if env.text("DILOCO_PEER"):
        own["DILOCO_PEER_HOST"] = f"{pod}.{job}-{region}"
    if size > 1:
        own |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": f"{ordinal[1]}-{index * size}.{job}-{region}",
            "MASTER_PORT": str(rendezvous),
        }
    return own
