"""What a trainer in a job has as one process (joined.py) and as one rank of several (distributed.py)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from diloco.errors import EXIT_REFUSED
from diloco.journal.background import BackgroundWriter
from diloco.spec import RunSpec
from diloco_worker.core import trainer as core
from diloco_worker.core.ledger import check_tokens
from diloco_worker.trainer.buffers import Loaded, other_type
from diloco_worker.trainer.kept import KeptState
from diloco_worker.trainer.loss import LossReader
from diloco_worker.trainer.optimizer_steps import OptimizerSteps
from diloco_worker.trainer.runqueue import RunQueue
from diloco_worker.trainer.termination import Termination

log = logging.getLogger(__name__)

LATE_STEPS = 20
"""So many steps of a loop after the end of the job are no last ones of an epoch."""


class Replicated(Protocol):
    """A replica of the model, or a rank's part of one."""

    @property
    def refused(self) -> str:
        """Why the learner cannot continue with its model; "": it can."""

    @property
    def problem(self) -> str:
        """What the program trains that the job does not, or the other way round; "": nothing was seen."""

    def apply(self, fragment: int) -> None:
        """Overwrite a fragment from its inbox."""

    def close(self) -> None:
        """Release the shared memory."""


class JobTrainer:
    """Implements what `Learner` needs of the core, the files and the process; subclasses make the attributes."""

    name: str
    _model: nn.Module
    _run_spec: RunSpec
    _core: core.TrainerCore
    _replica: Replicated
    _kept: KeptState
    _loss: LossReader
    _optimizer_steps: OptimizerSteps
    _run_queue: RunQueue
    _termination: Termination
    _journal: BackgroundWriter | None
    _result_age: int | None = None
    """Of the oldest result that this step applied, in global steps since its merge; None: it applied none."""
    _loaded: Loaded | None = None
    """From `connect` to the first step."""
    _late = 0
    """Steps after the end of the job, or SIGTERM."""

    @property
    def _leads(self) -> bool:
        """Whether this process states what is the same in all ranks."""
        return True

    @property
    def _ending(self) -> bool:
        """Whether a process of this learner received SIGTERM."""
        return self._termination.received

    @property
    def closed(self) -> bool:
        """Whether it has left the job."""
        return self._core.closed

    @property
    def step_index(self) -> int:
        """See `Learner.step_index`; the same in all ranks."""
        return self._core.link_state.step

    @property
    def total_steps(self) -> int:
        """See `Learner.total_steps`; the same in all ranks."""
        return self._core.link_state.steps or self._run_spec.steps

    @property
    def resumed(self) -> bool:
        """See `Learner.resumed`; the same in all ranks."""
        return self._core.resumed

    @property
    def local_step(self) -> int:
        """See `Learner.local_step`; the same in all ranks."""
        return self._core.ledger.local_step

    def keep(self, objects: Mapping[str, Any]) -> None:
        """See `Learner.keep`; each rank keeps its own state."""
        self._kept.keep(objects, local_step=self.local_step)

    def _before_step(self, *_: object) -> None:
        """Of an optimizer; before the first one, warn if the program has written over what `connect` loaded."""
        if torch.compiler.is_compiling():
            return
        loaded, self._loaded = self._loaded, None
        if loaded is not None and (text := loaded.written()):
            self._written(text)

    def _written(self, text: str) -> None:
        """The program has written over what `connect` loaded: a sentence."""
        log.warning("%s", text)

    def _check_step(self, tokens: int, loss: float | torch.Tensor | None) -> None:
        """
        Refuse a call of `step` before it has an effect: a state of the link that was read would be lost.

        Raises:
            ValueError: see `Learner.step`.
        """
        check_tokens(tokens)
        self._loss.read(loss)

    def _check_model(self) -> None:
        """End if the program has changed what it trains; warn if its loop does not end."""
        self._loaded = None
        if text := self._replica.refused:
            self._end(EXIT_REFUSED, text)
        self._core.checks.other_model = self._replica.problem
        self._late += self._core.link_state.complete or self._ending
        if self._late == LATE_STEPS and self._leads:
            log.warning(
                "%s: learner.step() was called %d times since the job was complete or SIGTERM was received; end the "
                "loop when learner.done is true: what is trained from now on is lost", self.name, LATE_STEPS,
            )  # fmt: skip

    def _other_type(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        """Of an optimizer that begins a step: see `OptimizerSteps`."""
        if not self._core.closed:
            self._end(EXIT_REFUSED, other_type(self._model, parameter, dtype))

    def _end(self, code: int, text: str) -> NoReturn:
        """Leave the job, and end the process with this sentence."""
        raise NotImplementedError

    def _show(self, text: str) -> None:
        self._carry_out([core.ShowProgress(f"{self.name}: {text}")])

    def _carry_out(self, actions: Sequence[core.Action]) -> object:
        """Carry out the actions in order."""
        raise NotImplementedError

    def _apply(self, fragment: int) -> None:
        self._replica.apply(fragment)
        if version := self._core.ledger.versions[fragment]:
            self._result_age = max(self._result_age or 0, self.step_index - version[1])

    def _append(self, line: Mapping[str, object]) -> None:
        """Write a step's line to steps.jsonl, with what else is known of it."""
        if self._journal is None:
            return
        known = {
            "learningRate": self._optimizer_steps.learning_rate, "resultAge": self._result_age,
        }  # fmt: skip
        self._journal.append({**line, **{n: v for n, v in known.items() if v is not None}})

    def _release(self) -> None:
        """Close the files, the memory and the handlers of a process that has left the job."""
        self._kept.forget_saved()
        if self._journal is not None:
            self._journal.close()
        self._replica.close()
        self._run_queue.close()
        self._termination.restore()
