"""A container's first process without a container: a real supervisor and a small script as its child."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from diloco_testing.fake_run import until

CHILD = """
import os, signal, sys, time
from pathlib import Path
from diloco.health import Health, HealthFile

def leave(*_):
    print("left", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
print("life", os.getpid(), os.environ["DILOCO_RESTARTS"], flush=True)
file = HealthFile(Path(os.environ["DILOCO_HEALTH_FILE"]))
while True:
    now = time.monotonic()
    file.write(Health(at=now, ready=True, why="working", progress_at=now))
    time.sleep(0.05)
"""
"""Prints its pid and its count of restarts, is healthy, leaves when told."""


class Pod:
    """
    Use as a context manager; nobody it started is left behind.

    Args:
        folder: its state, and its other files.
        argv: the child; a Python script of this source where it is one string.
        role: learner, syncer or evaluator.
        environment: besides what every pod gets.
        wrapped: words before the supervisor's own.
    """

    def __init__(
        self, folder: Path, argv: str | tuple[str, ...] = CHILD, *, role: str = "learner",
        environment: dict[str, str] | None = None, wrapped: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.folder = folder
        self.termination_log = folder / "termination-log"
        program = ("python", "-c", argv) if isinstance(argv, str) else argv
        self._state = folder / "state"
        self._state.mkdir(exist_ok=True)
        self._command = (
            *wrapped, sys.executable, "-m", "diloco_operator.pod", role, "--", *program,
        )  # fmt: skip
        self._environment = {
            **os.environ,
            "DILOCO_JOB": "j", "DILOCO_REGION": "eu", "DILOCO_POD": "j-eu-0",
            "DILOCO_STATE": str(self._state), "DILOCO_HEALTH_PORT": "0",
            "DILOCO_TERMINATION_LOG": str(self.termination_log), "TMPDIR": str(folder),
            **(environment or {}),
        }  # fmt: skip
        self._output: list[str] = []

    def __enter__(self) -> Pod:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Kill it; its child goes with it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def start(self) -> None:
        """Start the supervisor, as a new container of the same pod would."""
        self.process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._output.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        """All that it and its children printed, of all its containers."""
        return "\n".join(self._output)

    @property
    def lives(self) -> list[tuple[int, int]]:
        """(pid, count of restarts) of every life of CHILD."""
        return [
            (int(pid), int(n)) for pid, n in re.findall(r"^life (\d+) (\d+)$", self.output, re.M)
        ]

    def life(self, number: int) -> int:
        """Pid of a life, the first is 0; waits for it."""
        lives = until(lambda: len(self.lives) > number and self.lives, f"life {number}")
        return int(lives[number][0])

    @property
    def port(self) -> int:
        """Of the probes of the newest container."""
        found = until(
            lambda: re.findall(r"answered on port (\d+)", self.output), "port of the probes"
        )
        return int(found[-1])

    def ask(self, path: str) -> tuple[int, str]:
        """What a probe is told: code and sentence."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as said:
                return int(said.status), said.read().decode().strip()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode().strip()

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it ended and its output was read."""
        code = self.process.wait(60)
        self._reader.join()
        return code

    @property
    def last_words(self) -> dict[str, Any]:
        """The termination log."""
        return dict(json.loads(self.termination_log.read_text()))
