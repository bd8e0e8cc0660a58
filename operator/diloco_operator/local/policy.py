"""
What the supervisor does next, and when: who is started, restarted, asked to leave, given up.

Pure. Facts come in through `Policy.handle(event, now)`, decisions go out as values; nothing here
reads a clock or touches a process.

    WARMING --kernels compiled--> STARTING --syncer serves--> RUNNING
                                      --complete, interrupt, failure--> CLOSING --> CLOSED

Closing goes learners, evaluator, syncer: each leaves while those it still needs are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.errors import EXIT_DONE, EXIT_REFUSED, EXIT_USAGE
from diloco_operator.local.events import (
    Broken,
    Close,
    Completed,
    Decision,
    Event,
    Exited,
    Exported,
    GiveUp,
    Interrupted,
    Kill,
    Limits,
    Outcome,
    Phase,
    Restart,
    Role,
    Served,
    Start,
    State,
    Terminate,
    Tick,
)
from diloco_operator.local.restarts import is_own_fault, pause_seconds
from diloco_operator.local.words import ending


@dataclass(slots=True, kw_only=True)
class Process:
    """One process over all its lives."""

    name: str
    role: Role
    state: State = State.WAITING
    restarts: int = 0
    faults: int = 0
    """Restarts that were its own fault."""
    failures: int = 0
    """Deaths in a row without a healthy life between them."""
    unserved: int = 0
    """Lives in a row in which the syncer never served."""
    served: bool = False
    """It served in this life."""
    last_code: int | None = None
    """How its last life ended."""
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
    """Why the run ended, one sentence."""
    forced: bool = False
    """Interrupted twice: nobody was waited for."""
    processes: dict[str, Process] = field(init=False)
    _ever_served: bool = False
    _begun_at: float | None = None
    _closing_at: float = 0.0
    _exported: bool = False
    _hurry: bool = False

    def __post_init__(self) -> None:
        """Give every process its place."""
        roles = {"kernels": Role.KERNELS, "syncer": Role.SYNCER}
        roles |= dict.fromkeys(self.learners, Role.LEARNER)
        if self.evaluator:
            roles["evaluator"] = Role.EVALUATOR
        self.processes = {name: Process(name=name, role=role) for name, role in roles.items()}

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take in one fact; say what is to be done about it and about the time."""
        if self._begun_at is None:
            self._begun_at = now
        said: list[Decision] = []
        match event:
            case Served():
                said += self._on_served(event, now)
            case Exited():
                said += self._on_exit(event, now)
            case Completed():
                said += self._close(Outcome.COMPLETE, "the final step is done", now)
            case Exported():
                self._exported = True
            case Interrupted():
                said += self._on_interrupt(now)
            case Broken():
                said += self._close(Outcome.FAILED, event.message, now)
            case Tick():
                pass
        return said + self._due(now)

    def of(self, *roles: Role) -> list[Process]:
        """The processes with one of these roles, in the order of the plan."""
        return [one for one in self.processes.values() if one.role in roles]

    # ------------------------------------------------------------------------------ facts

    def _on_served(self, event: Served, now: float) -> list[Decision]:
        self._ever_served = self.processes["syncer"].served = True
        if self.phase is not Phase.STARTING:
            return []
        self.phase = Phase.RUNNING
        if not event.complete:
            return []
        owed = [] if event.evaluated else self.of(Role.EVALUATOR)
        started = [said for one in owed for said in self._start(one, now)]
        return started + self._close(Outcome.COMPLETE, "the final step was done before", now)

    def _on_exit(self, event: Exited, now: float) -> list[Decision]:
        process = self.processes[event.name]
        healthy = now - process.started_at >= self.limits.healthy_seconds
        process.failures = 1 if healthy else process.failures + 1
        process.unserved = 0 if process.served else process.unserved + 1
        process.last_code = event.code
        if self._is_final(process):
            process.state = State.DONE if event.code == EXIT_DONE else State.STOPPED
            return []
        if process.role is Role.EVALUATOR and event.code == EXIT_REFUSED:
            process.state = State.REFUSED
            return [GiveUp(name=process.name, last_line=event.last_line)]
        if message := self._verdict(process, event):
            process.state = State.REFUSED if event.code == EXIT_REFUSED else State.STOPPED
            return self._close(Outcome.FAILED, message, now)
        return self._back_off(process, event, now)

    def _is_final(self, process: Process) -> bool:
        """Whether a process that just ended has no further life."""
        if process.role is Role.KERNELS or process.terminated_at is not None or process.killed:
            return True
        if self.phase is not Phase.CLOSING:
            return False
        return not self._is_owed(process)

    def _is_owed(self, process: Process) -> bool:
        """Whether the closing run still needs it: for the final score, for the exported model."""
        if self.outcome is not Outcome.COMPLETE or self.forced:
            return False
        if process.role is Role.EVALUATOR:
            return process.last_code != EXIT_DONE and not self._hurry
        return process.role is Role.SYNCER

    def _verdict(self, process: Process, event: Exited) -> str:
        """Why this death ends the job; "" when it does not."""
        why = f"{ending(event.code)}: {event.last_line}" if event.last_line else ending(event.code)
        if process.role is Role.SYNCER:
            hopeless = not self._ever_served and event.code in (EXIT_USAGE, EXIT_REFUSED)
            if hopeless or process.unserved >= self.limits.syncer_starts:
                times = "once" if process.unserved == 1 else f"{process.unserved} times in a row"
                return f"the syncer was started {times} and did not serve ({why})"
            return ""
        if process.role is not Role.LEARNER:
            return ""
        if event.code == EXIT_REFUSED:
            said = event.last_line or "its log says no more"
            return f"learner {process.name} is refused for good: {said}"
        process.faults += is_own_fault(event.code)
        limit = self.limits.learner_restarts
        if limit is not None and process.faults > limit:
            return (
                f"learner {process.name} ended {process.faults} times by its own fault, "
                f"spec.runPolicy.learnerRestartLimit is {limit} ({why})"
            )
        return ""

    def _back_off(self, process: Process, event: Exited, now: float) -> list[Decision]:
        pause = self.pause_seconds(process)
        process.state = State.BACK_OFF
        if event.code == EXIT_DONE:
            # The run may be complete, which the syncer says a moment later: no restart as yet.
            process.start_at = now + max(pause, self.limits.left_seconds)
            return []
        process.start_at = now + pause
        return [self._restart(process, event, pause)]

    def _restart(self, process: Process, event: Exited, delay_seconds: float) -> Restart:
        process.restarts += 1
        return Restart(
            name=process.name,
            code=event.code,
            last_line=event.last_line,
            restarts=process.restarts,
            delay_seconds=delay_seconds,
        )

    def pause_seconds(self, process: Process) -> float:
        """Pause before the next start: doubles with each death in a row; a syncer's first is 0."""
        return pause_seconds(
            process.failures,
            at_once=1 if process.role is Role.SYNCER else 0,
            first_seconds=self.limits.back_off_seconds,
            most_seconds=self.limits.back_off_most_seconds,
        )

    def _on_interrupt(self, now: float) -> list[Decision]:
        if self.phase is not Phase.CLOSING:
            return self._close(Outcome.SUSPENDED, "interrupted", now)
        if self.outcome is Outcome.COMPLETE and not self._hurry:
            self._hurry = True
            return []
        self.forced = True
        return [self._kill(one) for one in self.processes.values() if one.state is State.RUNNING]

    # ------------------------------------------------------------------------------ time

    def _due(self, now: float) -> list[Decision]:
        said: list[Decision] = []
        deadline = self.limits.active_seconds
        if deadline is not None and self._begun_at is not None and now - self._begun_at >= deadline:
            message = (
                f"the job ran {deadline:g} s, the limit of spec.runPolicy.activeDeadlineSeconds"
            )
            said += self._close(Outcome.FAILED, message, now)
        ready = self.processes["kernels"].state in (State.DONE, State.STOPPED)
        if self.phase is Phase.WARMING and ready:
            self.phase = Phase.STARTING
        for process in self.processes.values():
            if self._may_start(process, now):
                said += self._start(process, now)
        if self.phase is Phase.CLOSING:
            said += self._closing(now)
        return said

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
        said: list[Decision] = []
        if process.state is State.BACK_OFF and process.last_code == EXIT_DONE:
            said.append(self._restart(process, Exited(name=process.name, code=EXIT_DONE), 0.0))
        process.state = State.RUNNING
        process.started_at = now
        process.served = False
        return [*said, Start(name=process.name)]

    def _close(self, outcome: Outcome, message: str, now: float) -> list[Decision]:
        if self.phase in (Phase.CLOSING, Phase.CLOSED):
            return []
        self.phase, self._closing_at = Phase.CLOSING, now
        self.outcome, self.message = outcome, message
        for process in self.processes.values():
            resting = process.state is State.BACK_OFF and not self._is_owed(process)
            if resting or process.state is State.WAITING:
                left = resting and process.last_code == EXIT_DONE
                process.state = State.DONE if left else State.STOPPED
        return [Close(outcome=outcome, message=message)]

    def _closing(self, now: float) -> list[Decision]:
        """Ask role after role to leave; a role's turn comes when the one before is gone."""
        for roles in ((Role.KERNELS, Role.LEARNER), (Role.EVALUATOR,), (Role.SYNCER,)):
            left = [p for p in self.of(*roles) if p.state in (State.RUNNING, State.BACK_OFF)]
            if left:
                return [one for process in left for one in self._usher(process, now)]
        self.phase = Phase.CLOSED
        return []

    def _usher(self, process: Process, now: float) -> list[Decision]:
        if process.terminated_at is not None:
            if now - process.terminated_at >= self.limits.leave_seconds and not process.killed:
                return [self._kill(process)]
            return []
        if now < self._closing_at + self._patience_seconds(process.role):
            return []
        if process.state is State.BACK_OFF:
            process.state = State.STOPPED
            return self._closing(now)
        process.terminated_at = now
        return [Terminate(name=process.name)]

    def _patience_seconds(self, role: Role) -> float:
        """How long after closing began a process may stay by itself."""
        if self.outcome is not Outcome.COMPLETE or self.forced:
            return 0.0
        if role is Role.SYNCER:
            return 0.0 if self._exported else self.limits.complete_export_seconds
        if self._hurry:
            return 0.0
        if role is Role.EVALUATOR:
            return self.limits.complete_evaluator_seconds
        return self.limits.complete_learner_seconds

    def _kill(self, process: Process) -> Kill:
        process.killed = True
        return Kill(name=process.name)
