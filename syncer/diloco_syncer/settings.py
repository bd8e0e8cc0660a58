"""
Command line and environment of the syncer, read once. Flags win over DILOCO_* variables.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.runtime.env import Environment

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Variables of AWS for the endpoint of S3, or of a service that is compatible with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a syncer process."""

    spec: Path
    """RunSpec file."""
    directory: Path
    """Run directory: events.jsonl, eval.jsonl, snapshots/, model/."""
    listen: str
    """host:port; port 0: any free port."""
    endpoint_file: Path | None
    """File for the bound address, written once the syncer serves."""
    tls: Path | None
    """Directory with tls.crt, tls.key, ca.crt; None: no TLS."""
    metrics_port: int
    """Prometheus metrics; 0: none."""
    json_logs: bool
    health_file: Path | None
    """See diloco.runtime.health."""
    replay: Path | None = None
    """The document of a replay, whose tape decides (diloco.journal.replay_files); None: this is none."""
    plain_http: bool = False
    """The endpoint of S3 in the environment has no TLS."""


def read(arguments: Sequence[str] | None = None) -> Settings:
    """
    Read flags and environment.

    Raises:
        ConfigError: something is missing or cannot be used; the message names all of it.
    """
    env = Environment(os.environ)
    parser = argparse.ArgumentParser(
        prog="python -m diloco_syncer", description="The syncer of one job."
    )
    parser.add_argument("--spec", default=env.text("DILOCO_SPEC"), metavar="FILE")
    parser.add_argument("--dir", default=env.text("DILOCO_STATE"), metavar="DIR")
    parser.add_argument("--listen", default=env.text("DILOCO_LISTEN", "0.0.0.0:7070"))
    parser.add_argument("--endpoint-file", default=None, metavar="FILE")
    parser.add_argument("--tls", default=env.text("DILOCO_TLS"), metavar="DIR")
    parser.add_argument("--metrics-port", type=int, default=env.port("DILOCO_METRICS_PORT", 0))
    parser.add_argument(
        "--json-logs", action="store_true", default=env.text("DILOCO_LOG_FORMAT") == "json"
    )
    given = parser.parse_args(arguments)
    for flag, value, variable in (
        ("--spec", given.spec, "DILOCO_SPEC"),
        ("--dir", given.dir, "DILOCO_STATE"),
    ):
        if not value:
            env.problem(f"{flag} is not given and {variable} is not set; give one of them")
    env.check()
    return Settings(
        spec=Path(given.spec),
        directory=Path(given.dir),
        listen=given.listen,
        endpoint_file=Path(given.endpoint_file) if given.endpoint_file else None,
        tls=Path(given.tls) if given.tls else None,
        metrics_port=given.metrics_port,
        json_logs=given.json_logs,
        health_file=env.path("DILOCO_HEALTH_FILE"),
        replay=env.path("DILOCO_REPLAY"),
        plain_http=any(env.text(name).startswith("http://") for name in ENDPOINTS),
    )
