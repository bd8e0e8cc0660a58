"""
The processes of one supervisor: started, watched, signalled and never left behind.

Every child has a process group of its own and a log file, or our own output; it reads nothing, and is on a leash
(`leash.py`): it is gone when the supervisor is gone, however that one died. Only the main thread
starts children: the kernel's parent-death signal follows the thread that made them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco_operator.local import leash
from diloco_operator.local.output import Log, Stream

_CANNOT_START = 126


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What one process is started with."""

    name: str
    argv: tuple[str, ...]
    """Its first word is looked for on the PATH of `environment`."""
    environment: Mapping[str, str]
    """All of it."""
    directory: Path
    """Working directory."""
    log: Path | None
    """Standard output and error are appended here; None: they go where ours goes."""
    output: Path | None = None
    """Standard output goes here instead; what was there is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A child that ended."""

    name: str
    code: int
    """Exit code; minus the signal's number when a signal ended it."""
    last_line: str
    """Last line that this life wrote to its log; "" when it wrote none."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    mark: str
    said: Log | Stream


class Children:
    """All children of this process; `close` leaves none."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._children: dict[str, _Child] = {}
        self._unborn: list[Death] = []
        self._lives = 0
        self._guard = self._start_guard()

    def start(self, command: Command) -> int | None:
        """
        Start a process; one of the same name must not be alive.

        Returns:
            Its pid, which is also its process group. None when the system refused to start it:
            `deaths` then tells why.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{command.name} was started from a thread; it would die with that thread"
            )
        if command.name in self._children:
            raise RuntimeError(f"{command.name} is alive with pid {self.pid(command.name)}")
        if self._guard.poll() is not None:
            self._end_guard()
            self._guard = self._start_guard()
        self._lives += 1
        mark = f"{self._mark}:{command.name}:{self._lives}:"
        leashed = (*_leash("run", str(os.getpid())), *command.argv)
        try:
            with contextlib.ExitStack() as files:
                said = Log(command.log) if command.log is not None else Stream()
                log = files.enter_context(said.open())
                output = files.enter_context(command.output.open("wb")) if command.output else log
                process = subprocess.Popen(  # noqa: S603
                    leashed,
                    env={**command.environment, leash.MARK_VARIABLE: mark},
                    cwd=command.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=log,
                    process_group=0,
                )
        except OSError as error:
            why = f"{error.filename or command.argv[0]}: {error.strerror}"
            self._unborn.append(Death(name=command.name, code=_CANNOT_START, last_line=why))
            return None
        self._children[command.name] = _Child(process, mark, said)
        return process.pid

    def deaths(self) -> list[Death]:
        """Children that ended since the last call; their helpers are gone too."""
        dead, self._unborn = self._unborn, []
        for name, child in list(self._children.items()):
            code = child.process.poll()
            if code is not None:
                self._kill_all_of(child)
                del self._children[name]
                dead.append(Death(name=name, code=code, last_line=child.said.last_line()))
        return dead

    def bury_strangers(self) -> None:
        """
        Reap orphans that the system handed to this process, as it does to the first process of a
        container; otherwise each helper that outlived its parent would stay as a zombie.
        """
        ours = {child.process.pid for child in self._children.values()} | {self._guard.pid}
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, options)) and found.si_pid not in ours:
                os.waitpid(found.si_pid, 0)

    def pid(self, name: str) -> int | None:
        """Pid of a living child."""
        child = self._children.get(name)
        return child.process.pid if child else None

    def terminate(self, name: str) -> None:
        """Ask the process to leave. Its helpers are not told: they are its own to end."""
        if child := self._children.get(name):
            child.process.terminate()

    def kill(self, name: str) -> None:
        """End the process and all its helpers at once."""
        if child := self._children.get(name):
            self._kill_all_of(child)

    def close(self) -> None:
        """Kill and reap whatever is left, the guard last."""
        for child in self._children.values():
            self._kill_all_of(child)
        for child in self._children.values():
            child.process.wait()
        self._children.clear()
        self._end_guard()

    def _end_guard(self) -> None:
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()

    def _kill_all_of(self, child: _Child) -> None:
        # Right after the leader was reaped its number is still the group's: pids are dealt in turn.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        leash.kill_marked(child.mark)

    def _start_guard(self) -> subprocess.Popen[bytes]:
        # A session of its own: no Ctrl-C and no killed process group takes the guard along.
        return subprocess.Popen(  # noqa: S603
            _leash("guard", self._mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )


def _leash(*words: str) -> tuple[str, ...]:
    # Isolated and without site-packages: a few milliseconds, and nothing of the user's is run.
    return (sys.executable, "-I", "-S", leash.__file__, *words)
