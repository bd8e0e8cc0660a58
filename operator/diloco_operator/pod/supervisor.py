"""
One container's loop: asks the world for facts, hands them to the policy, carries out what it says.

It wakes up when the child dies or a signal comes, and twice a second. It never waits for the child.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from diloco import health
from diloco_operator.local.children import Children, Command
from diloco_operator.pod import policy as p
from diloco_operator.pod.probes import PROBES, Answer, Facts
from diloco_operator.pod.server import Server
from diloco_operator.pod.settings import Settings

log = logging.getLogger("diloco.pod")

TURN_SECONDS = 0.5

MOST_BYTES = 4000
"""Of the termination log; the kubelet keeps 4096, and half a JSON object says nothing."""


class Supervisor:
    """
    Keeps one child running; `run` returns the container's exit code when no child is left.

    Raises:
        ConfigError: the port of the probes cannot be had.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lives = None if settings.state is None else settings.state / "lives.json"
        lives, faults = _read_lives(self._lives)
        self._policy = p.Policy(
            role=settings.role, name=settings.name, limits=settings.limits, lives=lives,
            faults=faults,
        )  # fmt: skip
        self._stops = 0
        self._end: p.End | None = None
        self._facts = self._look(time.monotonic())
        self._server = Server(settings.health_port, self._answer)
        self._children = Children()

    def run(self) -> int:
        """Run until told to stop, or given up. Call it from the main thread."""
        log.info("probes are answered on port %d", self._server.port)
        # Signals first: one that comes before its handler is lost on a container's first process.
        with _wakeups(self._on_stop) as sleep:
            try:
                if self._settings.kernels is not None:
                    _bring_kernels(*self._settings.kernels)
                while self._end is None:
                    self._turn()
                    if self._end is None:
                        sleep(self._rest_seconds())
            finally:
                self._children.close()
                self._settings.health_file.unlink(missing_ok=True)
        return self._end.code

    def _turn(self) -> None:
        for event in self._events():
            for decision in self._policy.handle(event, time.monotonic()):
                self._carry_out(decision)
        self._children.bury_strangers()
        self._facts = self._look(time.monotonic())

    def _events(self) -> Iterator[p.Event]:
        for death in self._children.deaths():
            log.info("%s ended with %d: %s", self._settings.name, death.code, death.last_line)
            yield p.Ended(code=death.code, last_line=_plain(death.last_line))
        if self._facts.health is not None and self._facts.health.ready:
            yield p.Ready()
        if self._stops:
            yield p.Stop()
        yield p.Tick()

    def _carry_out(self, decision: p.Decision) -> None:
        match decision:
            case p.Start():
                self._start(decision.restarts)
            case p.Terminate():
                self._children.terminate("main")
            case p.Kill():
                log.warning("%s did not leave in time and is killed", self._settings.name)
                self._children.kill("main")
            case p.End():
                self._end = decision
                if decision.reason:
                    log.error("%s: %s", decision.reason, decision.message)
                    leave_message(self._settings.termination_log, decision.reason, decision.message)

    def _start(self, restarts: int) -> None:
        # What an earlier life said is not true of this one.
        self._settings.health_file.unlink(missing_ok=True)
        self._write_lives()
        command = Command(
            name="main",
            argv=self._settings.argv,
            environment={**self._settings.environment, "DILOCO_RESTARTS": str(restarts)},
            directory=Path.cwd(),
            log=None,
        )
        pid = self._children.start(command)
        log.info("%s is started, pid %s, restarts %d", self._settings.name, pid, restarts)

    def _write_lives(self) -> None:
        if self._lives is None:
            return
        text = json.dumps({"lives": self._policy.lives, "faults": self._policy.faults})
        temporary = self._lives.with_suffix(".tmp")
        try:
            temporary.write_text(text)
            os.replace(temporary, self._lives)
        except OSError as error:
            log.warning("%s: %s; restarts are counted from 0 again", self._lives, error.strerror)

    # ------------------------------------------------------------------------------ probes

    def _look(self, now: float) -> Facts:
        policy = self._policy
        running = policy.state in (p.State.RUNNING, p.State.LEAVING)
        return Facts(
            role=policy.role,
            rank=self._settings.rank,
            state=policy.state,
            why=policy.why,
            died=policy.died,
            started_at=policy.started_at,
            health=health.read(self._settings.health_file) if running else None,
            turned_at=now,
            stuck_seconds=self._settings.stuck_seconds,
        )

    def _answer(self, path: str) -> Answer | None:
        probe = PROBES.get(path)
        return probe(self._facts, time.monotonic()) if probe is not None else None

    # ------------------------------------------------------------------------------ time

    def _rest_seconds(self) -> float:
        wake_at = self._policy.wake_at()
        if wake_at is None:
            return TURN_SECONDS
        return min(TURN_SECONDS, max(0.0, wake_at - time.monotonic()))

    def _on_stop(self) -> None:
        self._stops += 1


def leave_message(path: Path, reason: str, message: str) -> None:
    """Say in the pod's status why the container ended."""
    try:
        path.write_bytes(_last_words(reason, message))
    except OSError as error:
        log.warning("%s: %s; the reason stands in the log only", path, error.strerror)


def _last_words(reason: str, message: str) -> bytes:
    """What goes into the termination log: whole JSON, the message cut at its end where it must."""
    message = message[:MOST_BYTES]
    while True:
        said = json.dumps({"reason": reason, "message": message}, ensure_ascii=False)
        data = said.encode(errors="replace")  # a line of the child may hold lone surrogates
        beyond = len(data) - MOST_BYTES
        if beyond <= 0 or not message:
            return data
        # A character takes at most six bytes, as an escape.
        message = message[: -max(1, beyond // 6)]


def _plain(line: str) -> str:
    """What a line says, also where it is a JSON record."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("message"), str):
            return str(record["message"])
    return line


def _read_lives(path: Path | None) -> tuple[int, int]:
    """Lives and faults of the child in earlier lives of this container."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            found = json.loads(path.read_text())
            return int(found["lives"]), int(found["faults"])
    return 0, 0


def _bring_kernels(source: Path, target: Path) -> None:
    """
    Copy what the image compiled ahead to where kernels are looked for, unless some are there.

    numba's index names sources by their time and size, so times are kept.
    """
    try:
        if source.is_dir() and not (target.is_dir() and any(target.iterdir())):
            shutil.copytree(source, target, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        log.warning("compiled kernels stay in the image, they are compiled again: %s", error)


@contextlib.contextmanager
def _wakeups(on_stop: Callable[[], None]) -> Iterator[Callable[[float], None]]:
    """Gives a sleep that ends early when a child dies or somebody wants us to stop."""
    hears, tells = socket.socketpair()
    for end in (hears, tells):
        end.setblocking(False)

    def sleep(seconds: float) -> None:
        select.select([hears], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            hears.recv(4096)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            on_stop()

    fd_before = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield sleep
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(fd_before)
        hears.close()
        tells.close()
