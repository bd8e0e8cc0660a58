"""
A `Learner` that is part of a job: the training side of Algorithm 1, with a link process beside it.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import EXIT_TRY_AGAIN, DilocoError
from diloco.fragments import cut
from diloco.spec import RunSpec
from diloco_worker.checkpoint import Checkpoints, Manifest
from diloco_worker.core.ledger import Ledger
from diloco_worker.core.messages import LinkState, Phase, TrainerState
from diloco_worker.cores import CoreQueue
from diloco_worker.journal import Journal
from diloco_worker.layout import Copier, describe
from diloco_worker.learner import Learner, exit_with
from diloco_worker.process import LinkProcess
from diloco_worker.settings import LearnerSettings
from diloco_worker.shared import HostCopy, Shared
from diloco_worker.termination import Termination

log = logging.getLogger(__name__)

SAY_SECONDS = 5.0
"""How often `connect` says what it waits for."""

POLL_SECONDS = 0.2


class JoinedLearner(Learner):
    """See `Learner.connect`, which makes one."""

    def __init__(
        self, config: LearnerSettings, model: nn.Module, optimizers: Sequence[Optimizer], *,
        connect_timeout_seconds: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self._settings, self._model, self._optimizers = config, model, optimizers
        self._run_spec = config.read_spec()
        tensors = describe(model)
        layout = cut(
            [n.info for n in tensors.trained],
            num_fragments=self._run_spec.fragments,
            constants=[n.info for n in tensors.constants],
            average=self._run_spec.average_parameters,
        )
        rows = range(len(layout.fragments))
        self._copier = Copier(tensors, layout)
        self._shared = Shared.create(layout, constants_bytes=self._copier.constants_bytes())
        self._copier.attach(
            [self._shared.host(p) for p in rows], [self._shared.inbox(p) for p in rows]
        )
        self._ledger = Ledger(len(rows))
        self._applied = [0 for _ in rows]
        self._initial = 0
        self._in_place = self._stepped = False
        self._said = LinkState(text="starting the link process")
        self._loss = _Loss()
        self._step_seconds = self._sync_seconds = self._total_sync_seconds = 0.0
        self._queued_seconds = 0.0
        self._cores = CoreQueue()
        self._writing_seconds = 0.0
        """What writing the last line took; counted with the next step, as a line cannot hold its own writing."""
        self._checkpoints: Checkpoints | None = None
        self._found: Manifest | None = None
        self._journal: Journal | None = None
        if config.state is not None:
            keep = self._run_spec.learner_checkpoint.keep
            self._checkpoints = Checkpoints(config.state, keep=keep, digest=layout.digest)
            self._found = self._checkpoints.newest()
            self._journal = Journal(config.state / "steps.jsonl")
        self._checkpoint_at = 0
        self._began = (0, 0)
        """Local step and tokens with which this process began to train."""
        self._link = LinkProcess(self._shared)
        self._term = Termination()
        try:
            self._join(connect_timeout_seconds)
        except BaseException:
            self._let_go("interrupted")
            raise
        self._checkpoint_at = self._ledger.local_step
        self._left_at = time.monotonic()

    # ------------------------------------------------------------ facts

    @property
    def done(self) -> bool:
        """
        The job is complete, or this process was told to stop. The first time it is true the job has
        been left.
        """
        if self._closed:
            return True
        self._hear(time.monotonic())
        if self._term.received:
            self._leave("SIGTERM")
        elif self._said.complete:
            self._leave("Complete")
        return self._closed

    @property
    def step_index(self) -> int:
        """Global step t."""
        return self._said.step

    @property
    def total_steps(self) -> int:
        """T."""
        return self._said.steps or self._run_spec.steps

    @property
    def name(self) -> str:
        """<region>/<index>."""
        return self._settings.learner

    @property
    def index(self) -> int:
        """See `Learner.index`."""
        regions = sorted({*self._run_spec.learners, self._settings.region})
        inside = int(self._settings.learner.rpartition("/")[2])
        return inside * len(regions) + regions.index(self._settings.region)

    @property
    def spec(self) -> RunSpec:
        """What all processes of the job share."""
        return self._run_spec

    @property
    def config(self) -> dict[str, Any]:
        """DILOCO_CONFIG."""
        return self._settings.config

    # ------------------------------------------------------------ joining

    def _join(self, timeout_seconds: float) -> None:
        """Return when the model is in place, or there is nothing left to do."""
        began = heard = time.monotonic()
        say_at = began + SAY_SECONDS
        while not self._in_place:
            now = time.monotonic()
            self._link.ensure(self._state(), now=now)
            self._hear(now)
            if self._term.received or self._said.complete:
                return self._let_go("SIGTERM" if self._term.received else "Complete")
            if self._said.connected:
                heard = now
            elif now - heard > timeout_seconds:
                text = f"no syncer within {timeout_seconds:.0f} s: {self._said.text}; trying again may help"
                raise exit_with(EXIT_TRY_AGAIN, f"{self.name}: {text}")
            if now >= say_at:
                say_at = now + SAY_SECONDS
                print(
                    f"diloco: {self.name}: {self._said.text} ({now - began:.0f} s)",
                    file=sys.stderr,
                    flush=True,
                )
            self._upload_initial_if_asked()
            if self._said.phase is Phase.PLACED:
                self._take_model()
            elif self._said.phase is Phase.LOAD and self._found is not None:
                self._load(self._found)
            else:
                self._link.wait(POLL_SECONDS)
        self._ledger.resume(local_step=self._said.local_step, total_tokens=self._said.total_tokens)
        self._began = (self._ledger.local_step, self._ledger.total_tokens)
        return self._link.offer(self._state())

    def _take_model(self) -> None:
        self._copier.constants_in(self._shared.constants)
        self._apply(self._said.ready)
        self._in_place = True

    def _load(self, found: Manifest) -> None:
        try:
            if self._checkpoints is not None:
                self._checkpoints.load(found, self._model, self._optimizers)
            self._ledger = Ledger.from_json(found.facts)
            self._in_place = True
        except (DilocoError, OSError, KeyError, RuntimeError) as error:
            log.warning(
                "checkpoint %s cannot be used: %s; taking the syncer's model",
                found.path.name,
                error,
            )
            self._found = None
            self._link.offer(self._state())

    def _upload_initial_if_asked(self) -> None:
        if self._said.initialise <= self._initial:
            return
        for fragment in range(len(self._applied)):
            with self._shared.hold(fragment):
                self._copy_out(fragment)
        self._copier.constants_out(self._shared.constants)
        self._initial = self._said.initialise
        self._link.offer(self._state())

    # ------------------------------------------------------------ training

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        """
        One step of Algorithm 1 after the optimizer's: count, keep host copies, take what has
        arrived, tell the link.

        Differs from the paper: what has arrived is applied before the metadata leaves. A fragment
        that was just overwritten has nothing to offer, and its inbox, the base of its next delta,
        is already the new one.
        """
        if self._closed:
            return
        now, queued = time.monotonic(), self._cores.seconds()
        self._step_seconds = now - self._left_at
        self._ledger.count(tokens)
        self._stepped = True
        self._link.ensure(self._state(), now=now)
        self._hear(now)
        self._upload_initial_if_asked()
        ready = [(p, g) for p, g in self._said.ready if g > self._applied[p]]
        replaced = {p for p, _ in ready}
        offers = [p for p in self._said.open if p not in replaced and self._try_copy_out(p)]
        self._apply(ready)
        self._loss.take(loss)
        self._link.offer(self._state(offers=offers))
        self._checkpoint_if_due()
        ended = time.monotonic()
        self._sync_seconds = ended - now + self._writing_seconds
        self._queued_seconds = self._cores.seconds() - queued
        self._total_sync_seconds += self._sync_seconds
        self._record(tokens)
        self._left_at = time.monotonic()
        self._writing_seconds = self._left_at - ended

    def _try_copy_out(self, fragment: int) -> bool:
        with self._shared.try_hold(fragment) as held:
            if held:
                self._copy_out(fragment)
        return held

    def _copy_out(self, fragment: int) -> None:
        self._copier.copy_out(fragment)
        copy = HostCopy(
            local_step=self._ledger.local_step,
            steps=self._ledger.steps[fragment],
            tokens=self._ledger.tokens[fragment],
            base=self._applied[fragment],
        )
        self._shared.note_copy(fragment, copy)

    def _apply(self, ready: Sequence[Sequence[int]]) -> None:
        for fragment, generation in ready:
            self._copier.copy_in(fragment)
            self._ledger.received(fragment)
            self._applied[fragment] = generation

    def _hear(self, now: float) -> None:
        said = self._link.newest(now=now)
        if said is None:
            return
        self._said = said
        if said.refused_exit:
            if self._in_place:
                self._let_go("Refused")
            raise exit_with(said.refused_exit, f"{self.name}: {said.text}")

    def _state(self, *, offers: Sequence[int] = (), leaving: str = "") -> TrainerState:
        found, ledger = self._found, self._ledger
        return TrainerState(
            incarnation=self._said.incarnation,
            epoch=self._said.epoch,
            checkpoint_local_step=found.local_step if found is not None else 0,
            checkpoint_step=found.global_step if found is not None else 0,
            in_place=self._in_place,
            stepped=self._stepped,
            local_step=ledger.local_step,
            global_step=self._said.step,
            steps=ledger.steps,
            tokens=ledger.tokens,
            offers=offers,
            applied=self._applied,
            total_tokens=ledger.total_tokens,
            began_local_step=self._began[0],
            began_total_tokens=self._began[1],
            loss=self._loss.value,
            step_seconds=self._step_seconds,
            sync_seconds=self._sync_seconds,
            total_sync_seconds=self._total_sync_seconds,
            initial=self._initial,
            leaving=leaving,
        )

    def _record(self, tokens: int) -> None:
        if self._journal is None:
            return
        self._journal.append(
            {
                "incarnation": self._said.incarnation,
                "localStep": self._ledger.local_step,
                "globalStep": self._said.step,
                "tokens": tokens,
                "loss": self._loss.value,
                "seconds": round(self._step_seconds, 6),
                "syncSeconds": round(self._sync_seconds, 6),
                # Of syncSeconds: ready to run, but other processes had the cores.
                "queuedSeconds": round(self._queued_seconds, 6),
            }
        )

    # ------------------------------------------------------------ checkpoints

    def _checkpoint_if_due(self) -> None:
        every = self._run_spec.learner_checkpoint.every_steps
        if self._ledger.local_step - self._checkpoint_at >= every:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Begin one; nothing while the one before is still on its way to the disk."""
        if self._checkpoints is None:
            return
        try:
            begun = self._checkpoints.start(
                self._model,
                self._optimizers,
                local_step=self._ledger.local_step,
                global_step=self._said.step,
                facts=self._ledger.to_json(),
            )
        except DilocoError as error:
            log.warning("no local checkpoints from now on: %s", error)
            self._checkpoints = None
            return
        if begun:
            self._checkpoint_at = self._ledger.local_step

    # ------------------------------------------------------------ leaving

    def close(self) -> None:
        """Leave the job."""
        if not self._closed:
            self._let_go("Closed")

    def _leave(self, reason: str) -> None:
        """On purpose, at a step boundary: the state is worth keeping."""
        if self._checkpoints is not None and self._in_place and self._stepped:
            self._checkpoints.finish()
            self._checkpoint()
        self._let_go(reason)

    def _let_go(self, reason: str) -> None:
        self._closed = True
        self._link.leave(self._state(leaving=reason))
        if self._checkpoints is not None:
            self._checkpoints.finish()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._shared.close()
        self._cores.close()
        self._term.restore()


class _Loss:
    """The newest loss that can be had without waiting for a device."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._late: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def take(self, loss: float | torch.Tensor | None) -> None:
        if self._late is not None and self._late[1].query():  # type: ignore[no-untyped-call]
            self.value, self._late = _finite(float(self._late[0])), None
        if isinstance(loss, torch.Tensor) and loss.device.type == "cuda":
            copy = torch.empty((), dtype=torch.float32, pin_memory=True)
            copy.copy_(loss.detach(), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._late = copy, event
            return
        # float() of a tensor on the CPU waits for nothing.
        self.value = (
            None
            if loss is None
            else _finite(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
