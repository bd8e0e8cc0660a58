"""The operator as a separate process, against an API server in memory or a real API server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_testing.kubernetes.api_server import ApiServer
from diloco_testing.kubernetes.fake_api import FakeApi

DEADLINE_SECONDS = 60.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until the condition is true; its value."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS} s: {what}"
        time.sleep(0.05)
    return value


class OperatorProcess:
    """Use as a context manager; killed at the end if it still runs."""

    def __init__(
        self, api: FakeApi | ApiServer, directory: Path, *, token: str = "", **env: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "operator.log"
        self.health_port, self.metrics_port = _free(), _free()
        self._env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("DILOCO_")},
            "KUBECONFIG": str(api.kubeconfig(directory / "kubeconfig", token)),
            "DILOCO_WORKER_IMAGE": "example.org/worker:1",
            "DILOCO_SYNCER_IMAGE": "example.org/syncer:1",
            "DILOCO_HEALTH_PORT": str(self.health_port),
            "DILOCO_METRICS_PORT": str(self.metrics_port),
            "DILOCO_RESYNC_SECONDS": "1",
            **env,
        }

    def __enter__(self) -> OperatorProcess:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diloco_operator"], env=self._env, stderr=log, stdout=log
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(DEADLINE_SECONDS)

    def get(self, path: str, port: int = 0) -> tuple[int, str]:
        """Status (0: nothing listens) and text of the health endpoint, or of another port."""
        try:
            url = f"http://127.0.0.1:{port or self.health_port}{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def until_ready(self) -> OperatorProcess:
        until(lambda: self.process.poll() is not None or self.get("/readyz")[0] == 200, "ready")
        assert self.process.poll() is None, self.log.read_text()
        return self

    def lines(self) -> list[dict[str, Any]]:
        """The log, each line as JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
