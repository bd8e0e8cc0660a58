"""
The words between the supervisor and its policy: roles, states, limits, events in, decisions out.

Pure values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a process is for."""

    KERNELS = "kernels"
    SYNCER = "syncer"
    LEARNER = "learner"
    EVALUATOR = "evaluator"


class Phase(StrEnum):
    """Where the run is."""

    WARMING = "Warming"
    STARTING = "Starting"
    RUNNING = "Running"
    CLOSING = "Closing"
    CLOSED = "Closed"


class State(StrEnum):
    """Where one process is."""

    WAITING = "Waiting"
    """Not started yet."""
    RUNNING = "Running"
    BACK_OFF = "BackOff"
    """Ended; started again at `Process.start_at`."""
    DONE = "Done"
    """Ended as it should."""
    STOPPED = "Stopped"
    """Ended because the run ends."""
    REFUSED = "Refused"
    """The syncer will never take it."""


class Outcome(StrEnum):
    """How a run ended; also the state that people see."""

    COMPLETE = "Complete"
    SUSPENDED = "Suspended"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every duration and bound of the policy."""

    back_off_seconds: float = 0.5
    back_off_most_seconds: float = 30.0
    healthy_seconds: float = 60.0
    """A life this long makes the next pause the first one again."""
    left_seconds: float = 2.0
    """Least pause after exit 0: the run may be complete, and the syncer has not said so yet."""
    syncer_starts: int = 5
    """Starts of the syncer in a row of which none served before the job is Failed."""
    learner_restarts: int | None = None
    """runPolicy.learnerRestartLimit."""
    active_seconds: float | None = None
    """runPolicy.activeDeadlineSeconds."""
    complete_learner_seconds: float = 60.0
    """After completion a learner may take this long to leave by itself."""
    complete_evaluator_seconds: float = 120.0
    """After completion the evaluator may take this long to score the final model."""
    complete_export_seconds: float = 120.0
    """After completion the syncer may take this long to export the model."""
    leave_seconds: float = 30.0
    """A process that was asked to leave is killed after this."""


# ---------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The syncer serves."""

    complete: bool = False
    """It already has the final step: this is a finished job that was started again."""
    evaluated: bool = True
    """The final step has been scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A process ended."""

    name: str
    code: int
    """Exit code; minus the signal's number when a signal ended it."""
    last_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The syncer has done the final step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The final model is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """Somebody wants the run to end: Ctrl-C, SIGTERM, `diloco suspend`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The supervisor met something it cannot go on with."""

    message: str


Event = Tick | Served | Exited | Completed | Exported | Interrupted | Broken


# ---------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start this process now."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Ask it to leave (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End it and its helpers at once (SIGKILL)."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """It ended and will be started again: for the event log and for people."""

    name: str
    code: int
    last_line: str
    restarts: int
    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """It is not started again, and the run goes on without it: for people."""

    name: str
    last_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """The run ends; said once, when closing begins."""

    outcome: Outcome
    message: str


Decision = Start | Terminate | Kill | Restart | GiveUp | Close
