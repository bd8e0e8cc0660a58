"""
The values that the supervisor and its policy exchange: roles, states, limits, events, decisions.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diloco.spec import FINAL_EVALUATION_SECONDS


class Role(StrEnum):
    """What a process is for."""

    KERNELS = "kernels"
    SYNCER = "syncer"
    LEARNER = "learner"
    EVALUATOR = "evaluator"


class Phase(StrEnum):
    """Phase of the run."""

    WARMING = "Warming"
    STARTING = "Starting"
    RUNNING = "Running"
    CLOSING = "Closing"
    CLOSED = "Closed"


class State(StrEnum):
    """State of one process."""

    WAITING = "Waiting"
    """Not started yet."""
    RUNNING = "Running"
    BACK_OFF = "BackOff"
    """Exited; restarts at `Process.start_at`."""
    DONE = "Done"
    """Exited with its work done."""
    STOPPED = "Stopped"
    """Exited because the run ends."""
    REFUSED = "Refused"
    """Rejected permanently; it does not restart."""


class Outcome(StrEnum):
    """How a run ended; also the state in status.json."""

    COMPLETE = "Complete"
    SUSPENDED = "Suspended"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All durations and bounds of the policy."""

    back_off_seconds: float = 0.5
    back_off_max_seconds: float = 30.0
    healthy_seconds: float = 60.0
    """A run this long resets the back-off."""
    early_exit_seconds: float = 2.0
    """Minimum delay after exit 0: the run may be complete although the syncer has not reported it."""
    syncer_starts: int = 5
    """Starts of the syncer in a row without serving after which the job fails."""
    learner_restarts: int | None = None
    """runPolicy.learnerRestartLimit."""
    learner_starts: int = 5
    """Ends of a learner that never joined the job after which the job fails."""
    never_joined_seconds: float = 300.0
    """Since the first of them: a disk, data set or name server may be away for a while."""
    active_seconds: float | None = None
    """runPolicy.activeDeadlineSeconds."""
    complete_learner_seconds: float = 60.0
    """After the export, how long a learner may take to exit by itself."""
    complete_evaluator_seconds: float = FINAL_EVALUATION_SECONDS
    """After the export, how long the evaluator may run to score the final model."""
    restarting_seconds: float = 120.0
    """After completion, how long evaluator and syncer are restarted, since one of them first exited."""
    complete_export_seconds: float = 3600.0
    """After completion, how long the syncer may take until the model is on disk and, if the job has one, at its URL."""
    still_waiting_seconds: float = 60.0
    """After completion, when what is waited for is first reported again; each time, the interval doubles."""
    leave_seconds: float = 30.0
    """Between SIGTERM and SIGKILL."""


# ---------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The syncer serves."""

    complete: bool = False
    """It already has the final step: a finished job was started again."""
    evaluated: bool = True
    """The final model has a validation loss."""
    unchanged: bool = False
    """As of `Completed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A process exited."""

    name: str
    code: int
    """Exit code; minus the signal's number when a signal ended it."""
    last_line: str = ""
    joined: bool = False
    """A learner: it had joined the job."""
    left: str = ""
    """A learner: why it left the job, as it reported; "": it did not."""
    no_score: str = ""
    """The evaluator: why the last model has no score, as it reported; "": it has, or there was no report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsStill:
    """No learner can train as it is."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The syncer has done the final step."""

    unchanged: bool = False
    """No merge has changed a trained parameter: the model is that of step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The final model is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The run must stop: Ctrl-C, SIGTERM, `diloco suspend`."""


Event = Tick | Served | Exited | StandsStill | Completed | Exported | Interrupted


# ---------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start this process."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Send SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Send SIGKILL to the process and its helpers."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Report that a process exited and will restart."""

    name: str
    code: int
    last_line: str
    restarts: int
    delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Report that a process does not restart and that the run continues without it."""

    name: str
    last_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Report that the run ends; once, when closing begins."""

    outcome: Outcome
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge:
    """Report what an interrupt changes while the run ends, what it waits for, or which learner did not finish."""

    message: str


Decision = Start | Terminate | Kill | Restart | Abandon | Close | Acknowledge
