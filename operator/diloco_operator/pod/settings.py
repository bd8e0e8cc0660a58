"""What the first process of a container is told: its command line and its environment."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco_operator.pod.policy import Limits, Role

PYTHON = "python"
"""First word of our own programs: the interpreter that runs this."""

MASTER_PORT = 29500
"""Where the pods of one learner meet (torchrun's own default)."""

_GRACE_SECONDS = {Role.LEARNER: 60.0, Role.SYNCER: 60.0, Role.EVALUATOR: 30.0}
"""terminationGracePeriodSeconds of their pods."""

_MARGIN_SECONDS = 5.0
"""Of the grace period are left to end the child by force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Read once at start."""

    role: Role
    name: str
    """For people: the learner's name, or the role."""
    rank: int
    """Of this pod among those of its learner."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """All of the child's, but for its count of restarts."""
    limits: Limits
    stuck_seconds: float
    """A child without progress for so long is stuck."""
    state: Path | None
    """What outlives a container, not always its pod; None: nothing does."""
    health_file: Path
    """Where the child leaves its signs of life."""
    health_port: int
    termination_log: Path
    kernels: tuple[Path, Path] | None
    """Compiled kernels of the image, and the folder that they are wanted in."""
    json_logs: bool


def read(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """
    What the words after `python -m diloco_operator.pod` and the environment say.

    Raises:
        ConfigError: something is missing or cannot be read; the message names all of it.
    """
    env = os.environ if environ is None else environ
    problems: list[str] = []
    role, argv = _words(arguments)
    own = {"DILOCO_HEALTH_FILE": _health_file(env, role)}
    if role is Role.LEARNER:
        own |= _learner(env, problems)
    grace = _number(env, "DILOCO_GRACE_SECONDS", _GRACE_SECONDS[role], problems)
    limit = _number(env, "DILOCO_RESTART_LIMIT", -1, problems)
    stuck = _number(env, "DILOCO_STUCK_SECONDS", 900, problems)
    port = _number(env, "DILOCO_HEALTH_PORT", 8080, problems)
    if problems:
        raise ConfigError("environment: " + "; ".join(problems))
    path = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    state, target = env.get("DILOCO_STATE"), env.get("NUMBA_CACHE_DIR")
    return Settings(
        role=role,
        name=own.get("DILOCO_LEARNER", role.value),
        rank=int(own.get("RANK", "0")),
        argv=(sys.executable, *argv[1:]) if argv[0] == PYTHON else argv,
        # A line must not wait in a buffer: it may be the last one.
        environment={"PYTHONUNBUFFERED": "1", **env, "PATH": path, **own},
        limits=Limits(
            leave_seconds=max(0.0, grace - _MARGIN_SECONDS),
            learner_restarts=int(limit) if limit >= 0 else None,
        ),
        stuck_seconds=stuck,
        state=Path(state) if state else None,
        health_file=Path(own["DILOCO_HEALTH_FILE"]),
        health_port=int(port),
        termination_log=termination_log(env),
        kernels=(
            (Path(env.get("DILOCO_KERNELS", "/opt/diloco/numba")), Path(target)) if target else None
        ),
        json_logs=env.get("DILOCO_LOG_FORMAT") == "json",
    )


def termination_log(environ: Mapping[str, str] | None = None) -> Path:
    """Where the kubelet looks for why a container ended."""
    env = os.environ if environ is None else environ
    return Path(env.get("DILOCO_TERMINATION_LOG", "/dev/termination-log"))


def _words(arguments: Sequence[str]) -> tuple[Role, tuple[str, ...]]:
    roles = [role.value for role in Role]
    if len(arguments) < 3 or arguments[0] not in roles or arguments[1] != "--":
        raise ConfigError(
            f"arguments: {' '.join(arguments)!r}, expected {'|'.join(roles)} -- COMMAND ..."
        )
    return Role(arguments[0]), tuple(arguments[2:])


def _health_file(env: Mapping[str, str], role: Role) -> str:
    """Below the folder for temporary files: on the syncer's volume it would cost a write a second."""
    folder = env.get("TMPDIR") or tempfile.gettempdir()
    return str(Path(folder, f"diloco-{role.value}-{os.getpid()}.json"))


def _learner(env: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """Who this learner is, and where its pods meet."""
    needed = ("DILOCO_JOB", "DILOCO_REGION", "DILOCO_POD")
    missing = [f"{name} is not set" for name in needed if not env.get(name)]
    ordinal = env.get("DILOCO_POD", "").rpartition("-")[2]
    if not missing and not (ordinal.isascii() and ordinal.isdigit()):
        missing.append(f"DILOCO_POD: {env['DILOCO_POD']!r} does not end in -<ordinal>")
    size = int(_number(env, "DILOCO_PODS_PER_LEARNER", 1, problems))
    if size < 1:
        missing.append(f"DILOCO_PODS_PER_LEARNER: {size} is less than 1")
    if missing:
        problems += missing
        return {}
    index, rank = divmod(int(ordinal), size)
    own = {"DILOCO_LEARNER": f"{env['DILOCO_REGION']}/{index}"}
    if size > 1:
        service = f"{env['DILOCO_JOB']}-{env['DILOCO_REGION']}"
        own |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": f"{service}-{index * size}.{service}",
            "MASTER_PORT": str(MASTER_PORT),
        }
    return own


def _number(env: Mapping[str, str], name: str, default: float, problems: list[str]) -> float:
    text = env.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        problems.append(f"{name}: {text!r} is not a number")
        return default
