"""
What the agent does about its one process: start, restart, terminate, exit.

    WAITING --> RUNNING --exit--> BACK_OFF --delay over--> RUNNING
                RUNNING --exit 0--> BACK_OFF with a long delay (its work is done)
                RUNNING --refused, limit reached, never joined--> FINISHED
                RUNNING --stop requested--> TERMINATING --exit--> FINISHED
                RUNNING --the unit's run ends--> RESTARTING --exit--> BACK_OFF without a delay

The process of a learner of several pods starts and ends with those of the other pods (`unit`).

Pure. Events come in through `Policy.handle(event, now)`; decisions are returned as values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from diloco.errors import EXIT_DONE, EXIT_REFUSED
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
from diloco_agent.unit import FOLLOW_SECONDS, Follower, Unit

EXIT_FAILED = 1


class Role(StrEnum):
    """What the process is for."""

    LEARNER = "learner"
    SYNCER = "syncer"
    EVALUATOR = "evaluator"


class State(StrEnum):
    """State of the process."""

    WAITING = "Waiting"
    """Not started yet."""
    RUNNING = "Running"
    BACK_OFF = "BackOff"
    """Exited; restarts at `Policy.start_at`."""
    RESTARTING = "Restarting"
    """Got SIGTERM because the run of its learner's pods is over; restarts with them."""
    TERMINATING = "Terminating"
    """Got SIGTERM because the container stops."""
    FINISHED = "Finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All durations and bounds of the policy."""

    leave_seconds: float
    """Between SIGTERM and SIGKILL."""
    learner_restarts: int | None = None
    """runPolicy.learnerRestartLimit."""
    first_backoff_seconds: float = 0.25
    """Before the second restart in a row; the first is immediate."""
    max_backoff_seconds: float = 60.0
    healthy_seconds: float = 60.0
    """A run this long resets the back-off; so does the kill of a process that was ready."""
    done_seconds: float = 300.0
    """A process whose work is done restarts after this, in case spec.steps was raised."""
    crash_loop_exits: int = 10
    """
    Exits in a row after which a syncer or evaluator that was never healthy fails, and ends after which a
    learner that never joined the job does.
    """
    never_joined_seconds: float = 1800.0
    """Since the first of those ends of a learner: a disk, data set or name server may be away for a while."""


