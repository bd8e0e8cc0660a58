"""
The link process as its parent sees it: started, spoken to, started again when it dies, never waited
for.
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
from diloco_worker.pipe import Pipe
from diloco_worker.shared import Shared

log = logging.getLogger(__name__)

RESTART_SECONDS = (0.5, 30.0)
"""First and longest pause before a dead link is started again."""

HEALTHY_SECONDS = 60.0
"""A link that lived so long is started again after the first pause."""

LEAVE_SECONDS = 5.0
"""How long a link may take to say goodbye."""


class LinkProcess:
    """
    One link after the other on the same shared memory.

    Args:
        shared: the memory; stays whatever happens to a link.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._pause = RESTART_SECONDS[0]
        self._restart_at = 0.0
        self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        """Of the link that lives now."""
        return self._process.pid if self._process is not None else None

    def ensure(self, state: TrainerState, *, now: float) -> None:
        """
        Start a link if there is none and its pause is over; `state` is the first thing it hears.
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
        """Tell the link, without waiting."""
        if self._pipe is not None:
            self._pipe.offer(state.to_line())

    def newest(self, *, now: float) -> LinkState | None:
        """What the link said last, if it said anything since; notices its death."""
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
        """Until the link says something; for when there is nothing else to do."""
        if self._pipe is None:
            time.sleep(min(timeout_seconds, max(0.01, self._restart_at - time.monotonic())))
            return
        self._pipe.flush()
        self._pipe.wait(timeout_seconds)

    def leave(self, state: TrainerState) -> None:
        """Let the link say goodbye and end; cut it when that takes too long."""
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
            "the link process %s; starting another in %.1f s, training goes on", how, self._pause
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
