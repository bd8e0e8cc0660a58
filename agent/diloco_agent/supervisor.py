"""
The loop of the agent: collects events, passes them to the policy and carries out its decisions.

It wakes up when the process exits, when a signal arrives, and twice a second; it never blocks on the
process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from diloco.runtime import files, health, untrusted_json
from diloco.runtime.signals import handled
from diloco_agent import policy as p
from diloco_agent.probe_server import Server
from diloco_agent.probes import PROBES, ProcessFacts, Reply
from diloco_agent.processes import Command, Processes
from diloco_agent.rank_zero import PATH, RankZero
from diloco_agent.settings import Settings
from diloco_agent.unit import Follower, Leader, Report, Unit

log = logging.getLogger("diloco.agent")

POLL_SECONDS = 0.5

MAX_MESSAGE_BYTES = 4000
"""Of the termination log: the kubelet keeps 4096 bytes, and a truncated JSON object is useless."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

MAX_LINE = 300
"""Characters of a line of the log in it."""


class Supervisor:
    """
    Keeps one process running; `run` returns the container's exit code.

    Raises:
        ConfigError: the port of the probes is not available.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._counts = None if settings.state is None else settings.state / "lives.json"
        self._marker = None if settings.state is None else settings.state / "running.json"
        """There while the container runs: one that is killed leaves it."""
        counts = _read_counts(self._counts, settings.pod_uid)
        died = not counts.ended and _was_killed(
            self._marker, settings.pod_uid, _boot_id(), counts.starts
        )
        self._unit = _unit(settings)
        self._policy = p.Policy(
            role=settings.role, name=settings.name, limits=settings.limits, unit=self._unit,
            starts=counts.starts, crashes=counts.crashes, joined=counts.joined,
        )  # fmt: skip
        self._reports: dict[int, tuple[Report, float]] = {}
        """Newest report of each other rank that rank 0 has not read yet."""
        self._rank_zero: RankZero | None = None
        self._stops = 0
        self._exit: p.ExitContainer | None = None
        self._log: tuple[str, ...] = ()
        """Last lines of the last process that exited."""
        self._problem = ""
        """What was last logged to be wrong with the work of the program."""
        self._facts = self._observe(time.monotonic())
        self._server = Server(settings.health_port, self._answer)
        self._processes = Processes()
        if died:
            log.warning("the container before this one was killed, for example by the OOM killer")
            for decision in self._policy.handle(p.Died(), time.monotonic()):
                self._carry_out(decision)

    def run(self) -> int:
        """Run until the policy exits the container. Call it from the main thread."""
        log.info("serving probes on port %d", self._server.port)
        if isinstance(self._unit, Follower):
            self._rank_zero = RankZero(self._settings.rank_zero, self._unit.report)
        # Signals first: the first process of a container loses those without a handler.
        with _wakeups(self._on_stop) as sleep:
            try:
                if self._settings.kernels is not None:
                    _copy_kernels(*self._settings.kernels)
                while self._exit is None:
                    self._turn()
                    if self._exit is None:
                        sleep(self._sleep_seconds())
            finally:
                self._processes.close()
                self._settings.health_file.unlink(missing_ok=True)
        return self._exit.code

    def _turn(self) -> None:
        self._receive()
        joined = self._policy.joined
        for event in self._events():
            for decision in self._policy.handle(event, time.monotonic()):
                self._carry_out(decision)
        if self._policy.joined and not joined and self._exit is None:
            self._write_counts()
        self._send_report()
        self._processes.reap_orphans()
        self._facts = self._observe(time.monotonic())
        self._report_problem()

    def _events(self) -> Iterator[p.Event]:
        for done in self._processes.exits():
            log.info("%s exited with %d: %s", self._settings.name, done.code, done.cause)
            self._log = tuple(map(_message_of, done.last_lines))
            last = health.read(self._settings.health_file)
            if last is not None and last.joined:
                yield p.Ready()  # it may have been, since the last turn
            yield p.Exited(
                code=done.code,
                last_line=_message_of(done.cause),
                left=last.left if last is not None else "",
            )
        if self._facts.health is not None and self._facts.health.ready:
            yield p.Ready()
        if self._stops:
            yield p.StopRequested()
        yield p.Tick()

    def _carry_out(self, decision: p.Decision) -> None:
        match decision:
            case p.Start():
                self._start(decision.restarts)
            case p.Terminate():
                self._processes.terminate("main")
            case p.Kill():
                log.warning("%s did not exit in time; sending SIGKILL", self._settings.name)
                self._processes.kill("main")
            case p.ExitContainer():
                self._exit = decision
                if decision.reason:
                    log.error("%s: %s", decision.reason, decision.message)
                    write_termination_message(
                        self._settings.termination_log,
                        decision.reason,
                        decision.message,
                        lines=_before(decision.message, self._log),
                    )
                # Last: a disk that hangs must not keep the message back.
                self._write_counts(ended=True)
                self._remove_marker()

    def _start(self, restarts: int) -> None:
        # A report of an earlier run does not apply to this one.
        self._settings.health_file.unlink(missing_ok=True)
        self._write_counts()
        self._write_marker()
        command = Command(
            name="main",
            argv=self._settings.argv,
            environment={**self._settings.environment, "DILOCO_RESTARTS": str(restarts)},
            directory=Path.cwd(),
            log=None,
        )
        pid = self._processes.start(command)
        log.info("started %s, pid %s, restarts %d", self._settings.name, pid, restarts)

    def _write_counts(self, *, ended: bool = False) -> None:
        if self._counts is None:
            return
        counts = {
            "lives": self._policy.starts,
            "faults": self._policy.crashes,
            "joined": self._policy.joined,
            "ended": ended,
        }
        text = json.dumps({**counts, "pod": self._settings.pod_uid})
        try:
            files.replace(self._counts, text, mode=files.PRIVATE)
        except OSError as error:
            log.warning(
                "%s: %s; the next container counts restarts from 0", self._counts, error.strerror
            )

    def _write_marker(self) -> None:
        if self._marker is None:
            return
        own = {"pod": self._settings.pod_uid, "boot": _boot_id(), "lives": self._policy.starts}
        text = json.dumps(own)
        try:
            files.replace(self._marker, text, mode=files.PRIVATE)
        except OSError as error:
            log.warning(
                "%s: %s; a kill of this container does not count", self._marker, error.strerror
            )

    def _remove_marker(self) -> None:
        """This container reaches its end. Unlike a new content, a removal needs no space on the disk."""
        if self._marker is None:
            return
        try:
            self._marker.unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "%s: %s; the next container counts this end as a kill", self._marker, error.strerror
            )

    # ------------------------------------------------------------------------------ other pods

    def _receive(self) -> None:
        """Pass on what the other pods of the learner reported."""
        if isinstance(self._unit, Leader):
            for rank in list(self._reports):
                self._unit.receive_report(*self._reports.pop(rank))
        elif isinstance(self._unit, Follower) and self._rank_zero is not None:
            reply = self._rank_zero.reply
            if reply is not None:
                self._unit.receive_order(*reply)

    def _send_report(self) -> None:
        if isinstance(self._unit, Follower) and self._rank_zero is not None:
            self._unit.ready_to_start = self._policy.waits
            self._rank_zero.update(self._unit.report)

    def _on_report(self, query: str) -> Reply | None:
        """Rank 0's reply to the report of another rank. Called from other threads."""
        if not isinstance(self._unit, Leader):
            return None
        try:
            report = Report.of(untrusted_json.parse(unquote(query)))
        except (ValueError, TypeError, KeyError):
            return Reply(ok=False, message="not a report")
        if not 0 < report.rank < self._settings.num_ranks:
            return Reply(ok=False, message=f"the learner has no rank {report.rank}")
        self._reports[report.rank] = (report, time.monotonic())
        return Reply(ok=True, message=json.dumps(self._unit.order(report.rank).to_json()))

    # ------------------------------------------------------------------------------ probes

    def _observe(self, now: float) -> ProcessFacts:
        policy = self._policy
        running = policy.state in (p.State.RUNNING, p.State.RESTARTING, p.State.TERMINATING)
        return ProcessFacts(
            role=policy.role,
            rank=self._settings.rank,
            state=policy.state,
            message=policy.message,
            exited=policy.exited,
            started_at=policy.started_at,
            health=health.read(self._settings.health_file) if running else None,
            looped_at=now,
            stuck_seconds=self._settings.stuck_seconds,
            waits=policy.waits,
        )

    def _answer(self, path: str, query: str) -> Reply | None:
        if path == PATH:
            return self._on_report(query)
        probe = PROBES.get(path)
        return probe(self._facts, time.monotonic()) if probe is not None else None

    def _report_problem(self) -> None:
        """Log what is wrong with the work of the program, when that changes."""
        found = self._facts.health
        problem = found.problem if found is not None else ""
        if found is not None and problem and problem != self._problem:
            log.warning("%s: %s: %s", self._settings.name, problem, found.why)
        self._problem = problem

    # ------------------------------------------------------------------------------ time

    def _sleep_seconds(self) -> float:
        wake_at = self._policy.wake_at()
        if wake_at is None:
            return POLL_SECONDS
        return min(POLL_SECONDS, max(0.0, wake_at - time.monotonic()))

    def _on_stop(self) -> None:
        self._stops += 1


