"""
What a learner process is told by its environment (the only place of this package that reads it).

Faults (tests only) are read here as well: DILOCO_FAULTS="upload:corrupt-chunk=3@1;upload:nan" makes
the named point do the named harm, `=` gives it a number, `@` limits it to the first so many
answers to pulls.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.spec import RunSpec

_FAULT = re.compile(r"(?P<point>[a-z]+):(?P<harm>[a-z-]+)(=(?P<value>\d+))?(@(?P<times>\d+))?")
_HARMS = ("corrupt-chunk", "truncate", "repeat", "reorder", "nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One harm to be done on purpose."""

    point: str
    harm: str
    value: int = 0
    times: int | None = None
    """How many uploads it befalls, the first ones; None: every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The DILOCO_ variables of a learner or evaluator; None means unset."""

    job: str
    learner: str
    """ "<region>/<index>"; empty in an evaluator."""
    syncer: str
    """host:port."""
    spec: Path
    config: dict[str, Any] = field(default_factory=dict)
    state: Path | None = None
    tls: Path | None = None
    metrics_port: int = 0
    rank: int = 0
    """Of this process among those of its learner."""
    world_size: int = 1
    """Processes of its learner."""
    restarts: int = 0
    """Lives of this learner before this one."""
    health_file: Path | None = None
    """Where to leave signs of life; see diloco/health.py."""
    json_logs: bool = False
    faults: tuple[Fault, ...] = ()

    @property
    def region(self) -> str:
        """First half of the learner's name."""
        return self.learner.partition("/")[0]

    def read_spec(self) -> RunSpec:
        """
        The RunSpec.

        Raises:
            ConfigError: unreadable, or not one.
        """
        try:
            text = self.spec.read_text()
        except OSError as error:
            raise ConfigError(
                f"DILOCO_SPEC: {self.spec}: {error.strerror}; expected the job's spec.json"
            ) from None
        return RunSpec.from_json(text, source=str(self.spec))


_NEEDED = ("DILOCO_JOB", "DILOCO_LEARNER", "DILOCO_SPEC")


def from_env(
    environ: Mapping[str, str] | None = None, *, observer: bool = False
) -> LearnerSettings | None:
    """
    What the environment says; None when this process is not part of a job (no DILOCO_SYNCER).

    An observer (the evaluator) has no DILOCO_LEARNER: its name is empty.

    Raises:
        ConfigError: a variable is missing or cannot be read; the message names all of them.
    """
    env = os.environ if environ is None else environ
    if not env.get("DILOCO_SYNCER"):
        return None
    needed = ("DILOCO_JOB", "DILOCO_SPEC") if observer else _NEEDED
    problems = [
        f"{name} is not set, though DILOCO_SYNCER is" for name in needed if not env.get(name)
    ]
    learner = env.get("DILOCO_LEARNER", "")
    if learner and not re.fullmatch(r"[^/]+/\d+", learner):
        problems.append(f"DILOCO_LEARNER: {learner!r} is not <region>/<index>")
    port = env.get("DILOCO_METRICS_PORT", "0")
    if not port.isdigit():
        problems.append(f"DILOCO_METRICS_PORT: {port!r} is not a port")
    restarts = _count(env, "DILOCO_RESTARTS", 0, "a number of restarts", problems)
    rank = _count(env, "RANK", 0, "a rank", problems)
    world_size = _count(env, "WORLD_SIZE", 1, "a number of processes", problems)
    config: Any = {}
    try:
        config = json.loads(env.get("DILOCO_CONFIG") or "{}")
    except ValueError as error:
        problems.append(f"DILOCO_CONFIG: not JSON: {error}")
    if not isinstance(config, dict):
        problems.append(f"DILOCO_CONFIG: holds a {type(config).__name__}, expected an object")
    faults = _faults(env.get("DILOCO_FAULTS", ""), problems)
    if problems:
        raise ConfigError("environment: " + "; ".join(problems))
    return LearnerSettings(
        job=env["DILOCO_JOB"],
        learner=learner,
        syncer=env["DILOCO_SYNCER"],
        spec=Path(env["DILOCO_SPEC"]),
        config=config,
        state=Path(env["DILOCO_STATE"]) if env.get("DILOCO_STATE") else None,
        tls=Path(env["DILOCO_TLS"]) if env.get("DILOCO_TLS") else None,
        metrics_port=int(port),
        rank=rank,
        world_size=world_size,
        restarts=restarts,
        health_file=Path(env["DILOCO_HEALTH_FILE"]) if env.get("DILOCO_HEALTH_FILE") else None,
        json_logs=env.get("DILOCO_LOG_FORMAT") == "json",
        faults=faults,
    )


def _count(env: Mapping[str, str], name: str, default: int, what: str, problems: list[str]) -> int:
    text = env.get(name) or str(default)
    if text.isascii() and text.isdigit():
        return int(text)
    problems.append(f"{name}: {text!r} is not {what}")
    return default


def _faults(text: str, problems: list[str]) -> tuple[Fault, ...]:
    faults = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        found = _FAULT.fullmatch(part)
        if found is None or found["point"] != "upload" or found["harm"] not in _HARMS:
            problems.append(
                f"DILOCO_FAULTS: {part!r} is not upload:<{'|'.join(_HARMS)}>[=number][@times]"
            )
            continue
        times = int(found["times"]) if found["times"] else None
        faults.append(
            Fault(
                point=found["point"],
                harm=found["harm"],
                value=int(found["value"] or 0),
                times=times,
            )
        )
    return tuple(faults)
