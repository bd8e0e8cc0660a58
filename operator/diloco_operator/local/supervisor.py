"""
`diloco run`: carries one plan out on this machine until it is complete, suspended or failed.

The loop asks the world for facts, hands them to the policy and carries out what it decides. It
never waits for a process, and it is the only place that starts or signals one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from diloco.errors import EXIT_DONE, ConfigError, DilocoError
from diloco_operator.api import DiLoCoJob
from diloco_operator.local import events as e
from diloco_operator.local import words
from diloco_operator.local.children import Children
from diloco_operator.local.closing import conclude
from diloco_operator.local.commands import Commands, Programs, local_problems
from diloco_operator.local.policy import Policy
from diloco_operator.local.progress import Progress, progress_on
from diloco_operator.local.rundir import RunDir, wall_text
from diloco_operator.local.settings import Settings, quiet_grpc
from diloco_operator.local.status import Facts, Status, build, is_complete
from diloco_operator.plan import plan as plan_of

if TYPE_CHECKING:
    from diloco_operator.local.poller import Poller

TURN_SECONDS = 0.1
STATUS_SECONDS = 1.0
FIRST_ANSWER_SECONDS = 5.0
"""A syncer that serves and does not answer for so long is taken as serving."""

EXIT_FAILED = 1
EXIT_FORCED = 130


def run(
    job_path: Path,
    job: DiLoCoJob,
    run_dir: Path,
    *,
    console: Console | None = None,
    programs: Programs | None = None,
    limits: e.Limits | None = None,
) -> int:
    """
    Run a job in `run_dir`, fresh or from where it stood. Call it from the main thread.

    Args:
        job_path: the manifest; own commands start in its folder.
        job: what it says, with the changes of `--set`.
        run_dir: job.md section 5; made when it is not there.
        console: where progress is shown; standard output when left out.
        programs: what to start instead of our own programs.
        limits: durations and bounds instead of those of `job_limits`.

    Returns:
        The exit code: 0 complete, or suspended after one Ctrl-C; 130 after two; 1 failed.

    Raises:
        ConfigError: the job cannot run here, or not in this directory.
        StorageError: the directory cannot be written.
    """
    if problems := local_problems(job):
        raise ConfigError(f"{job_path}: cannot run on one machine:\n" + "\n".join(problems))
    console = console or Console()
    rundir, plan = RunDir(run_dir), plan_of(job)
    with rundir.hold():
        folder = rundir.adopt(job_path, job, plan.spec)
        commands = Commands(
            plan=plan,
            rundir=rundir,
            settings=Settings.from_environment(),
            directory=folder,
            programs=programs or Programs(),
        )
        if problems := commands.problems():
            raise ConfigError(f"{job_path}: cannot run on one machine:\n" + "\n".join(problems))
        if job.spec.tls.mode != "Disabled":
            console.print("spec.tls is for clusters: these processes talk over loopback without it")
        # "Got goaway" of a syncer that ends in peace would run through the live table.
        quiet_grpc()
        from diloco_operator.local.poller import Poller

        supervisor = Supervisor(commands, limits or job_limits(job), progress_on(console), Poller())
        supervisor.run()
        try:
            conclude(commands, supervisor.policy, supervisor.status, console)
        except KeyboardInterrupt:
            return EXIT_FORCED
        return exit_code(supervisor.policy)


def job_limits(job: DiLoCoJob) -> e.Limits:
    """
    The limits that the job's runPolicy sets, ours for the rest.

    ttlSecondsAfterFinished and cleanupPolicy are about objects in a cluster; a run directory stays.
    """
    policy = job.spec.run_policy
    return e.Limits(
        learner_restarts=policy.learner_restart_limit,
        active_seconds=policy.active_deadline_seconds,
    )


class Supervisor:
    """One run of one plan; `run` returns when no child is left."""

    def __init__(
        self, commands: Commands, limits: e.Limits, progress: Progress, poller: Poller
    ) -> None:
        self.plan, self.rundir = commands.plan, commands.rundir
        self.policy = Policy(
            learners=tuple(one.name for one in self.plan.learners),
            evaluator=self.plan.evaluator is not None,
            limits=limits,
        )
        self.interrupts = 0
        self.status: Status = {}
        self._commands, self._progress = commands, progress
        self._children, self._poller = Children(), poller
        self._endpoint, self._port = "", 0
        self._listening_at: float | None = None
        self._interrupts_seen = 0
        self._status_at = 0.0
        self._evaluated = -1
        self._started = wall_text(datetime.now(UTC))
        self._completed: str | None = None
        self._complaints: set[str] = set()

    def run(self) -> None:
        """Run to the end, whatever end that is."""
        self._take_over()
        with self._signals():
            try:
                self._apply(e.Tick())
                while self.policy.phase is not e.Phase.CLOSED:
                    self._turn()
                    time.sleep(TURN_SECONDS)
            finally:
                self._poller.close()
                self._children.close()
                self._tell(time.monotonic())
                self._progress.close()

    # ------------------------------------------------------------------------------ facts

    def _turn(self) -> None:
        for event in self._events(time.monotonic()):
            self._apply(event)
        now = time.monotonic()
        if now - self._status_at >= STATUS_SECONDS:
            self._tell(now)

    def _events(self, now: float) -> Iterator[e.Event]:
        while self._interrupts_seen < self.interrupts:
            self._interrupts_seen += 1
            yield e.Interrupted()
        for death in self._children.deaths():
            if death.name == "syncer":
                self._listening_at = None
            if death.name == "kernels" and death.code != 0:
                said = death.last_line or words.ending(death.code)
                self._progress.note(f"the kernels were not compiled ahead: {said}")
            self._poller.ask()
            yield e.Exited(name=death.name, code=death.code, last_line=death.last_line)
        yield from self._syncer_events(now)
        yield e.Tick()

    def _syncer_events(self, now: float) -> Iterator[e.Event]:
        syncer = self.policy.processes["syncer"]
        if syncer.state is not e.State.RUNNING:
            return
        if self._listening_at is None:
            self._look_for_endpoint(now)
            return
        answer = self._poller.answer()
        fresh = answer is not None and answer.at >= self._listening_at
        reply = answer.reply if answer is not None and fresh else None
        if not syncer.served and (fresh or now - self._listening_at >= FIRST_ANSWER_SECONDS):
            complete = reply is not None and is_complete(reply)
            evaluated = reply is None or reply.eval_step >= reply.steps
            yield e.Served(complete=complete, evaluated=evaluated)
        if reply is None:
            return
        if self.policy.outcome is None and is_complete(reply):
            yield e.Completed()
        if reply.model_path and reply.state == "Complete":
            yield e.Exported()
        scored = reply.eval_step or reply.eval_loss  # step 0 has a score too
        if scored and reply.eval_step > self._evaluated:
            self._evaluated = reply.eval_step
            self._progress.note(f"step {reply.eval_step}: validation loss {reply.eval_loss:.4f}")

    def _look_for_endpoint(self, now: float) -> None:
        try:
            endpoint = self.rundir.endpoint.read_text().strip()
        except FileNotFoundError:
            return
        self._endpoint, self._port = endpoint, int(endpoint.rpartition(":")[2])
        self._listening_at = now
        self._poller.watch(endpoint)

    # ------------------------------------------------------------------------------ decisions

    def _apply(self, event: e.Event) -> None:
        now = time.monotonic()
        decisions = self.policy.handle(event, now)
        started = [one.name for one in decisions if isinstance(one, e.Start)]
        for decision in decisions:
            self._carry_out(decision)
        if started == ["kernels"]:
            self._progress.note(
                "preparing the kernels; the first time on a machine takes up to a minute"
            )
        elif started:
            self._progress.note(f"started {', '.join(started)}")
        if decisions:
            self._tell(now)

    def _carry_out(self, decision: e.Decision) -> None:
        match decision:
            case e.Start():
                self._start(decision.name)
            case e.Terminate():
                self._children.terminate(decision.name)
            case e.Kill():
                self._children.kill(decision.name)
            case e.Restart():
                self._on_restart(decision)
            case e.GiveUp():
                self._progress.note(
                    f"{decision.name} cannot do its work and stays away: {decision.last_line}"
                )
            case e.Close():
                self._on_close(decision)

    def _start(self, name: str) -> None:
        if name == "syncer":
            self.rundir.endpoint.unlink(missing_ok=True)
            self._listening_at = None
        command = self._commands.of(
            name,
            port=self._port,
            endpoint=self._endpoint,
            restarts=self.policy.processes[name].restarts,
        )
        self._children.start(command)

    def _on_restart(self, restart: e.Restart) -> None:
        ending = words.ending(restart.code)
        why = f": {restart.last_line}" if restart.last_line and restart.code > 0 else ""
        soon = f"in {restart.delay_seconds:g} s" if restart.delay_seconds else "now"
        self._progress.note(
            f"{restart.name} ended ({ending}{why}); starts again {soon}, restart {restart.restarts}"
        )
        answer = self._poller.answer()
        code = {"exitCode": restart.code} if restart.code >= 0 else {"signal": -restart.code}
        event = {
            "epoch": answer.reply.epoch if answer else 0,
            "event": "restart",
            "process": restart.name,
            "reason": ending,
            **code,
            "restarts": restart.restarts,
        }
        with self._complaining(self.rundir.events):
            self.rundir.append_event(event)

    def _on_close(self, close: e.Close) -> None:
        match close.outcome:
            case e.Outcome.COMPLETE:
                self._progress.note(f"{close.message}; waiting for learners, last score and model")
            case e.Outcome.SUSPENDED:
                self._progress.note("finishing and saving; press Ctrl-C again to stop at once")
            case e.Outcome.FAILED:
                self._progress.note(f"failed: {close.message}")

    # ------------------------------------------------------------------------------ telling

    def _tell(self, now: float) -> None:
        self._status_at = now
        answer = self._poller.answer()
        if self.policy.phase is e.Phase.CLOSED and self.policy.outcome is e.Outcome.COMPLETE:
            self._completed = self._completed or wall_text(datetime.now(UTC))
        facts = Facts(
            plan=self.plan,
            policy=self.policy,
            pids={name: self._children.pid(name) for name in self.policy.processes},
            supervisor_pid=os.getpid(),
            endpoint=self._endpoint,
            reply=answer.reply if answer else None,
            silence_seconds=now - answer.at if answer else 0.0,
            started=self._started,
            completed=self._completed,
            now=datetime.now(UTC),
        )
        self.status = build(facts, self.status)
        with self._complaining(self.rundir.status_file):
            self.rundir.write_status(self.status)
        self._progress.show(self.status, now)

    @contextlib.contextmanager
    def _complaining(self, path: Path) -> Iterator[None]:
        """A full disk costs a file, said once; training goes on."""
        try:
            yield
        except OSError as error:
            if str(path) not in self._complaints:
                self._complaints.add(str(path))
                self._progress.note(f"{path}: {error.strerror}; the run goes on without it")

    def _take_over(self) -> None:
        """What an earlier run in this directory left and this one goes on with."""
        with contextlib.suppress(DilocoError):
            before = self.rundir.status()
            self._started = before["startTime"]
            self.status = before

    # ------------------------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def on_signal(number: int, frame: FrameType | None) -> None:
            self.interrupts += 1

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_code(policy: Policy) -> int:
    """What the process that ran this policy ends with."""
    if policy.forced:
        return EXIT_FORCED
    return EXIT_FAILED if policy.outcome is e.Outcome.FAILED else EXIT_DONE
