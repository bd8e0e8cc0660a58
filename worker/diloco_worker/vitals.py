"""
A learner's signs of life, left by its link: it hears of each step, so the training loop pays
nothing for them.
"""

from __future__ import annotations

from diloco.health import Health, HealthFile
from diloco_worker.core.messages import LinkState, TrainerState


class Vitals:
    """
    Puts what trainer and syncer said last into a health file.

    Ready means: trains in the job. Progress is an optimizer step; before the first one waiting for
    the syncer is no standstill.
    """

    def __init__(self, file: HealthFile) -> None:
        self._file = file
        self._trainer: TrainerState | None = None
        self._progress_at: float | None = None

    @property
    def due_at(self) -> float | None:
        """When the next sign is due; None: never."""
        return self._file.due_at()

    def heard(self, state: TrainerState, now: float) -> None:
        """The trainer's newest state."""
        before, self._trainer = self._trainer, state
        if not state.in_place:
            self._progress_at = None
        elif before is None or not before.in_place or state.local_step > before.local_step:
            self._progress_at = now

    def tell(self, said: LinkState, now: float) -> None:
        """Leave a sign, if it is time."""
        trainer = self._trainer
        in_place = trainer is not None and trainer.in_place
        ready = in_place and said.connected and not said.refused_exit
        if ready and trainer is not None:
            why = f"training, local step {trainer.local_step}"
        else:
            why = said.text or "joining the job"
        self._leave(now, ready=ready, why=why)

    def leave(self, reason: str, now: float) -> None:
        """The last sign of this life."""
        self._leave(now, ready=False, why=f"has left the job: {reason}", last=True)

    def _leave(self, now: float, *, ready: bool, why: str, last: bool = False) -> None:
        progress_at = now if self._progress_at is None else self._progress_at
        self._file.write(Health(at=now, ready=ready, why=why, progress_at=progress_at), now=last)
