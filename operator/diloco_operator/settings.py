"""The operator's environment, read once at start; with the faults that tests ask for."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import ConfigError
from diloco_operator import names
from diloco_operator.view import View

FAULT_POINTS = ("after-read", "after-apply-N", "after-delete", "before-status", "after-status")
"""Named points of a reconcile at which a test may have the operator killed; N counts from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Harm that a test asked for."""

    kill_at: str = ""
    """A point of FAULT_POINTS; "": none."""

    def reached(self, point: str) -> None:
        """End this process as kill -9 does, with nothing cleaned up, if a test asked for it here."""
        if point == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(128 + signal.SIGKILL)  # a container's first process ignores its own signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one operator process is told."""

    view: View
    namespaces: tuple[str, ...]
    """Namespaces whose jobs are its own; (): all."""
    health_port: int
    """0: any free one."""
    metrics_port: int
    """0: no metrics."""
    json_logs: bool
    resync_seconds: float
    """Between two looks at the list of all jobs."""
    threads: int
    """Jobs that are reconciled at the same time."""
    pod: str
    """Name of this pod, for Events."""
    faults: Faults

    @classmethod
    def from_environment(cls) -> Settings:
        """
        The settings of this process.

        Raises:
            ConfigError: one is missing or not understood; the message names it.
        """
        return from_env(os.environ)


def from_env(env: Mapping[str, str]) -> Settings:
    """
    The settings that these variables say; an empty one counts as not set.

    Raises:
        ConfigError: one is missing or not understood; the message names it.
    """
    region = env.get("DILOCO_REGION", "")
    if region and not re.fullmatch(names.REGION_PATTERN, region):
        raise ConfigError(f"DILOCO_REGION: {region!r} is not a DNS label; give a region's name")
    return Settings(
        view=View(
            region=region,
            worker_image=_required(env, "DILOCO_WORKER_IMAGE"),
            syncer_image=_required(env, "DILOCO_SYNCER_IMAGE"),
            image_pull_policy=env.get("DILOCO_IMAGE_PULL_POLICY") or "IfNotPresent",
            image_pull_secrets=_words(env.get("DILOCO_IMAGE_PULL_SECRETS", "")),
            cluster_domain=env.get("DILOCO_CLUSTER_DOMAIN") or "cluster.local",
        ),
        namespaces=_words(env.get("DILOCO_WATCH_NAMESPACES", "")),
        health_port=_port(env, "DILOCO_HEALTH_PORT", 8080),
        metrics_port=_port(env, "DILOCO_METRICS_PORT", 9090),
        json_logs=_one_of(env, "DILOCO_LOG_FORMAT", ("json", "text")) == "json",
        resync_seconds=_number(env, "DILOCO_RESYNC_SECONDS", 30.0, 1.0, 3600.0),
        threads=int(_number(env, "DILOCO_RECONCILE_THREADS", 8, 1, 64)),
        pod=env.get("DILOCO_POD") or env.get("HOSTNAME") or "diloco-operator",
        faults=_faults(env.get("DILOCO_FAULTS", "")),
    )


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise ConfigError(f"{name} is not set; give the image that pods start where a job has none")
    return value


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _one_of(env: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = env.get(name) or allowed[0]
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
    return value


def _number(env: Mapping[str, str], name: str, default: float, least: float, most: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise ConfigError(f"{name}: {text!r} is not a number of {least:g} … {most:g}")
    return value


def _port(env: Mapping[str, str], name: str, default: int) -> int:
    return int(_number(env, name, default, 0, 65535))


def _faults(text: str) -> Faults:
    if not text:
        return Faults()
    points = "|".join(FAULT_POINTS).replace("N", "[1-9][0-9]*")
    found = re.fullmatch(rf"reconcile:kill=({points})", text.strip())
    if found is None:
        raise ConfigError(
            f"DILOCO_FAULTS: {text!r} is not reconcile:kill=<{'|'.join(FAULT_POINTS)}>"
        )
    return Faults(kill_at=found[1])
