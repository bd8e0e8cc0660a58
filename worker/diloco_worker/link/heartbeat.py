"""
The learner's health file, written by its link: it receives the state of every step, so the training
loop does no work for it.
"""

from __future__ import annotations

from diloco.runtime.health import Health, HealthFile
from diloco_worker.core.messages import LinkState, TrainerState


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

    @property
    def due_at(self) -> float | None:
        """When the next report is due; None: never."""
        return self._file.due_at()

    def observe(self, state: TrainerState, now: float) -> None:
        """Take the trainer's newest state."""
        previous, self._trainer = self._trainer, state
        if not state.model_loaded:
            self._progress_at = None
        elif (
            previous is None or not previous.model_loaded or state.local_step > previous.local_step
        ):
            self._progress_at = now

    def report(self, link: LinkState, now: float) -> None:
        """Write the file if a report is due."""
        trainer = self._trainer
        model_loaded = trainer is not None and trainer.model_loaded
        ready = model_loaded and link.connected and not link.refused_exit
        if ready and trainer is not None:
            why = f"training, local step {trainer.local_step}"
        else:
            why = link.text or "joining the job"
        self._write(now, ready=ready, why=why)

    def leave(self, reason: str, now: float) -> None:
        """Write the last report of this process."""
        self._write(now, ready=False, why=f"has left the job: {reason}", last=True)

    def settle(self, timeout_seconds: float) -> None:
        """Return when the last report is in the file, or after the time."""
        self._file.settle(timeout_seconds)

    def _write(self, now: float, *, ready: bool, why: str, last: bool = False) -> None:
        progress_at = now if self._progress_at is None else self._progress_at
        self._file.write(Health(at=now, ready=ready, why=why, progress_at=progress_at), now=last)
