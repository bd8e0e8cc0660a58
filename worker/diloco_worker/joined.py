"""
A trainer in a job: carries out what `core.trainer` decides, with the link process beside it.

The process never touches the network. `step` copies a few fragments from and to shared memory, and
offers one message to the link without waiting for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import ConfigError, DilocoError
from diloco.journal.background import BackgroundWriter
from diloco.journal.writer import JournalWriter
from diloco.runtime import files
from diloco.spec import RunSpec
from diloco_worker.core import trainer as core
from diloco_worker.core.block_wait import BlockWait
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState
from diloco_worker.core.open_blocks import Data
from diloco_worker.core.peer_files import PEER_MANIFEST, PEER_TENSORS
from diloco_worker.core.replay import Replay
from diloco_worker.ipc.link_process import LinkProcess
from diloco_worker.job_trainer import JobTrainer
from diloco_worker.replayed import life_of
from diloco_worker.settings import STEPS_PART_BYTES, LearnerSettings
from diloco_worker.trainer import optimizer_state
from diloco_worker.trainer.buffers import Loaded
from diloco_worker.trainer.checkpoint import Checkpoints, Manifest, local_checkpoint
from diloco_worker.trainer.device_replica import replica_of
from diloco_worker.trainer.kept import KeptState
from diloco_worker.trainer.loss import LossReader
from diloco_worker.trainer.optimizer_steps import OptimizerSteps
from diloco_worker.trainer.replica import Replica
from diloco_worker.trainer.runqueue import RunQueue
from diloco_worker.trainer.tape import Tape
from diloco_worker.trainer.termination import Termination, exit_with
from diloco_worker.trainer.wrappers import bare

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2

RETRY_SECONDS = 0.001
"""A replay repeats a copy that the link has kept from being made."""

UNUSABLE = (
    *(DilocoError, OSError, LookupError, RuntimeError, TypeError, ValueError),
    *(AttributeError, ArithmeticError),
)
"""What loading a checkpoint that does not fit this process raises."""


class JoinedTrainer(JobTrainer):
    """
    Implements `Learner` in a job. Creating it joins the job.

    Args:
        config: from the environment.
        model: see `Learner.connect`.
        optimizers: for local checkpoints.
        connect_timeout_seconds: how long to wait for a syncer that does not answer.

    Raises:
        DilocoError: the spec cannot be read, or does not fit the model.
        SystemExit: the job refuses this process, or the syncer does not answer in time.
    """

    def __init__(
        self, config: LearnerSettings, model: nn.Module, optimizers: Sequence[Optimizer], *,
        connect_timeout_seconds: float,
    ) -> None:  # fmt: skip
        self._model, self._optimizers = bare(model), optimizers
        self._run_spec = config.read_spec()
        self.name, self.index = config.learner, config.index(self._run_spec)
        self.spec: RunSpec | None = self._run_spec
        self.config = config.config
        self._replica: Replica = replica_of(
            model, self._run_spec, encode=config.encode_on == "device"
        )
        self._link = LinkProcess(self._replica.shared)
        self._loss, self._optimizer_steps = (
            LossReader(),
            OptimizerSteps(optimizers, self._other_type, before=self._before_step),
        )
        self._run_queue = RunQueue()
        self._state = config.state
        self._checkpoints: Checkpoints | None = None
        self._found: Manifest | None = None
        self._kept = KeptState(self._show, self._end)
        self._journal: BackgroundWriter | None = None
        self._tape: Tape | None = None
        self._replay: Replay | None = None
        self._source, found_step = "model", 0
        checkpoint = self._run_spec.learner_checkpoint
        if config.state is not None:
            self._checkpoints = Checkpoints(
                config.state, keep=checkpoint.keep, digest=self._replica.layout.digest
            )
            self._found = self._checkpoints.newest()
            self._forget_peer_state()
            self._journal = BackgroundWriter(
                JournalWriter(config.state / "steps.jsonl"), part_bytes=STEPS_PART_BYTES
            )
            self._tape = Tape(config.state, learner=self.name, restarts=config.restarts)
            found_step = self._found.local_step if self._found is not None else 0
        if config.replay is not None:
            self._replay = Replay(life_of(config, found=found_step))
            begin = self._replay.life.process.begin
            if (begin.source, begin.optimizers) == ("model", "new"):
                self._found = None  # that process could not use what it found
        self._core = core.TrainerCore(
            name=self.name,
            fragments=len(self._replica.layout.fragments),
            found=local_checkpoint(self._found),
            checkpoint_every=checkpoint.every_steps if self._checkpoints is not None else None,
            connect_timeout_seconds=connect_timeout_seconds,
        )
        self._block_wait = BlockWait(
            self._core, name=self.name, timeout_seconds=connect_timeout_seconds
        )
        self._termination = Termination()
        try:
            self._join()
            self._loaded = Loaded(self._model)
            self._replica.shown(self._core.link_state)
            self._begin_tape(found_step)
            if self._checkpoints is not None:
                self._checkpoints.watch(optimizers, self._model)
        except BaseException:
            self._carry_out(self._core.close("interrupted"))
            raise

    # ------------------------------------------------------------ properties

    @property
    def done(self) -> bool:
        """See `Learner.done`."""
        if not self._core.closed:
            state = self._newest(time.monotonic())
            if self._replay is not None:
                state = self._replay.between(self._core.ledger.local_step)
            self._carry_out(self._core.check(state, terminated=self._termination.received))
        return self._core.closed

    def _end(self, code: int, text: str) -> NoReturn:
        self._carry_out(self._core.close("interrupted"))
        raise exit_with(code, f"{self.name}: {text}")

    # ------------------------------------------------------------ training

    def _join(self) -> None:
        """Return when the model is loaded, or when there is nothing left to do."""
        while not (self._core.joined or self._core.closed):
            now = time.monotonic()
            self._ensure_link(now)
            state = self._link.newest(now=now)
            if self._replay is not None:
                self._replay.observe(state)
                state = self._replay.joining()
            terminated = self._termination.received
            self._carry_out(self._core.join(state, now=now, terminated=terminated))

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        """One step of Algorithm 1, after the optimizer's: see `TrainerCore.step`."""
        if self._core.closed:
            return
        self._check_step(tokens, loss)
        self._check_model()
        self._replica.stepped()
        self._kept.begin_steps(saving=self._checkpoints is not None)
        now, queued = time.monotonic(), self._run_queue.seconds()
        if self._checkpoints is not None and not self._checkpoints.boundary():
            self._core.checkpoint_lost()
        self._ensure_link(now)
        state = self._newest(now)
        if self._replay is not None:
            state = self._await_tape(self._replay)
        taken, seen = self._optimizer_steps.taken(), self.step_index
        self._result_age = None
        actions = self._core.step(tokens, state, now=now, optimizer_steps=taken)
        if self._tape is not None and not self._core.closed:
            self._tape.step(self._core, actions, seen=seen)
        copied = self._carry_out(actions)
        self._carry_out(
            self._core.copied(copied, loss=self._loss.value, finite=self._loss.newly_finite)
        )
        line = self._core.line(
            now=time.monotonic(),
            queued_seconds=self._run_queue.seconds() - queued,
            copy_wait_seconds=None if self._checkpoints is None else self._checkpoints.wait_seconds,
        )
        self._append(line)
        self._core.ended(now=time.monotonic())
        if self._replay is not None:
            self._follow_tape(self._replay)
        if self._kept and self._termination.received:
            # Before the loop draws a batch and reads `done`: the batch would be lost.
            self._carry_out(self._core.check(None, terminated=True))

    def take_block(self, data: Data) -> int | None:
        """See `Learner.blocks`; waits for the syncer if there is none."""
        serial = self._block_wait.take(data)
        while not self.done:  # reads the newest leases
            if serial is not None:
                return serial
            if (serial := self._block_wait.retry()) is None:
                now = time.monotonic()
                self._ensure_link(now)
                self._carry_out(self._block_wait.wait(now=now))
        return None

    def close(self, error: BaseException | None = None) -> None:
        """See `Learner.close`."""
        self._carry_out(self._core.close("Closed"))

    # ------------------------------------------------------------ tape

    def _begin_tape(self, found_step: int) -> None:
        if self._tape is None or not self._core.joined:
            return
        own = "checkpoint" if self._core.resumed else "new"
        optimizers = self._core.recovered_from or own
        self._tape.begin(
            self._core, self._replica.layout, found=found_step, source=self._source, optimizers=optimizers
        )  # fmt: skip
        if self._replay is not None:
            if text := self._replay.began_otherwise(
                self._source, optimizers, self._core.link_state
            ):
                self._end(1, text)
            # A report before the first step: the syncer shows results to processes that have begun.
            self._link.offer(replace(self._core.state(), stepped=True))
            self._follow_tape(self._replay)

    def _newest(self, now: float) -> LinkState | None:
        state = self._replica.shown(self._link.newest(now=now))
        if self._replay is not None:
            self._replay.observe(state)
        return state

    def _await_tape(self, replay: Replay) -> LinkState | None:
        """What the tape has for the end of this step, once the link is so far."""
        number = self._core.ledger.local_step + 1
        while not (replay.refused or self._termination.received):
            if (state := replay.boundary(number)) is not None:
                return state
            self._await_link()
        return replay.joining()

    def _follow_tape(self, replay: Replay) -> None:
        """Save what a later process finds, and end as this one did."""
        number = self._core.ledger.local_step
        if number in replay.life.saves and self._checkpoints is not None:
            self._checkpoints.finish()
            self._save_checkpoint(self._core.save())
            self._checkpoints.finish()
        if number < replay.life.last:
            return
        while not (replay.merged or replay.refused or self._termination.received):
            self._await_link()
        if replay.life.killed and not self._termination.received:
            os.kill(os.getpid(), signal.SIGKILL)

    def _await_link(self) -> None:
        now = time.monotonic()
        self._ensure_link(now)
        self._link.wait(POLL_SECONDS)
        self._newest(now)

    def _ensure_link(self, now: float) -> None:
        if self._link.pid is None:
            self._link.ensure(self._replica.known(self._core.state()), now=now)

    # ------------------------------------------------------------ actions

    def _carry_out(self, actions: Sequence[core.Action]) -> list[int]:
        """Carry out the actions in order; returns the fragments of which host copies were taken."""
        copied: list[int] = []
        for action in actions:
            match action:
                case core.CopyFragment(fragment, copy):
                    if self._try_copy(fragment, copy):
                        copied.append(fragment)
                case core.ApplyFragment(fragment):
                    self._apply(fragment)
                case core.Send(state):
                    if (known := self._replica.report(state)) is not None:
                        self._link.offer(known)
                case core.SaveCheckpoint():
                    if self._replay is None:
                        self._save_checkpoint(action)
                case core.CopyModel(copies, wait=True):
                    self._replica.copy_model(copies)
                case core.CopyModel(copies):
                    if not self._replica.try_copy_model(copies):
                        self._core.model_not_copied()
                case core.ApplyModel(fragments):
                    self._replica.apply_model(fragments)
                case core.LoadCheckpoint():
                    self._load_checkpoint()
                case core.LoadOptimizers():
                    self._load_optimizers()
                case core.LoadPeerState():
                    self._load_peer_state(action)
                case core.AwaitLink():
                    self._link.wait(POLL_SECONDS)
                case core.AwaitCheckpoint():
                    if self._checkpoints is not None:
                        self._checkpoints.finish()
                case core.ShowProgress(text):
                    print(f"diloco: {text}", file=sys.stderr, flush=True)
                case core.Leave():
                    self._leave(action)
                case core.Exit(code, text):
                    raise exit_with(code, text)
        return copied

    def _try_copy(self, fragment: int, copy: HostCopy) -> bool:
        copied = self._replica.try_copy(fragment, copy)
        while not copied and self._replay is not None:
            time.sleep(RETRY_SECONDS)
            copied = self._replica.try_copy(fragment, copy)
        return copied

    def _load_checkpoint(self) -> None:
        if self._checkpoints is None or self._found is None:
            raise AssertionError("there is no checkpoint to load")
        found, self._found = self._found, None
        try:
            self._kept.saved = self._checkpoints.kept(found)
            with optimizer_state.own_on_error(self._optimizers):
                self._checkpoints.load(found, self._model, self._optimizers)
                self._replica.loaded()
                self._source = "checkpoint"
                loaded = self._core.checkpoint_loaded(found.facts, now=time.monotonic())
        except UNUSABLE as error:
            self._kept.forget_saved()
            log.warning(
                "cannot use checkpoint %s: %s; downloading the model instead",
                found.path.name,
                error,
            )
            loaded = self._core.checkpoint_unusable(f"{found.path.name} cannot be used: {error}")
        self._carry_out(loaded)

    def _load_optimizers(self) -> None:
        if self._checkpoints is None or self._found is None:
            raise AssertionError("there is no checkpoint to load")
        found, self._found = self._found, None
        try:
            self._kept.saved = self._checkpoints.kept(found)
            self._checkpoints.load_optimizers(found, self._model, self._optimizers)
        except UNUSABLE as error:
            self._kept.forget_saved()
            why = f"{found.path.name} cannot be used: {error}"
            self._carry_out(self._core.optimizers_unusable(why))
        else:
            self._carry_out(self._core.optimizers_loaded())

    def _load_peer_state(self, action: core.LoadPeerState) -> None:
        if self._checkpoints is None:
            raise AssertionError("there is no directory for what a peer sent")
        try:
            sent = self._checkpoints.of_peer()
            self._checkpoints.load_optimizers(sent, self._model, self._optimizers, of_peer=True)
        except UNUSABLE as error:
            self._carry_out(self._core.peer_state_unusable(str(error)))
            return
        finally:
            self._forget_peer_state()
        found, self._found = self._found, None
        if action.kept and found is not None:
            with contextlib.suppress(OSError, DilocoError):  # `keep` states that it starts over
                self._kept.saved = self._checkpoints.kept(found)
        self._carry_out(self._core.peer_state_loaded())

    def _forget_peer_state(self) -> None:
        if (directory := self._state) is not None:
            for path in (directory / PEER_MANIFEST, directory / PEER_TENSORS):
                for each in (path, files.temporary(path)):  # the latter if it was killed meanwhile
                    with contextlib.suppress(OSError):
                        each.unlink()

    def _save_checkpoint(self, action: core.SaveCheckpoint) -> None:
        if self._checkpoints is None or self._checkpoints.busy:
            return
        try:
            kept = self._kept.objects.capture()
        except ConfigError as error:
            log.warning("local step %d has no checkpoint: %s", action.local_step, error)
            self._core.checkpoint_skipped(action.local_step)
            return
        try:
            started = self._checkpoints.start(
                self._model,
                self._optimizers,
                local_step=action.local_step,
                global_step=action.global_step,
                facts=dict(action.facts),
                run=action.run,
                kept=kept,
            )
        except DilocoError as error:
            log.warning("no more local checkpoints will be written: %s", error)
            self._core.checkpoints_off()
            return
        if started:
            self._core.checkpoint_started(action.local_step)

    def _leave(self, action: core.Leave) -> None:
        self._link.leave(action.state)
        if self._checkpoints is not None:
            self._checkpoints.finish()
        if self._tape is not None:
            if self._core.joined:
                try:
                    digests = self._replica.digests()
                except (RuntimeError, MemoryError) as error:  # such as of a device that has failed
                    log.warning("the tape has no digests of the last parameters: %s", error)
                    digests = []
                self._tape.end(self._core, action.state.leaving, digests)
            self._tape.close()
        self._release()