# ---------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The process exited."""

    code: int
    """Exit code; minus the signal's number when a signal ended it."""
    last_line: str = ""
    left: str = ""
    """Why a learner left the job, as it reported; "": it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The process reports that it is ready, or that it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The container must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The container before this one was killed with its agent, and the node runs since: no memory was left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


Event = Exited | Ready | StopRequested | Died | Tick


# ---------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the process."""

    restarts: int
    """Number of its earlier starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Send SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Send SIGKILL to the process and its helpers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitContainer:
    """Exit the container."""

    code: int
    reason: str = ""
    """For the termination log: Refused, RestartLimit, NeverJoined, CrashLoop; "": write none."""
    message: str = ""


Decision = Start | Terminate | Kill | ExitContainer


@dataclass(slots=True, kw_only=True)
class Policy:
    """State of the process in this container."""

    role: Role
    name: str
    """For messages: "eu/0", "syncer"."""
    limits: Limits
    unit: Unit | None = None
    """The pods of its learner; None: it has no others."""
    starts: int = 0
    """Starts of the process so far, in earlier containers too."""
    crashes: int = 0
    """Crashes so far, in earlier containers too."""
    joined: bool = False
    """A learner: it has joined the job, in this container or an earlier one of its pod."""
    state: State = State.WAITING
    message: str = "not started yet"
    """Why the process does not run, when it does not."""
    exited: bool = False
    """It exited at least once in this container."""
    started_at: float = 0.0
    start_at: float = 0.0
    waits: bool = False
    """It would start now, but the other pods of its learner are not ready."""
    _exits: int = 0
    """In a row, without a healthy run between them."""
    _ever_healthy: bool = False
    _was_ready: bool = False
    """In the current run."""
    _broken_starts: BrokenStarts = field(default_factory=BrokenStarts)
    _kill_at: float = 0.0

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Handle one event; return what to do about it and about the time."""
        if self.state is State.FINISHED:
            return []
        match event:
            case Exited():
                return self._on_exit(event, now)
            case StopRequested():
                return self._on_stop(now)
            case Died():
                return self._on_died()
            case Ready():
                self._ever_healthy = self.joined = self._was_ready = True
            case Tick():
                pass
        if self.unit is not None and (decisions := self._follow(self.unit, now)):
            return decisions
        return self._due(now)

    def wake_at(self) -> float | None:
        """When the next Tick is due; None: no deadline."""
        if self.state is State.BACK_OFF:
            return None if self.waits else self.start_at
        ending = self.state in (State.TERMINATING, State.RESTARTING)
        return self._kill_at if ending else None

    def _follow(self, unit: Unit, now: float) -> list[Decision]:
        """Do what the other pods of the learner require."""
        if self.state is State.RUNNING and (reason := unit.must_end(now)):
            self.state, self.message = (
                State.RESTARTING,
                f"restarting with the other pods of its learner: {reason}",
            )
            self._kill_at = now + self.limits.leave_seconds
            return [Terminate()]
        if self.state is State.RESTARTING and unit.has_lost_peer(now):
            self._kill_at = min(self._kill_at, now + FOLLOW_SECONDS)
        if self.state is State.BACK_OFF and (cause := unit.fault(now)):
            self.crashes += 1
            if failure := self._limit_reached(cause) or self._never_joined(cause, now):
                return self._finish(failure)
        return []

    def _on_exit(self, event: Exited, now: float) -> list[Decision]:
        if self.state is State.TERMINATING:
            return self._finish(ExitContainer(code=EXIT_DONE))
        self.exited = True
        if self.unit is not None:
            by_itself = self.state is State.RUNNING
            self.unit.exited(event.code, event.last_line, now, by_itself=by_itself)
            if not by_itself:
                self.state, self.start_at = State.BACK_OFF, now
                return []
        healthy = now - self.started_at >= self.limits.healthy_seconds
        self._ever_healthy = self._ever_healthy or healthy
        # A kill from outside does not predict how the next run ends.
        killed = self._was_ready and not is_crash(event.code)
        self._exits = 1 if healthy or killed else self._exits + 1
        self.state = State.BACK_OFF
        # Rank 0 decides when the other ranks of a learner start again.
        follows = isinstance(self.unit, Follower)
        leads = self.role is Role.LEARNER and not follows
        early = leads and is_early_exit(event.code, event.left)
        # A syncer never exits by itself: it was signalled.
        if event.code == EXIT_DONE and self.role is not Role.SYNCER and not early:
            self._exits = 0
            delay = 0.0 if follows else self.limits.done_seconds
            self.start_at, self.message = now + delay, "done"
            return []
        cause = exit_cause(event.code, EARLY_EXIT if early else event.last_line)
        if failure := self._failure(event, cause, now):
            return self._finish(failure)
        delay = backoff_seconds(
            self._exits,
            immediate=1,
            first_seconds=self.limits.first_backoff_seconds,
            max_seconds=self.limits.max_backoff_seconds,
        )
        self.start_at, self.message = now + delay, f"exited ({cause}); restarts after {delay:g} s"
        return []

    def _on_died(self) -> list[Decision]:
        if self.role is not Role.LEARNER:
            return []
        # Of a learner of several pods, each counts these for itself: rank 0 only sees that a pod is gone.
        self.crashes += 1
        failure = self._limit_reached("its container was killed, for example by the OOM killer")
        return self._finish(failure) if failure else []

    def _failure(self, event: Exited, cause: str, now: float) -> ExitContainer | None:
        """Why this exit is the last one; None when the process restarts."""
        if event.code == EXIT_REFUSED:
            message = refusal(self.name, event.last_line)
            return ExitContainer(code=EXIT_REFUSED, reason="Refused", message=message)
        if self.role is Role.LEARNER:
            if self.unit is not None and event.code != EXIT_DONE:
                return None  # the unit decides which of its exits count
            self.crashes += counts(event.code)
            broken = is_broken_start(event.code, event.left)
            return self._limit_reached(cause) or (
                self._never_joined(cause, now) if broken else None
            )
        if self._ever_healthy or self._exits < self.limits.crash_loop_exits:
            return None
        message = (
            f"the {self.name} exited {self._exits} times in a row and was never ready ({cause})"
        )
        return ExitContainer(code=EXIT_FAILED, reason="CrashLoop", message=message)

    def _limit_reached(self, cause: str) -> ExitContainer | None:
        limit = self.limits.learner_restarts
        message = limit_message(self.name, crashes=self.crashes, limit=limit, cause=cause)
        if not message:
            return None
        return ExitContainer(code=EXIT_FAILED, reason="RestartLimit", message=message)

    def _never_joined(self, cause: str, now: float) -> ExitContainer | None:
        """Count a broken start of a learner that has not joined yet; it fails after some of them."""
        if self.joined:
            return None
        message = self._broken_starts.count(
            self.name, now=now, limit=self.limits.crash_loop_exits,
            seconds=self.limits.never_joined_seconds, cause=cause,
        )  # fmt: skip
        if not message:
            return None
        return ExitContainer(code=EXIT_FAILED, reason="NeverJoined", message=message)

    def _on_stop(self, now: float) -> list[Decision]:
        if self.state is State.TERMINATING:
            return []
        self.message = "stopping"
        if self.unit is not None:
            self.unit.stop()
        if self.state not in (State.RUNNING, State.RESTARTING):
            return self._finish(ExitContainer(code=EXIT_DONE))
        if self.state is State.RUNNING:
            self._kill_at = now + self.limits.leave_seconds
        self.state = State.TERMINATING
        return [Terminate()]

    def _due(self, now: float) -> list[Decision]:
        ending = self.state in (State.TERMINATING, State.RESTARTING)
        if ending and now >= self._kill_at:
            self._kill_at = float("inf")
            return [Kill()]
        due = self.state is State.BACK_OFF and now >= self.start_at
        if not due and self.state is not State.WAITING:
            return []
        if self.unit is not None:
            self.waits = not self.unit.may_start(now)
            if self.waits:
                self.message = (
                    f"waiting for the other pods of its learner: {self.unit.waits_for(now)}"
                )
                return []
            self.unit.started(now)
        self.state, self.started_at, self._was_ready = State.RUNNING, now, False
        self.starts += 1
        return [Start(restarts=self.starts - 1)]

    def _finish(self, decision: ExitContainer) -> list[Decision]:
        self.state = State.FINISHED
        return [decision]
