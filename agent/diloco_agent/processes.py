"""
The processes of one supervisor: started, watched, signalled and never left behind.

Every process has its own process group, writes to a log file or to our output, and reads nothing.
A guard (`process_guard.py`) kills it when the supervisor ends, however that happens. Only the main
thread starts processes: the kernel's parent-death signal is bound to the thread that forks.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco_agent import process_guard
from diloco_agent.causes import cause_of, code_of
from diloco_agent.output import Log, Stream, last_lines, open_private

_CANNOT_START = 126
_GUARD_SECONDS = 1.0
"""Between two replacements of a guard while nothing else is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start one process."""

    name: str
    argv: tuple[str, ...]
    """The program is searched on the PATH of `environment`."""
    environment: Mapping[str, str]
    """Complete; nothing is inherited."""
    directory: Path
    """Working directory."""
    log: Path | None
    """Standard output and error are appended here; None: they go to our standard output."""
    output: Path | None = None
    """Standard output goes to this file instead and replaces its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """A process that exited."""

    name: str
    code: int
    """Exit code (`causes.code_of`); minus the signal's number when a signal ended it."""
    last_lines: tuple[str, ...]
    """Last lines that this run wrote to its log; () when it wrote none."""
    cause: str
    """The line that states why it ended, usually the last; "": there is none."""


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    mark: str
    output: Log | Stream


class Processes:
    """All processes of this supervisor; `close` leaves none."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._processes: dict[str, _Process] = {}
        self._not_started: list[ProcessExit] = []
        self._starts = 0
        self._next_guard = -math.inf
        """When the guard may be replaced, monotonic."""
        self._guard = self._start_guard()

    def start(self, command: Command) -> int | None:
        """
        Start a process; no other process of this name may be running.

        Returns:
            Its pid, which is also its process group. None if the system did not start it:
            `exits` then returns the reason.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{command.name} was started from a thread; it would be killed with that thread"
            )
        if command.name in self._processes:
            raise RuntimeError(f"{command.name} is running with pid {self.pid(command.name)}")
        self._keep_guard()
        self._starts += 1
        mark = f"{self._mark}:{command.name}:{self._starts}:"
        argv = (*_guard_command("run", str(os.getpid())), *command.argv)
        try:
            with contextlib.ExitStack() as files:
                output = Log(command.log) if command.log is not None else Stream()
                stderr = files.enter_context(output.open())
                stdout = (
                    files.enter_context(open_private(command.output)) if command.output else stderr
                )
                popen = subprocess.Popen(  # noqa: S603
                    argv,
                    env={**command.environment, process_guard.MARK_VARIABLE: mark},
                    cwd=command.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    process_group=0,
                )
        except (OSError, ValueError) as error:  # ValueError: no process can have these arguments
            about = getattr(error, "filename", None) or command.argv[0]
            reason = f"{about}: {getattr(error, 'strerror', None) or error}"
            self._not_started.append(
                ProcessExit(
                    name=command.name, code=_CANNOT_START, last_lines=(reason,), cause=reason
                )
            )
            return None
        self._processes[command.name] = _Process(popen, mark, output)
        return popen.pid

    def exits(self) -> list[ProcessExit]:
        """Processes that exited since the last call; their helpers are gone too."""
        exits, self._not_started = self._not_started, []
        for name, process in list(self._processes.items()):
            code = process.popen.poll()
            if code is not None:
                self._kill_group(process)
                del self._processes[name]
                tail = process.output.tail()
                exits.append(
                    ProcessExit(
                        name=name,
                        code=code_of(tail, code),
                        last_lines=last_lines(tail),
                        cause=cause_of(tail),
                    )
                )
        return exits

    def limit_logs(self) -> None:
        """Keep the log files below their limit; call it often."""
        for process in self._processes.values():
            process.output.limit()

    def reap_orphans(self) -> None:
        """
        Reap orphans that the kernel reparented to this process.

        It does so for the first process of a container; each helper that outlived its parent would
        otherwise remain a zombie.
        """
        # waitid would always find a guard that was killed and not polled, and no orphan after it.
        if self._guard.poll() is not None and time.monotonic() >= self._next_guard:
            with contextlib.suppress(OSError):
                self._keep_guard()
        ours = {process.popen.pid for process in self._processes.values()} | {self._guard.pid}
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, options)) and found.si_pid not in ours:
                os.waitpid(found.si_pid, 0)

    def pid(self, name: str) -> int | None:
        """Pid of a running process; None when it does not run."""
        process = self._processes.get(name)
        return process.popen.pid if process else None

    def terminate(self, name: str) -> None:
        """Send SIGTERM to the process, not to its helpers: it ends those itself."""
        if process := self._processes.get(name):
            process.popen.terminate()

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process and all of its helpers."""
        if process := self._processes.get(name):
            self._kill_group(process)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal that ends nothing, such as SIGSTOP, to the process and all of its helpers."""
        if process := self._processes.get(name):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.popen.pid, number)
            for pid in process_guard.marked(process.mark):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def close(self) -> None:
        """Kill and reap all processes, the guard last."""
        for process in self._processes.values():
            self._kill_group(process)
        for process in self._processes.values():
            process.popen.wait()
        self._processes.clear()
        self._end_guard()

    def _keep_guard(self) -> None:
        """Replace the guard if it was killed."""
        if self._guard.poll() is not None:
            self._next_guard = time.monotonic() + _GUARD_SECONDS
            self._end_guard()
            self._guard = self._start_guard()

    def _end_guard(self) -> None:
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()

    def _kill_group(self, process: _Process) -> None:
        # Safe after the leader was reaped: the kernel does not reuse a pid that soon.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process_guard.kill_marked(process.mark)

    def _start_guard(self) -> subprocess.Popen[bytes]:
        # Its own session: neither Ctrl-C nor the kill of a process group reaches the guard.
        return subprocess.Popen(  # noqa: S603
            _guard_command("guard", self._mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )


def _guard_command(*arguments: str) -> tuple[str, ...]:
    # Isolated and without site-packages: starts in milliseconds and runs none of the user's code.
    return (sys.executable, "-I", "-S", process_guard.__file__, *arguments)
