"""
The link process as seen by its parent: started, restarted when it dies, never waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time

from diloco_worker.core.messages import LinkState, TrainerState
from diloco_worker.ipc.pipe import Pipe
from diloco_worker.ipc.shared_memory import SharedMemory

log = logging.getLogger(__name__)

RESTART_SECONDS = (0.5, 30.0)
"""First and longest pause before a link that died is restarted."""

HEALTHY_SECONDS = 60.0
"""After a link has run this long, the next pause is the first one again."""

LEAVE_SECONDS = 5.0
"""Timeout for a link to leave the job."""


class LinkProcess:
    """
    Runs one link after the other on the same shared memory.

    Args:
        shared: the memory; it outlives every link.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._pause = RESTART_SECONDS[0]
        self._restart_at = 0.0
        self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        """Process ID of the running link; None: there is none."""
        return self._process.pid if self._process is not None else None

    def ensure(self, state: TrainerState, *, now: float) -> None:
        """
        Start a link if none is running and the pause is over; its first message is `state`.
        """
        if self._process is not None or now < self._restart_at:
            return
        ours, theirs = socket.socketpair()
        command = [
            sys.executable, "-P", "-m", "diloco_worker.link", "--memory", str(self._shared.fd),
            "--socket", str(theirs.fileno()), "--parent", str(os.getpid()),
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter and module
                command, pass_fds=(self._shared.fd, theirs.fileno()), stdin=subprocess.DEVNULL
            )
        except OSError as error:
            ours.close()
            self._died(f"could not be started: {error}", now)
            return
        finally:
            theirs.close()
        self._pipe = Pipe(ours)
        self._started_at = now
        self._pipe.offer(state.to_line())

    def offer(self, state: TrainerState) -> None:
        """Send the state to the link, without waiting."""
        if self._pipe is not None:
            self._pipe.offer(state.to_line())

    def newest(self, *, now: float) -> LinkState | None:
        """The newest state of the link, None if there is no new one; notices the death of the link."""
        if self._pipe is None:
            return None
        self._pipe.flush()
        try:
            line = self._pipe.newest()
        except EOFError:
            self._died("died", now)
            return None
        return LinkState.from_line(line) if line is not None else None

    def wait(self, timeout_seconds: float) -> None:
        """Block until the link sends a state, or until the timeout."""
        if self._pipe is None:
            time.sleep(min(timeout_seconds, max(0.01, self._restart_at - time.monotonic())))
            return
        self._pipe.flush()
        self._pipe.wait(timeout_seconds)

    def leave(self, state: TrainerState) -> None:
        """Let the link leave the job and end; kill it after the timeout."""
        deadline = time.monotonic() + LEAVE_SECONDS
        if self._pipe is not None:
            self._pipe.offer(state.to_line())
            while not self._pipe.flush() and time.monotonic() < deadline:
                time.sleep(0.01)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
        self._end()

    def _died(self, how: str, now: float) -> None:
        self._end()
        if now - self._started_at > HEALTHY_SECONDS:
            self._pause = RESTART_SECONDS[0]
        self._restart_at = now + self._pause
        log.warning(
            "the link process %s; restarting it in %.1f s, training continues", how, self._pause
        )
        self._pause = min(2 * self._pause, RESTART_SECONDS[1])

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
