"""
Command line and environment of the syncer, read once. Flags win over DILOCO_* variables.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one syncer process is told."""

    spec: Path
    """RunSpec file."""
    directory: Path
    """Run directory: events.jsonl, eval.jsonl, snapshots/, model/."""
    listen: str
    """host:port; port 0 takes any free one."""
    endpoint_file: Path | None
    """Where to write the address that was bound, once it serves."""
    tls: Path | None
    """Directory with tls.crt, tls.key, ca.crt; None: no TLS."""
    metrics_port: int
    """Prometheus metrics; 0: none."""
    stall_seconds: float
    """A member of a merge that sends nothing for so long is dropped."""
    json_logs: bool
    health_file: Path | None
    """Where to leave signs of life; see diloco/health.py."""


def read(arguments: Sequence[str] | None = None) -> Settings:
    """
    Read flags and environment.

    Raises:
        ConfigError: a required one is missing.
    """
    env = os.environ
    parser = argparse.ArgumentParser(
        prog="python -m diloco_syncer", description="The syncer of one job."
    )
    parser.add_argument("--spec", default=env.get("DILOCO_SPEC"), metavar="FILE")
    parser.add_argument("--dir", default=env.get("DILOCO_STATE"), metavar="DIR")
    parser.add_argument("--listen", default=env.get("DILOCO_LISTEN", "0.0.0.0:7070"))
    parser.add_argument("--endpoint-file", default=None, metavar="FILE")
    parser.add_argument("--tls", default=env.get("DILOCO_TLS"), metavar="DIR")
    parser.add_argument(
        "--metrics-port", type=int, default=int(env.get("DILOCO_METRICS_PORT", "0"))
    )
    parser.add_argument("--stall-seconds", type=float, default=20.0)
    parser.add_argument(
        "--json-logs", action="store_true", default=env.get("DILOCO_LOG_FORMAT") == "json"
    )
    given = parser.parse_args(arguments)
    health_file = env.get("DILOCO_HEALTH_FILE")
    for flag, value, variable in (
        ("--spec", given.spec, "DILOCO_SPEC"),
        ("--dir", given.dir, "DILOCO_STATE"),
    ):
        if not value:
            raise ConfigError(f"{flag} is not given and {variable} is not set; give one of them")
    return Settings(
        spec=Path(given.spec),
        directory=Path(given.dir),
        listen=given.listen,
        endpoint_file=Path(given.endpoint_file) if given.endpoint_file else None,
        tls=Path(given.tls) if given.tls else None,
        metrics_port=given.metrics_port,
        stall_seconds=given.stall_seconds,
        json_logs=given.json_logs,
        health_file=Path(health_file) if health_file else None,
    )
