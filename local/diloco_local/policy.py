"""
What the supervisor does next: which processes it starts, restarts, terminates or abandons, and when.

Pure. Events come in through `Policy.handle(event, now)`; decisions are returned as values.

    WARMING --kernels compiled--> STARTING --syncer serves--> RUNNING
                                      --complete, interrupt, failure--> CLOSING --> CLOSED

Closing stops learners, then the evaluator, then the syncer: each stops before those it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.errors import EXIT_DONE, EXIT_REFUSED, EXIT_USAGE
from diloco.runtime.exits import is_crash
from diloco_agent.restarts import (
    EARLY_EXIT,
    BrokenStarts,
    backoff_seconds,
    counts,
    exit_cause,
    is_broken_start,
    is_early_exit,
    limit_message,
    refusal,
)
from diloco_local.events import (
    Abandon,
    Acknowledge,
    Close,
    Completed,
    Decision,
    Event,
    Exited,
    Exported,
    Interrupted,
    Kill,
    Limits,
    Outcome,
    Phase,
    Restart,
    Role,
    Served,
    StandsStill,
    Start,
    State,
    Terminate,
    Tick,
)

UNCHANGED = (
    "no learner changed the parameters, so the model is that of step 0; train the model that Learner.connect is "
    "given, in place and not a copy of its parameters, and check the learning rate"
)

CLOSING_ORDER = (
    ((Role.KERNELS, Role.LEARNER), "the learners"),
    ((Role.EVALUATOR,), "the last evaluation"),
    ((Role.SYNCER,), "the model"),
)
"""The roles in the order in which they are stopped, each with what a complete run waits for."""


@dataclass(slots=True, kw_only=True)
class Process:
    """One process over all its runs."""

    name: str
    role: Role
    state: State = State.WAITING
    restarts: int = 0
    crashes: int = 0
    exits: int = 0
    """In a row, without a healthy run between them, nor a kill of a learner that had joined."""
    unserved: int = 0
    """Runs in a row in which the syncer never served."""
    served: bool = False
    """Whether it served in this run."""
    joined: bool = False
    """A learner: it has joined the job in one of its runs."""
    broken_starts: BrokenStarts = field(default_factory=BrokenStarts)
    last_code: int | None = None
    """Exit code of its last run."""
    ended_early: bool = False
    """A learner: its last run exited with 0 before the job was complete."""
    started_at: float = 0.0
    start_at: float = 0.0
    terminated_at: float | None = None
    killed: bool = False


@dataclass(slots=True, kw_only=True)
class Policy:
    """State of one run of the supervisor."""

    learners: tuple[str, ...]
    evaluator: bool = False
    limits: Limits = field(default_factory=Limits)
    phase: Phase = Phase.WARMING
    outcome: Outcome | None = None
    message: str = ""
    """Why the run ended."""
    unchanged: bool = False
    """The job is complete, and no learner changed its parameters."""
    forced: bool = False
    """Interrupted twice: all processes were killed."""
    exported_at: float | None = None
    """When the final model was on disk; None: it is not."""
    skips_waiting: bool = False
    """Interrupted once after completion: neither learners nor evaluator are waited for."""
    no_score: str = ""
    """Why the final model has no score, as the evaluator reported when it was done; "": no report."""
    processes: dict[str, Process] = field(init=False)
    _ever_served: bool = False
    _begun_at: float | None = None
    _closing_at: float = 0.0
    _failing_at: float | None = None
    """When the evaluator or the syncer of a complete job first exited, although it was needed."""
    _reports: int = 0
    """Of what a complete run still waits for."""

    def __post_init__(self) -> None:
        """Add every process of the run."""
        roles = {"kernels": Role.KERNELS, "syncer": Role.SYNCER}
        roles |= dict.fromkeys(self.learners, Role.LEARNER)
        if self.evaluator:
            roles["evaluator"] = Role.EVALUATOR
        self.processes = {name: Process(name=name, role=role) for name, role in roles.items()}

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Handle one event; return what to do about it and about the time."""
        if self._begun_at is None:
            self._begun_at = now
        decisions: list[Decision] = []
        match event:
            case Served():
                decisions += self._on_served(event, now)
            case Exited():
                decisions += self._on_exit(event, now)
            case Completed():
                decisions += self._complete(
                    "the final step is complete", now, unchanged=event.unchanged
                )
            case StandsStill():
                decisions += self._close(Outcome.FAILED, event.message, now)
            case Exported():
                self.exported_at = now if self.exported_at is None else self.exported_at
            case Interrupted():
                decisions += self._on_interrupt(now)
            case Tick():
                pass
        return decisions + self._due(now)

    def of(self, *roles: Role) -> list[Process]:
        """The processes with one of these roles, in the order of the plan."""
        return [process for process in self.processes.values() if process.role in roles]

    @property
    def exported(self) -> bool:
        """Whether the final model is on disk."""
        return self.exported_at is not None

    @property
    def waiting_for(self) -> str:
        """What a complete run waits for before it ends; "": nothing."""
        if self.phase is not Phase.CLOSING or self.outcome is not Outcome.COMPLETE or self.forced:
            return ""
        for roles, what in CLOSING_ORDER:
            if remaining := self._remaining(*roles):
                if all(p.terminated_at is not None for p in remaining):
                    return ""
                return what if self.exported else "the model"
        return ""

    def _remaining(self, *roles: Role) -> list[Process]:
        return [p for p in self.of(*roles) if p.state in (State.RUNNING, State.BACK_OFF)]

    # ------------------------------------------------------------------------------ events

    def _on_served(self, event: Served, now: float) -> list[Decision]:
        self._ever_served = self.processes["syncer"].served = True
        if self.phase is not Phase.STARTING:
            return []
        self.phase = Phase.RUNNING
        if not event.complete:
            return []
        needed = [] if event.evaluated else self.of(Role.EVALUATOR)
        started = [start for process in needed for start in self._start(process, now)]
        return started + self._complete(
            "the job was already complete", now, unchanged=event.unchanged
        )

    def _complete(self, message: str, now: float, *, unchanged: bool) -> list[Decision]:
        self.unchanged = unchanged
        message = f"{message}, but {UNCHANGED}" if unchanged else message
        return self._close(Outcome.COMPLETE, message, now)

    def _on_exit(self, event: Exited, now: float) -> list[Decision]:
        process = self.processes[event.name]
        healthy = now - process.started_at >= self.limits.healthy_seconds
        # A kill from outside does not predict how the next run ends.
        killed = event.joined and event.code < 0 and not is_crash(event.code)
        process.exits = 1 if healthy or killed else process.exits + 1
        process.unserved = 0 if process.served else process.unserved + 1
        process.last_code, process.joined = event.code, process.joined or event.joined
        if process.role is Role.EVALUATOR and event.code == EXIT_DONE:
            self.no_score = event.no_score
        process.ended_early = process.role is Role.LEARNER and is_early_exit(event.code, event.left)
        if self._is_final(process):
            process.state = State.DONE if event.code == EXIT_DONE else State.STOPPED
            return self._late_failure(process, event)
        if self.phase is Phase.CLOSING and self._failing_at is None:
            self._failing_at = now
        if process.role is Role.EVALUATOR and event.code == EXIT_REFUSED:
            process.state = State.REFUSED
            return [Abandon(name=process.name, last_line=event.last_line)]
        if message := self._failure(process, event, now):
            process.state = State.REFUSED if event.code == EXIT_REFUSED else State.STOPPED
            return self._close(Outcome.FAILED, message, now)
        return self._back_off(process, event, now)

    def _is_final(self, process: Process) -> bool:
        """Whether a process that just exited does not restart."""
        if process.role is Role.KERNELS or process.terminated_at is not None or process.killed:
            return True
        if self.phase is not Phase.CLOSING:
            return False
        return not self._is_needed(process)

    def _is_needed(self, process: Process) -> bool:
        """Whether closing still needs it: for the final validation loss or the exported model."""
        if self.outcome is not Outcome.COMPLETE or self.forced:
            return False
        if process.role is Role.EVALUATOR:
            return process.last_code != EXIT_DONE and not self.skips_waiting
        return process.role is Role.SYNCER

    def _late_failure(self, process: Process, event: Exited) -> list[Decision]:
        """A learner that failed by itself after its loop: what follows there, such as a file to write, is not done."""
        stopped = process.terminated_at is not None or process.killed
        complete = self.outcome is Outcome.COMPLETE and process.role is Role.LEARNER
        if stopped or not complete or event.code == EXIT_DONE:
            return []
        cause = exit_cause(event.code, event.last_line)
        return [Acknowledge(message=f"{process.name} failed after the job was complete ({cause})")]

    def _failure(self, process: Process, event: Exited, now: float) -> str:
        """Why this exit fails the job; "" when it does not."""
        cause = exit_cause(event.code, EARLY_EXIT if process.ended_early else event.last_line)
        if process.role is Role.SYNCER:
            rejected = not self._ever_served and event.code in (EXIT_USAGE, EXIT_REFUSED)
            if rejected or process.unserved >= self.limits.syncer_starts:
                times = "once" if process.unserved == 1 else f"{process.unserved} times in a row"
                return f"the syncer was started {times} and did not serve ({cause})"
            return ""
        if process.role is not Role.LEARNER:
            return ""
        if event.code == EXIT_REFUSED:
            return f"learner {process.name} was refused: {refusal(process.name, event.last_line)}"
        process.crashes += counts(event.code)
        limit = self.limits.learner_restarts
        if message := limit_message(
            process.name, crashes=process.crashes, limit=limit, cause=cause
        ):
            return message
        if process.joined or not is_broken_start(event.code, event.left):
            return ""
        return process.broken_starts.count(
            process.name, now=now, limit=self.limits.learner_starts,
            seconds=self.limits.never_joined_seconds, cause=cause,
        )  # fmt: skip

    def _back_off(self, process: Process, event: Exited, now: float) -> list[Decision]:
        delay = self._backoff_seconds(process)
        process.state = State.BACK_OFF
        if event.code == EXIT_DONE:
            # The run may be complete, which the syncer reports a moment later: no restart yet.
            process.start_at = now + max(delay, self.limits.early_exit_seconds)
            return []
        process.start_at = now + delay
        return [self._restart(process, event, delay)]

    def _restart(self, process: Process, event: Exited, delay_seconds: float) -> Restart:
        process.restarts += 1
        return Restart(
            name=process.name,
            code=event.code,
            last_line=event.last_line,
            restarts=process.restarts,
            delay_seconds=delay_seconds,
        )

    def _backoff_seconds(self, process: Process) -> float:
        return backoff_seconds(
            process.exits,
            # Every learner waits for the syncer, so its first restart is immediate.
            immediate=1 if process.role is Role.SYNCER else 0,
            first_seconds=self.limits.back_off_seconds,
            max_seconds=self.limits.back_off_max_seconds,
        )

    def _on_interrupt(self, now: float) -> list[Decision]:
        if self.phase is not Phase.CLOSING:
            return self._close(Outcome.SUSPENDED, "interrupted", now)
        if self.outcome is Outcome.COMPLETE and not self.skips_waiting:
            self.skips_waiting = True
            return [
                Acknowledge(
                    message="no longer waiting for the learners and the last evaluation, only for the "
                    "model; press Ctrl-C again to stop immediately"
                )
            ]
        noted = [] if self.forced else [Acknowledge(message="stopping immediately")]
        self.forced = True
        return [*noted, *(self._kill(process) for process in self._running())]

    # ------------------------------------------------------------------------------ time

    def _due(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        deadline = self.limits.active_seconds
        if deadline is not None and self._begun_at is not None and now - self._begun_at >= deadline:
            message = (
                f"the job ran for {deadline:g} s, which is spec.runPolicy.activeDeadlineSeconds"
            )
            decisions += self._close(Outcome.FAILED, message, now)
        ready = self.processes["kernels"].state in (State.DONE, State.STOPPED)
        if self.phase is Phase.WARMING and ready:
            self.phase = Phase.STARTING
        for process in self.processes.values():
            if self._may_start(process, now):
                decisions += self._start(process, now)
        if self.phase is Phase.CLOSING:
            decisions += self._closing(now)
        return decisions

    def _may_start(self, process: Process, now: float) -> bool:
        if process.state is State.BACK_OFF:
            return now >= process.start_at and not self.forced
        if process.state is not State.WAITING:
            return False
        if process.role is Role.KERNELS:
            return self.phase is Phase.WARMING
        if process.role is Role.SYNCER:
            return self.phase is Phase.STARTING
        return self.phase is Phase.RUNNING

    def _start(self, process: Process, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        if process.state is State.BACK_OFF and process.last_code == EXIT_DONE:
            cause = EARLY_EXIT if process.ended_early else ""
            exited = Exited(name=process.name, code=EXIT_DONE, last_line=cause)
            decisions.append(self._restart(process, exited, 0.0))
        process.state = State.RUNNING
        process.started_at = now
        process.served = False
        return [*decisions, Start(name=process.name)]

    def _close(self, outcome: Outcome, message: str, now: float) -> list[Decision]:
        if self.phase in (Phase.CLOSING, Phase.CLOSED):
            return []
        self.phase, self._closing_at = Phase.CLOSING, now
        self.outcome, self.message = outcome, message
        noted: list[Decision] = []
        for process in self.processes.values():
            backing_off = process.state is State.BACK_OFF and not self._is_needed(process)
            if backing_off or process.state is State.WAITING:
                done = backing_off and process.last_code == EXIT_DONE
                process.state = State.DONE if done else State.STOPPED
                process.restarts -= backing_off and not done  # counted when it exited
                if backing_off and not done and outcome is Outcome.COMPLETE:
                    text = (
                        f"{process.name} does not restart, because the job is complete; what its program does "
                        "after its loop is not done"
                    )
                    noted.append(Acknowledge(message=text))
        return [Close(outcome=outcome, message=message), *noted]

    def _closing(self, now: float) -> list[Decision]:
        """Terminate role after role, each when the processes of the previous one have exited."""
        for roles, _ in CLOSING_ORDER:
            if remaining := self._remaining(*roles):
                stops = [decision for p in remaining for decision in self._stop(p, now)]
                return [*stops, *self._report_wait(now)]
        self.phase = Phase.CLOSED
        return []

    def _report_wait(self, now: float) -> list[Decision]:
        """What is still waited for, at growing intervals."""
        what = self.waiting_for
        due = self._closing_at + self.limits.still_waiting_seconds * (2**self._reports)
        if not what or now < due:
            return []
        self._reports += 1
        if what == "the model":
            how = "Ctrl-C" if self.skips_waiting else "Ctrl-C twice"
            return [
                Acknowledge(message=f"still waiting for the model; press {how} to stop without it")
            ]
        return [
            Acknowledge(message=f"still waiting for {what}; press Ctrl-C to end without waiting")
        ]

    def _stop(self, process: Process, now: float) -> list[Decision]:
        if process.terminated_at is not None:
            if now - process.terminated_at >= self.limits.leave_seconds and not process.killed:
                return [self._kill(process)]
            return []
        if now < self._wait_until(process):
            return []
        if process.state is State.BACK_OFF:
            process.state = State.STOPPED
            return self._closing(now)
        process.terminated_at = now
        return [*self._report_unfinished(process), Terminate(name=process.name)]

    def _report_unfinished(self, process: Process) -> list[Decision]:
        """A learner whose program took too long after its loop."""
        complete = self.outcome is Outcome.COMPLETE and process.role is Role.LEARNER
        if not complete or not self.exported or self.skips_waiting or self.forced:
            return []
        text = (
            f"{process.name} is stopped, because its program did not end within "
            f"{self.limits.complete_learner_seconds:g} s after the job was complete; what it does after its "
            "loop may not be done"
        )
        return [Acknowledge(message=text)]

    def _wait_until(self, process: Process) -> float:
        """Until when a process may exit by itself."""
        others = process.role is not Role.SYNCER
        if self.outcome is not Outcome.COMPLETE or self.forced or (self.skips_waiting and others):
            return self._closing_at
        syncer_until = self._restarts_until(self.processes["syncer"])
        export_until = self._closing_at + self.limits.complete_export_seconds
        if process.role is Role.SYNCER:
            return self._closing_at if self.exported else min(syncer_until, export_until)
        # Neither learners nor evaluator know that the job is complete before the model is exported.
        known_at = export_until if self.exported_at is None else self.exported_at
        if process.role is Role.EVALUATOR:
            longest = known_at + self.limits.complete_evaluator_seconds
            return min(syncer_until, self._restarts_until(process), longest)
        longest = known_at + self.limits.complete_learner_seconds
        return longest if self.exported else min(syncer_until, longest)

    def _restarts_until(self, process: Process) -> float:
        """Until when a complete run is delayed by a process that exited; infinite: it runs."""
        if process.state is State.RUNNING:
            return float("inf")
        if process.state is not State.BACK_OFF:
            return self._closing_at
        failing_at = self._closing_at if self._failing_at is None else self._failing_at
        return failing_at + self.limits.restarting_seconds

    def _running(self) -> list[Process]:
        return [p for p in self.processes.values() if p.state is State.RUNNING]

    def _kill(self, process: Process) -> Kill:
        process.killed = True
        return Kill(name=process.name)