def _unit(settings: Settings) -> Unit | None:
    if settings.num_ranks == 1:
        return None
    boot = secrets.token_hex(8)
    if settings.rank:
        return Follower(boot=boot, rank=settings.rank)
    return Leader(boot=boot, size=settings.num_ranks)


def write_termination_message(
    path: Path, reason: str, message: str, *, lines: Sequence[str] = ()
) -> None:
    """Report in the pod's status why the container exited; `lines`: of its log before the message."""
    try:
        path.write_bytes(_termination_message(reason, message, lines))
    except OSError as error:
        log.warning("%s: %s; the reason is in the log only", path, error.strerror)


def _termination_message(reason: str, message: str, lines: Sequence[str]) -> bytes:
    """
    Content of the termination log: complete JSON.

    What is too long loses the first lines of the log, then the end of the message.
    """
    message, log = message[:MAX_MESSAGE_BYTES], [line[:MAX_LINE] for line in lines]
    while True:
        written = {"reason": reason, "message": message, **({"log": log} if log else {})}
        # Output may contain lone surrogates.
        data = json.dumps(written, ensure_ascii=False).encode(errors="replace")
        excess = len(data) - MAX_MESSAGE_BYTES
        if excess <= 0 or not (message or log):
            return data
        if log:
            log = log[1:]
            continue
        # A character takes at most six bytes, as an escape.
        message = message[: -max(1, excess // 6)]


def _before(message: str, log: tuple[str, ...]) -> tuple[str, ...]:
    """The lines without the last one, if that and the message state the same."""
    same = bool(log and message) and (log[-1] in message or message in log[-1])
    return log[:-1] if same else log


def _message_of(line: str) -> str:
    """The message of a log line, which may be a JSON record."""
    with contextlib.suppress(ValueError):
        record = untrusted_json.parse(line, finite=False)
        if isinstance(record, dict) and isinstance(record.get("message"), str):
            return str(record["message"])
    return line


def _boot_id() -> str:
    """The random name of this boot of the node; "": not known."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What earlier containers left."""

    starts: int = 0
    """Of the process."""
    crashes: int = 0
    """In containers of this pod."""
    joined: bool = False
    """It joined the job in a container of this pod."""
    ended: bool = False
    """The last container of this pod reached its end, and counted it."""


def _read_counts(path: Path | None, pod_uid: str) -> Counts:
    """What earlier containers left; zeros if they left nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if path is not None:
            counts = untrusted_json.parse(files.read(path))
            # The volume may be one that outlives the pod, and each pod has its own budget of crashes.
            is_own = counts.get("pod", "") == pod_uid
            return Counts(
                starts=int(counts["lives"]),
                crashes=int(counts["faults"]) if is_own else 0,
                joined=is_own and bool(counts.get("joined")),
                ended=is_own and bool(counts.get("ended")),
            )
    return Counts()


def _was_killed(marker: Path | None, pod_uid: str, boot_id: str, starts: int) -> bool:
    """
    Whether the last container of this pod was killed on this boot of the node: its agent did not get to its end,
    and the node did not end it.

    A marker of another number of starts is older than the counts: an agent that knows no marker has run since.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if marker is not None and pod_uid and boot_id:
            found = untrusted_json.parse(files.read(marker))
            own = {"pod": pod_uid, "boot": boot_id, "lives": starts}
            return all(found.get(key) == value for key, value in own.items())
    return False


def _copy_kernels(source: Path, target: Path) -> None:
    """
    Copy the kernels that the image contains into numba's cache, unless the cache has some.

    numba's index identifies sources by time and size, so modification times are preserved.
    """
    try:
        if source.is_dir() and not (target.is_dir() and any(target.iterdir())):
            shutil.copytree(source, target, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        log.warning("cannot copy the compiled kernels; they are compiled again: %s", error)


@contextlib.contextmanager
def _wakeups(on_stop: Callable[[], None]) -> Iterator[Callable[[float], None]]:
    """Yields a sleep that a signal interrupts, SIGCHLD included."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)

    def sleep(seconds: float) -> None:
        select.select([reader], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            reader.recv(4096)

    def on_signal(number: int) -> None:
        if number != signal.SIGCHLD:
            on_stop()

    fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        with handled((signal.SIGTERM, signal.SIGINT, signal.SIGCHLD), on_signal):
            yield sleep
    finally:
        signal.set_wakeup_fd(fd_before)
        reader.close()
        writer.close()
