"""
The learner's health file, written by its link: it receives the state of every step, so the training
loop does no work for it.
"""

from __future__ import annotations

from diloco.runtime.health import Health, HealthFile
from diloco_worker.core.messages import LinkState, TrainerState

NO_STEP_SECONDS = 120.0
NO_STEP_DURATIONS = 20.0
"""Without a call of `learner.step()` for so long, and for so many of its last steps, that is a problem."""


class HealthReporter:
    """
    Writes the health of trainer and link to a health file.

    Ready means that the learner trains in the job. Progress is an optimizer step; before the first
    one, waiting for the syncer counts as progress.
    """

    def __init__(self, file: HealthFile) -> None:
        self._file = file
        self._trainer: TrainerState | None = None
        self._progress_at: float | None = None
        self._joined = False
        self._stepped = False
        """In this process: its first step may compile for many minutes."""

    @property
    def due_at(self) -> float | None:
        """When the next report is due; None: never."""
        return self._file.due_at()

    def observe(self, state: TrainerState, now: float) -> None:
        """Take the trainer's newest state."""
        previous, self._trainer = self._trainer, state
        if not state.model_loaded:
            self._progress_at = None
        elif previous is None or not previous.model_loaded:
            self._progress_at = now
        elif state.local_step > previous.local_step:
            self._progress_at, self._stepped = now, True

    def report(self, link: LinkState, now: float, *, unchanged: int = 0) -> None:
        """
        Write the file if a report is due, and at once when the learner has joined.

        Args:
            link: its state.
            now: monotonic seconds.
            unchanged: deltas in a row, of all fragments, that were all zeros; 0: few or none.
        """
        trainer = self._trainer
        if trainer is None or not (
            trainer.model_loaded and link.connected and not link.refused_exit
        ):
            self._write(now, ready=False, why=link.text or "joining the job")
            return
        first, self._joined = not self._joined, True
        why = f"training, local step {trainer.local_step}" + (f"; {link.text}" if link.text else "")
        problem, text = self._problem(trainer, now, unchanged)
        self._write(now, ready=True, why=text or why, problem=problem, at_once=first)

    def _problem(self, trainer: TrainerState, now: float, unchanged: int) -> tuple[str, str]:
        """Kind and sentence; empty: there is none."""
        silence = 0.0 if self._progress_at is None else now - self._progress_at
        if silence >= max(NO_STEP_SECONDS, NO_STEP_DURATIONS * trainer.step_seconds):
            return (
                "NoSteps" if self._stepped else "NoFirstStep",
                f"learner.step() was not called for {silence:.0f} s; call it once after each step of the "
                "optimizer",
            )
        if unchanged and not trainer.problem:
            return (
                "Unchanged",
                f"the last {unchanged} deltas were zero, so this learner has no part in the result; train the model "
                "that Learner.connect was given, in place and not a copy of its parameters, and check the learning "
                "rate",
            )
        return trainer.problem, trainer.problem_text

    def leave(self, reason: str, now: float) -> None:
        """Write the last report of this process."""
        self._write(now, ready=False, why=f"has left the job: {reason}", left=reason, at_once=True)

    def settle(self, timeout_seconds: float) -> None:
        """Return when the last report is in the file, or after the time."""
        self._file.settle(timeout_seconds)

    def _write(
        self, now: float, *, ready: bool, why: str, problem: str = "", left: str = "",
        at_once: bool = False,
    ) -> None:  # fmt: skip
        progress_at = now if self._progress_at is None else self._progress_at
        health = Health(
            at=now, ready=ready, why=why, progress_at=progress_at, joined=self._joined, left=left,
            problem=problem,
        )  # fmt: skip
        self._file.write(health, now=at_once)
