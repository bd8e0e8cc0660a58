"""
What the first process of a container does next about its one child. Pure.

    WAITING --> RUNNING --died--> RESTING --pause over--> RUNNING
                RUNNING --exit 0--> RESTING for long (its work is done)
                RUNNING --refused, given up--> OVER
                RUNNING --told to stop--> LEAVING --gone--> OVER

Facts come in through `Policy.handle(event, now)`, decisions go out as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diloco.errors import EXIT_DONE, EXIT_REFUSED
from diloco_operator.local.restarts import is_own_fault, pause_seconds
from diloco_operator.local.words import ending

EXIT_GIVEN_UP = 1


class Role(StrEnum):
    """What the child is for."""

    LEARNER = "learner"
    SYNCER = "syncer"
    EVALUATOR = "evaluator"


class State(StrEnum):
    """Where the child is."""

    WAITING = "Waiting"
    """Never started."""
    RUNNING = "Running"
    RESTING = "Resting"
    """Ended; started again at `Policy.start_at`."""
    LEAVING = "Leaving"
    """Asked to leave."""
    OVER = "Over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every duration and bound of the policy."""

    leave_seconds: float
    """A child that was asked to leave is killed after this."""
    learner_restarts: int | None = None
    """runPolicy.learnerRestartLimit."""
    first_pause_seconds: float = 0.25
    """Before the second restart in a row; the first comes at once."""
    most_pause_seconds: float = 60.0
    healthy_seconds: float = 60.0
    """A life this long makes the next restart the first one again; so does one that did its work and was killed."""
    done_seconds: float = 300.0
    """A child whose work was done is started again after this, should the job go on after all."""
    hopeless_deaths: int = 10
    """Deaths in a row of a syncer or evaluator that never was healthy before we give up."""


# ---------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The child ended."""

    code: int
    """Exit code; minus the signal's number when a signal ended it."""
    last_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The child says that it does its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The container is to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


Event = Ended | Ready | Stop | Tick


# ---------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the child now."""

    restarts: int
    """Lives before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Ask it to leave (SIGTERM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End it and its helpers at once (SIGKILL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End the container."""

    code: int
    reason: str = ""
    """For the termination log: Refused, RestartLimit, CrashLoop; "": nothing to say."""
    message: str = ""


Decision = Start | Terminate | Kill | End


@dataclass(slots=True, kw_only=True)
class Policy:
    """State of one life of the container."""

    role: Role
    name: str
    """For people: "eu/0", "syncer"."""
    limits: Limits
    lives: int = 0
    """Of the child so far, those in earlier lives of the container included."""
    faults: int = 0
    """Deaths that were its own fault, likewise."""
    state: State = State.WAITING
    why: str = "not started yet"
    """One sentence for people while it does not run."""
    died: bool = False
    """It ended at least once in this container."""
    started_at: float = 0.0
    start_at: float = 0.0
    _deaths: int = 0
    """In a row, without a healthy life between them."""
    _ever_healthy: bool = False
    _worked: bool = False
    """In this life."""
    _kill_at: float = 0.0

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take in one fact; say what is to be done about it and about the time."""
        if self.state is State.OVER:
            return []
        match event:
            case Ended():
                return self._ended(event, now)
            case Stop():
                return self._stop(now)
            case Ready():
                self._ever_healthy = self._worked = True
            case Tick():
                pass
        return self._due(now)

    def wake_at(self) -> float | None:
        """When a Tick is due at the latest; None: no time matters."""
        if self.state is State.RESTING:
            return self.start_at
        return self._kill_at if self.state is State.LEAVING else None

    def _ended(self, event: Ended, now: float) -> list[Decision]:
        if self.state is State.LEAVING:
            return self._end(End(code=EXIT_DONE))
        self.died = True
        healthy = now - self.started_at >= self.limits.healthy_seconds
        self._ever_healthy = self._ever_healthy or healthy
        # A kill from outside says nothing about the next life.
        killed = self._worked and not is_own_fault(event.code)
        self._deaths = 1 if healthy or killed else self._deaths + 1
        self.state = State.RESTING
        # A syncer never ends by itself: somebody signalled it.
        if event.code == EXIT_DONE and self.role is not Role.SYNCER:
            self._deaths = 0
            self.start_at, self.why = now + self.limits.done_seconds, "done"
            return []
        how = f"{ending(event.code)}: {event.last_line}" if event.last_line else ending(event.code)
        if verdict := self._verdict(event, how):
            return self._end(verdict)
        pause = pause_seconds(
            self._deaths,
            at_once=1,
            first_seconds=self.limits.first_pause_seconds,
            most_seconds=self.limits.most_pause_seconds,
        )
        self.start_at, self.why = now + pause, f"ended ({how}); starts again after {pause:g} s"
        return []

    def _verdict(self, event: Ended, how: str) -> End | None:
        """Why this death ends the container; None when it does not."""
        if event.code == EXIT_REFUSED:
            said = event.last_line or f"{self.name} was refused for good; its log says no more"
            return End(code=EXIT_REFUSED, reason="Refused", message=said)
        if self.role is Role.LEARNER:
            self.faults += is_own_fault(event.code)
            limit = self.limits.learner_restarts
            if limit is None or self.faults <= limit:
                return None
            message = (
                f"learner {self.name} ended {self.faults} times by its own fault, "
                f"spec.runPolicy.learnerRestartLimit is {limit} ({how})"
            )
            return End(code=EXIT_GIVEN_UP, reason="RestartLimit", message=message)
        if self._ever_healthy or self._deaths < self.limits.hopeless_deaths:
            return None
        message = f"the {self.name} ended {self._deaths} times in a row and never worked ({how})"
        return End(code=EXIT_GIVEN_UP, reason="CrashLoop", message=message)

    def _stop(self, now: float) -> list[Decision]:
        if self.state is State.LEAVING:
            return []
        self.why = "told to stop"
        if self.state is not State.RUNNING:
            return self._end(End(code=EXIT_DONE))
        self.state, self._kill_at = State.LEAVING, now + self.limits.leave_seconds
        return [Terminate()]

    def _due(self, now: float) -> list[Decision]:
        if self.state is State.LEAVING and now >= self._kill_at:
            self._kill_at = float("inf")
            return [Kill()]
        resting = self.state is State.RESTING and now >= self.start_at
        if not resting and self.state is not State.WAITING:
            return []
        self.state, self.started_at, self._worked = State.RUNNING, now, False
        self.lives += 1
        return [Start(restarts=self.lives - 1)]

    def _end(self, end: End) -> list[Decision]:
        self.state = State.OVER
        return [end]
