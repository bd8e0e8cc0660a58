"""
Writes tape.jsonl: what `core.trainer` decided by clock and network in each local step, from a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from diloco.journal import tape
from diloco.journal.background import BackgroundWriter
from diloco.journal.replay_files import processor
from diloco.journal.writer import JournalWriter
from diloco.model.digests import names
from diloco.model.fragments import Layout
from diloco_worker.core import trainer as core

PART_BYTES = 32 << 20
"""Size of each of the two parts of tape.jsonl: about 200,000 steps."""


class Tape:
    """
    The tape of one process.

    Args:
        directory: of the learner.
        learner: its name.
        restarts: see `LearnerSettings.restarts`.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, directory: Path, *, learner: str, restarts: int) -> None:
        self._learner, self._restarts = learner, restarts
        self._writer = BackgroundWriter(JournalWriter(directory / tape.TAPE), part_bytes=PART_BYTES)
        self._incarnation = self._epoch = 0

    def begin(
        self, trainer: core.TrainerCore, layout: Layout, *, found: int, source: str, optimizers: str
    ) -> None:
        """
        The process has joined.

        Args:
            trainer: has the counters.
            layout: of the model.
            found: local step of the newest local checkpoint; 0: there was none.
            source: see `diloco.journal.tape.Begin`.
            optimizers: likewise.
        """
        ledger, state = trainer.ledger, trainer.link_state
        self._incarnation, self._epoch = state.incarnation, state.epoch
        self._append(
            tape.Begin(
                tape=tape.VERSION,
                learner=self._learner,
                incarnation=state.incarnation,
                epoch=state.epoch,
                restarts=self._restarts,
                local_step=ledger.local_step,
                tokens=ledger.total_tokens,
                step=state.step,
                found=found,
                source=source,
                optimizers=optimizers,
                held=_held(range(len(layout.fragments)), trainer),
                fragments=tuple(
                    tape.Tensors(fragment=f.index, names="\n".join(names(f)))
                    for f in layout.fragments
                ),
                peer_step=state.peer_local_step if trainer.recovered_from else None,
                machine=machine(),
            )
        )

    def step(self, trainer: core.TrainerCore, actions: Sequence[core.Action], *, seen: int) -> None:
        """
        A step was counted.

        Args:
            trainer: after `TrainerCore.step`.
            actions: that it returned.
            seen: global step that the program saw during the step.
        """
        results = [action.fragment for action in actions if isinstance(action, core.ApplyFragment)]
        self._append(
            tape.Step(
                incarnation=self._incarnation,
                local_step=trainer.ledger.local_step,
                seen=seen,
                step=trainer.link_state.step,
                results=_held(results, trainer, known=self._epoch) or None,
            )
        )

    def end(self, trainer: core.TrainerCore, reason: str, digests: Sequence[bytes]) -> None:
        """The process leaves the job, with parameters that have these digests, by fragment."""
        self._append(
            tape.End(
                incarnation=self._incarnation,
                local_step=trainer.ledger.local_step,
                reason=reason,
                parameters=tuple(
                    tape.Digests(fragment=fragment, digests=digest.hex())
                    for fragment, digest in enumerate(digests)
                ),
            )
        )

    def close(self) -> None:
        """Write what is waiting."""
        self._writer.close()

    def _append(self, record: tape.Begin | tape.Step | tape.End) -> None:
        self._writer.append(tape.encode(record))


def _held(
    fragments: Iterable[int], trainer: core.TrainerCore, *, known: int = 0
) -> tuple[tape.Held, ...]:
    """The versions of fragments; their epoch is left out where it is the one that is known."""
    found = []
    for fragment in fragments:
        epoch, step = trainer.ledger.versions[fragment] or (known, -1)
        stated = None if epoch == known else epoch
        found.append(tape.Held(fragment=fragment, step=step, epoch=stated))
    return tuple(found)


def machine() -> str:
    """What the last bits of a sum may depend on."""
    return (
        f"{processor()}; torch {torch.__version__} with {torch.backends.cpu.get_cpu_capability()}; "
        f"{torch.get_num_threads()} threads"
    )
