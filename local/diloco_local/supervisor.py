"""
`diloco run`: runs one plan on this machine until it is complete, suspended or failed.

The loop collects events, passes them to the policy and carries out its decisions. It never blocks on
a process, and nothing else starts or signals processes, except that `Chaos` signals those of this run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from diloco.errors import EXIT_DONE, EXIT_TRY_AGAIN, ConfigError, DilocoError
from diloco.runtime import formatting, health
from diloco.runtime.env import Environment
from diloco.runtime.formatting import wall_text
from diloco.runtime.signals import handled
from diloco_agent.processes import Processes
from diloco_agent.restarts import exit_cause
from diloco_job.plan import Plan
from diloco_job.plan import plan as plan_of
from diloco_job.types import DiLoCoJob
from diloco_local import events as e
from diloco_local.commands import Commands, Programs, local_problems
from diloco_local.display import Display, console_on, display_on
from diloco_local.policy import Policy
from diloco_local.problems import STUCK_SECONDS, Problems
from diloco_local.run_directory import RunDir
from diloco_local.settings import Settings, quiet_grpc
from diloco_local.status import RunFacts, Status, build, is_complete
from diloco_local.summary import conclude

if TYPE_CHECKING:
    from diloco_local.status_poller import Poller, TimedReply

POLL_SECONDS = 0.1
STATUS_SECONDS = 1.0
FIRST_REPLY_SECONDS = 5.0
"""A syncer that listens counts as serving after this, even without a reply."""

LAST_SCORE_SECONDS = 5.0
"""How long the end of the evaluator waits for a reply with its last score."""

EXIT_FAILED = 1
EXIT_FORCED = 130


def run(
    job_path: Path,
    job: DiLoCoJob,
    directory: Path,
    *,
    console: Console | None = None,
    programs: Programs | None = None,
    limits: e.Limits | None = None,
    chaos: Chaos | None = None,
) -> int:
    """
    Start or resume a job in `directory`. Call it from the main thread.

    Args:
        job_path: the manifest; the user's own commands start in its directory.
        job: the job of the manifest, with the changes of `--set`.
        directory: the run directory (docs/manifest.md, "Run directory"); created if missing.
        console: where progress is shown; None: standard output.
        programs: replacements for our own programs.
        limits: replacement for `job_limits(job)`.
        chaos: injects faults; None: none.

    Returns:
        The exit code: 0 complete; 75 suspended, by one Ctrl-C or `diloco suspend`; 130 stopped by
        the second; 1 failed, or complete without a change of the parameters or without an exported model.

    Raises:
        ConfigError: the job cannot run on one machine, or not in this directory.
        StorageError: the directory cannot be written.
    """
    if problems := local_problems(job):
        raise ConfigError(f"{job_path}: cannot run on one machine:\n" + "\n".join(problems))
    console = console or console_on(sys.stdout)
    run_dir, plan = RunDir(directory), plan_of(job)
    with run_dir.hold():
        sources = run_dir.adopt(job_path, job, plan.spec)
        commands = Commands(
            plan=plan,
            run_dir=run_dir,
            settings=Settings.from_environment(),
            directory=sources,
            programs=programs or Programs(),
        )
        if problems := commands.problems():
            raise ConfigError(f"{job_path}: cannot run on one machine:\n" + "\n".join(problems))
        if job.spec.tls.mode != "Disabled":
            console.print("spec.tls is ignored: these processes communicate over loopback")
        if note := sharing(len(plan.learners), len(commands.settings.devices)):
            console.print(note)
        # gRPC's "Got goaway" at the syncer's normal exit would disturb the live table.
        quiet_grpc()
        from diloco_local.status_poller import Poller

        supervisor = Supervisor(
            commands, limits or job_limits(job), display_on(console), Poller(), chaos
        )
        supervisor.run()
        try:
            # A terminal that is closed now does not keep the report from being written.
            with handled((signal.SIGHUP,), lambda _: None):
                conclude(commands, supervisor.policy, supervisor.status, console)
        except KeyboardInterrupt:
            console.print("stopped before sample and report were written", soft_wrap=True)
            return EXIT_FORCED
        return exit_code(supervisor.policy)


def sharing(learners: int, devices: int) -> str:
    """A sentence where learners share GPUs; "": none does."""
    if not 0 < devices < learners:
        return ""
    gpus = "1 GPU" if devices == 1 else f"{devices} GPUs"
    return f"{learners} learners share {gpus}: each uses a part of the memory and time of its GPU"


def job_limits(job: DiLoCoJob) -> e.Limits:
    """
    The limits of the job's runPolicy, and defaults for the rest.

    ttlSecondsAfterFinished and cleanupPolicy apply to objects in a cluster; a run directory stays.
    """
    policy = job.spec.run_policy
    return e.Limits(
        learner_restarts=policy.learner_restart_limit,
        active_seconds=policy.active_deadline_seconds,
    )


def stuck_seconds(plan: Plan) -> float:
    """
    How long all learners may take no step: DILOCO_STUCK_SECONDS of learner.env, as in a cluster.

    Raises:
        ConfigError: it is not a number of at least 0.
    """
    env = Environment(dict(plan.learners[0].env) if plan.learners else {})
    seconds = env.number("DILOCO_STUCK_SECONDS", STUCK_SECONDS, least=0)
    env.check()
    return seconds


class Chaos(Protocol):
    """Injects faults into the processes of a supervisor, whose loop makes all calls."""

    def endpoint(self, name: str, endpoint: str) -> str:
        """Where a process that is started reaches the syncer, which listens at `endpoint`."""

    def turn(
        self, processes: Processes, status: Status, note: Callable[[str], None], *, serves: bool
    ) -> None:
        """Begin and end the faults that are due."""

    def undo(self, processes: Processes, status: Status, note: Callable[[str], None]) -> None:
        """Undo all faults: the run ends."""

    def close(self) -> None:
        """No process is left."""


class Supervisor:
    """One run of one plan; `run` returns when no process is left."""

    def __init__(
        self,
        commands: Commands,
        limits: e.Limits,
        display: Display,
        poller: Poller,
        chaos: Chaos | None = None,
    ) -> None:
        self.plan, self.run_dir = commands.plan, commands.run_dir
        self.policy = Policy(
            learners=tuple(learner.name for learner in self.plan.learners),
            evaluator=self.plan.evaluator is not None,
            limits=limits,
        )
        self.interrupts = 0
        self.status: Status = {}
        self._commands, self._display = commands, display
        self._processes, self._poller, self._chaos = Processes(), poller, chaos
        self._endpoint, self._port = "", 0
        self._listening_at: float | None = None
        self._interrupts_seen = 0
        self._status_at = 0.0
        self._evaluated = -1
        self._evaluator_exit: tuple[float, e.Exited] | None = None
        """When the evaluator ended, until the policy learns of it."""
        self._started = wall_text(datetime.now(UTC))
        self._completed: str | None = None
        self._warned: set[Path] = set()
        self._starts: dict[str, int] = {}
        """Of each learner, in earlier runs too."""
        self._problems = Problems(
            (learner.name for learner in self.plan.learners), stuck_seconds=stuck_seconds(self.plan)
        )

    def run(self) -> None:
        """Run until the policy closes the run."""
        self._read_earlier_status()
        with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._on_signal):
            try:
                self._apply(e.Tick())
                while self.policy.phase is not e.Phase.CLOSED:
                    self._turn()
                    time.sleep(POLL_SECONDS)
            finally:
                self._poller.close()
                self._processes.close()
                if self._chaos is not None:
                    self._chaos.close()
                self._publish(time.monotonic())
                self._display.close()

    # ------------------------------------------------------------------------------ events

    def _turn(self) -> None:
        for event in self._events(time.monotonic()):
            self._apply(event)
        if self._chaos is not None:
            syncer = self.policy.processes["syncer"]
            serves = syncer.served and syncer.state is e.State.RUNNING
            self._chaos.turn(self._processes, self.status, self._display.note, serves=serves)
        self._processes.limit_logs()
        now = time.monotonic()
        if now - self._status_at >= STATUS_SECONDS:
            self._publish(now)

    def _events(self, now: float) -> Iterator[e.Event]:
        while self._interrupts_seen < self.interrupts:
            self._interrupts_seen += 1
            yield e.Interrupted()
        for done in self._processes.exits():
            if done.name == "syncer":
                self._listening_at = None
            closing = self.policy.phase is e.Phase.CLOSING  # then this supervisor has ended it
            if done.name == "kernels" and done.code != 0 and not closing:
                cause = exit_cause(done.code, done.cause)
                self._display.note(f"warning: cannot compile the kernels in advance ({cause})")
            self._poller.poll_now()
            last = health.read(self.run_dir.health_of(done.name))
            exited = e.Exited(
                name=done.name,
                code=done.code,
                last_line=done.cause,
                joined=last is not None and last.joined,
                left=last.left if last is not None else "",
                no_score=last.why if last is not None and last.problem == "NoScore" else "",
            )
            if done.name == "evaluator":
                self._evaluator_exit = time.monotonic(), exited  # `now` is before the end
            else:
                yield exited
        if message := self._problems.standstill(now):
            yield e.StandsStill(message=message)
        latest = self._poller.latest()
        yield from self._syncer_events(latest, now)
        yield from self._evaluator_events(latest, now)
        yield e.Tick()

    def _evaluator_events(self, latest: TimedReply | None, now: float) -> Iterator[e.Event]:
        """
        The end of the evaluator, when the syncer has reported what it scored.

        The policy may then end the syncer at once, and with it the only source of the last score.
        """
        if self._evaluator_exit is None:
            return
        ended_at, exited = self._evaluator_exit
        known = latest is not None and latest.asked_at >= ended_at
        serves = self.policy.processes["syncer"].state is e.State.RUNNING
        waits = serves and not known and not self.policy.forced
        if not waits or now - ended_at >= LAST_SCORE_SECONDS:
            self._evaluator_exit = None
            yield exited

    def _syncer_events(self, latest: TimedReply | None, now: float) -> Iterator[e.Event]:
        syncer = self.policy.processes["syncer"]
        if syncer.state is not e.State.RUNNING:
            return
        if self._listening_at is None:
            self._find_endpoint(now)
            return
        fresh = latest is not None and latest.at >= self._listening_at
        reply = latest.reply if latest is not None and fresh else None
        if not syncer.served and (fresh or now - self._listening_at >= FIRST_REPLY_SECONDS):
            complete = reply is not None and is_complete(reply)
            evaluated = reply is None or reply.eval_step >= reply.steps
            unchanged = reply is not None and reply.unchanged
            yield e.Served(complete=complete, evaluated=evaluated, unchanged=unchanged)
        if reply is None:
            return
        if self.policy.outcome is None and is_complete(reply):
            yield e.Completed(unchanged=reply.unchanged)
        if reply.model_path and reply.state == "Complete":
            yield e.Exported()
        scored = reply.eval_step or reply.eval_loss  # step 0 is scored too
        if scored and reply.eval_step > self._evaluated:
            self._evaluated = reply.eval_step
            self._display.note(f"step {reply.eval_step}: validation loss {reply.eval_loss:.4f}")

    def _find_endpoint(self, now: float) -> None:
        try:
            endpoint = self.run_dir.endpoint.read_text().strip()
        except FileNotFoundError:
            return
        self._endpoint, self._port = endpoint, int(endpoint.rpartition(":")[2])
        self._listening_at = now
        self._poller.watch(endpoint)

    # ------------------------------------------------------------------------------ decisions

    def _apply(self, event: e.Event) -> None:
        now = time.monotonic()
        decisions = self.policy.handle(event, now)
        if self._chaos is not None and self.policy.phase is e.Phase.CLOSING:
            # Before the signals: a process that is paused does not receive SIGTERM.
            self._chaos.undo(self._processes, self.status, self._display.note)
        started = [start.name for start in decisions if isinstance(start, e.Start)]
        for decision in decisions:
            self._carry_out(decision)
        if started == ["kernels"]:
            self._display.note("compiling the kernels; this takes up to a minute the first time")
        elif started:
            self._display.note(f"started {', '.join(started)}")
        if decisions:
            self._publish(now)

    def _carry_out(self, decision: e.Decision) -> None:
        match decision:
            case e.Start():
                self._start(decision.name)
            case e.Terminate():
                self._processes.terminate(decision.name)
            case e.Kill():
                self._processes.kill(decision.name)
            case e.Restart():
                self._on_restart(decision)
            case e.Abandon():
                self._display.note(
                    f"{decision.name} cannot run; the run continues without it: {decision.last_line}"
                )
            case e.Close():
                self._on_close(decision)
            case e.Acknowledge():
                self._display.note(decision.message)

    def _start(self, name: str) -> None:
        if name == "syncer":
            self._listening_at = None
            self._remove(self.run_dir.endpoint)
        # A report of an earlier run does not apply to this one.
        self._remove(self.run_dir.health_of(name))
        command = self._commands.of(
            name,
            port=self._port,
            endpoint=self._chaos.endpoint(name, self._endpoint) if self._chaos else self._endpoint,
            restarts=self._starts_before(name),
        )
        self._processes.start(command)

    def _starts_before(self, name: str) -> int:
        """How often a process was started before; of a learner in earlier runs too, so that no seed is used again."""
        process = self.policy.processes[name]
        before = process.restarts
        if process.role is e.Role.LEARNER:
            before = max(before, self._starts.get(name, 0))
            # The file may be readable and not writable, such as on a full disk.
            with self._warn_once(self.run_dir.starts_of(name)):
                before = max(before, self.run_dir.starts(name))
                self.run_dir.write_starts(name, before + 1)
            self._starts[name] = before + 1
        return before

    def _remove(self, path: Path) -> None:
        """Remove a file of an earlier run, if there is one and the file system lets us."""
        with self._warn_once(path):
            path.unlink(missing_ok=True)

    def _on_restart(self, restart: e.Restart) -> None:
        cause = exit_cause(restart.code, restart.last_line if restart.code >= 0 else "")
        when = f"in {restart.delay_seconds:g} s" if restart.delay_seconds else "now"
        self._display.note(
            f"{restart.name} exited ({cause}); restarts {when}, restart {restart.restarts}"
        )
        latest = self._poller.latest()
        code = {"exitCode": restart.code} if restart.code >= 0 else {"signal": -restart.code}
        event = {
            "epoch": latest.reply.epoch if latest else 0,
            "event": "restart",
            "process": restart.name,
            "reason": formatting.ending(restart.code),
            **code,
            "restarts": restart.restarts,
        }
        with self._warn_once(self.run_dir.events):
            self.run_dir.append_event(event)

    def _on_close(self, close: e.Close) -> None:
        match close.outcome:
            case e.Outcome.COMPLETE:
                self._display.note(
                    f"{close.message}; waiting for the learners, the last evaluation and the model"
                )
            case e.Outcome.SUSPENDED:
                self._display.note(
                    "finishing the current step and saving; press Ctrl-C again to stop immediately"
                )
            case e.Outcome.FAILED:
                self._display.note(f"failed: {close.message}")

    # ------------------------------------------------------------------------------ status

    def _publish(self, now: float) -> None:
        self._status_at = now
        latest = self._poller.latest()
        if self.policy.phase is e.Phase.CLOSED and self.policy.outcome is e.Outcome.COMPLETE:
            self._completed = self._completed or wall_text(datetime.now(UTC))
        pids = {name: self._processes.pid(name) for name in self.policy.processes}
        self._observe_problems([name for name, pid in pids.items() if pid is not None], now)
        facts = RunFacts(
            plan=self.plan,
            policy=self.policy,
            pids=pids,
            problems=self._problems.current,
            supervisor_pid=os.getpid(),
            endpoint=self._endpoint,
            reply=latest.reply if latest else None,
            reply_age_seconds=now - latest.at if latest else 0.0,
            started=self._started,
            completed=self._completed,
            now=datetime.now(UTC),
        )
        self.status = build(facts, self.status)
        with self._warn_once(self.run_dir.status_file):
            self.run_dir.write_status(self.status)
        self._display.show(self.status, now)

    def _observe_problems(self, running: list[str], now: float) -> None:
        healths = {name: health.read(self.run_dir.health_of(name)) for name in running}
        known = {name: found for name, found in healths.items() if found is not None}
        for name, found in known.items():
            # Kept here: a full disk cannot hold the next report, and a link that restarts forgets it.
            self.policy.processes[name].joined |= found.joined
        for note in self._problems.update(known, now):
            self._display.note(note)

    @contextlib.contextmanager
    def _warn_once(self, path: Path) -> Iterator[None]:
        """Warn once if `path` cannot be written, for example on a full disk; training continues."""
        try:
            yield
        except OSError as error:
            if path not in self._warned:
                self._warned.add(path)
                self._display.note(
                    f"warning: cannot write {path}: {error.strerror}; the run continues"
                )

    def _read_earlier_status(self) -> None:
        """Continue the status of an earlier run in this directory."""
        with contextlib.suppress(DilocoError):
            earlier = self.run_dir.status()
            self._started = earlier["startTime"]
            self.status = earlier

    # ------------------------------------------------------------------------------ signals

    def _on_signal(self, number: int) -> None:
        # The shell and the kernel both report a closed terminal; that is no second Ctrl-C.
        if number != signal.SIGHUP or not self.interrupts:
            self.interrupts += 1


def exit_code(policy: Policy) -> int:
    """Exit code of the process that ran this policy."""
    if policy.forced:
        return EXIT_FORCED
    match policy.outcome:
        case e.Outcome.COMPLETE:
            return EXIT_FAILED if policy.unchanged or not policy.exported else EXIT_DONE
        case e.Outcome.SUSPENDED:
            return EXIT_TRY_AGAIN
        case _:
            return EXIT_FAILED
