"""The agent without a container: a real supervisor with a small script as its process."""

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

from diloco_testing.local.fake_run import until

CHILD = """
import os, signal, sys, time
from pathlib import Path
from diloco.runtime.health import Health, HealthFile

def leave(*_):
    print("left", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
print("start", os.getpid(), os.environ["DILOCO_RESTARTS"], flush=True)
file = HealthFile(Path(os.environ["DILOCO_HEALTH_FILE"]))
while True:
    now = time.monotonic()
    file.write(Health(at=now, ready=True, why="working", progress_at=now))
    time.sleep(0.05)
"""
"""Prints its pid and its restart count, reports health, and exits on SIGTERM."""


class Pod:
    """
    Use as a context manager; it leaves no process behind.

    Args:
        folder: its state, and its other files.
        argv: the process; a string is the source of a Python script.
        role: learner, syncer or evaluator.
        environment: in addition to that of every pod.
        wrapped: a command that starts the agent's.
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
            *wrapped, sys.executable, "-m", "diloco_agent", role, "--", *program,
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
        """Kill it and its process."""
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
        """Output of the agent and its processes, of all containers."""
        return "\n".join(self._output)

    @property
    def starts(self) -> list[tuple[int, int]]:
        """(pid, restart count) of every start of CHILD."""
        return [
            (int(pid), int(n)) for pid, n in re.findall(r"^start (\d+) (\d+)$", self.output, re.M)
        ]

    def pid(self, number: int) -> int:
        """Pid of the process after its start `number`, from 0; waits for it."""
        starts = until(lambda: len(self.starts) > number and self.starts, f"start {number}")
        return int(starts[number][0])

    @property
    def port(self) -> int:
        """Port of the probes of the latest container."""
        found = until(
            lambda: re.findall(r"serving probes on port (\d+)", self.output), "port of the probes"
        )
        return int(found[-1])

    def ask(self, path: str) -> tuple[int, str]:
        """The answer to a probe: status code and message."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=10
            ) as answer:
                return int(answer.status), answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode().strip()

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, after it exited and its output was read."""
        code = self.process.wait(60)
        self._reader.join()
        return code

    @property
    def termination_message(self) -> dict[str, Any]:
        """The termination log."""
        return dict(json.loads(self.termination_log.read_text()))
