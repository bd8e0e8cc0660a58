"""
One rank of a learner of several, each of which holds a part or a replica of the model.

Every rank makes the same decisions from the same inputs (core/agreement.py), so that they offer and apply the same
fragments at the same step without waiting for each other. Rank 0 alone has a link process, and the learner's files.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.errors import EXIT_TRY_AGAIN, DilocoError, StorageError
from diloco.journal.background import BackgroundWriter
from diloco.journal.writer import JournalWriter
from diloco.spec import RunSpec
from diloco_worker.core import trainer as core
from diloco_worker.core.agreement import PLANS, Board, PassedError, Plan
from diloco_worker.core.checkpoint_schedule import CheckpointSchedule
from diloco_worker.core.findings import NONE, Finding, Findings
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.open_blocks import Data
from diloco_worker.job_trainer import JobTrainer
from diloco_worker.rank_liveness import report_progress
from diloco_worker.settings import STEPS_PART_BYTES, LearnerSettings
from diloco_worker.trainer import rank_replica, undone
from diloco_worker.trainer.buffers import WRITTEN, Loaded
from diloco_worker.trainer.checkpoint import local_checkpoint
from diloco_worker.trainer.first_rank import LinkRank
from diloco_worker.trainer.kept import KeptState
from diloco_worker.trainer.loss import LossReader
from diloco_worker.trainer.optimizer_steps import OptimizerSteps
from diloco_worker.trainer.rank_checkpoints import UNUSABLE, of_ranks
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_machines import RankMachines
from diloco_worker.trainer.rank_replica import RankReplica
from diloco_worker.trainer.runqueue import RunQueue
from diloco_worker.trainer.termination import Termination, exit_with
from diloco_worker.trainer.wrappers import bare

log = logging.getLogger(__name__)

JOIN_POLL_SECONDS = 0.2

WAIT_SECONDS = 300.0
"""How long a rank waits for another that does not come as far as itself."""

WAIT_POLL_SECONDS = 0.002

ALIVE_SECONDS = 1.0
"""Interval at which a waiting rank checks whether the others still run."""

SHOWN_SECONDS = 10.0
"""After waiting this long, a line names the ranks that are waited for."""

FOUND = {
    Finding.UNDONE: undone.PROBLEM,
    # A row has no room for the names of another rank's.
    Finding.WRITTEN: f"parameters were {WRITTEN}",
    Finding.CHANGED: (
        "buffers that are not merged, or frozen parameters, changed while training, and the exported model does not "
        "have that; the log of this learner names them"
    ),
    Finding.OTHER_MODEL: (
        "since Learner.connect, the program has changed what it trains, so that the job and the exported model lack "
        "it; the log of this learner names what"
    ),
}
"""What rank 0 shows of a finding of another."""

NAMED = (Finding.CHANGED, Finding.OTHER_MODEL)
"""Findings that a rank shows by itself."""

PROBLEMS = (Finding.UNDONE, Finding.OTHER_MODEL)
"""Findings that stay visible in the status of the learner."""

NOTHING = HostCopy(local_step=0, steps=0, tokens=0, base=0)


class DistributedTrainer(JobTrainer):
    """
    Implements `Learner` in a job, in each rank. Creating it joins the job.

    Args:
        config: from the environment.
        model: see `Learner.connect`.
        optimizers: whose steps are counted.
        group: the ranks, all of which have connected.
        connect_timeout_seconds: how long to wait for a syncer that does not answer.

    Raises:
        DilocoError: the spec cannot be read, or does not fit the model, or the ranks do not fit together.
        SystemExit: the job refuses this learner, or the syncer or a rank does not answer in time.
    """

    _findings = NONE
    """What this rank has found out about the program."""
    _overwritten = ""
    """A sentence, with Finding.WRITTEN."""

    def __init__(
        self, config: LearnerSettings, model: nn.Module, optimizers: Sequence[Optimizer], *, group: RankGroup,
        connect_timeout_seconds: float,
    ) -> None:  # fmt: skip
        self._run_spec = config.read_spec()
        self.name, self.index = config.learner, config.index(self._run_spec)
        self.spec: RunSpec | None = self._run_spec
        self.config = config.config
        self._model, self._optimizers = bare(model), optimizers
        self._rank = group.rank
        self._replica: RankReplica = rank_replica.replica_of(model, self._run_spec, group)
        fragments = len(self._replica.layout.fragments)
        self._board = Board(self._replica.shared, ranks=group.size, fragments=fragments)
        self._boundary = 0
        """The newest plan that this rank has followed."""
        self._steps: dict[int, int] = {}
        """Rank 0: by boundary, how many steps its first optimizer had made; of the last ones."""
        self._terminated = False
        """That plan ends the learner, because a rank received SIGTERM."""
        self._model_copied = False
        """This rank copied the whole model at the boundary that it is at."""
        self._loss, self._optimizer_steps = (
            LossReader(),
            OptimizerSteps(optimizers, self._other_type, before=self._before_step),
        )
        self._findings_of_ranks = Findings()
        self._run_queue, self._kept = RunQueue(), KeptState(self._show, self._end)
        self._termination = Termination()
        checkpoint = self._run_spec.learner_checkpoint
        self._checkpoints, without = of_ranks(
            config.state, keep=checkpoint.keep, digest=self._replica.layout.digest,
            held=self._replica.held, group=group,
        )  # fmt: skip
        self._found = self._checkpoints.newest_of_all() if self._checkpoints is not None else None
        self._schedule: CheckpointSchedule | None = None
        """Rank 0: when the next checkpoint begins."""
        self._core = core.TrainerCore(
            name=self.name, fragments=fragments, found=local_checkpoint(self._found),
            checkpoint_every=None,  # the plans decide
            connect_timeout_seconds=connect_timeout_seconds,
        )  # fmt: skip
        self._group = group
        self._journal = _journal(config, group)
        self._machines = RankMachines(
            group, self._replica, self._board, master=config.master, port=config.relay_port
        )
        self._first = (
            LinkRank(self._replica, self._core, self._machines) if group.rank == 0 else None
        )
        if self._first is not None:
            places = f" on {len(group.machines)} machines" if len(group.machines) > 1 else ""
            text = f"{group.size} ranks train together{places}"
            self._show(f"{text}; without local checkpoints: {without}" if without else text)
        try:
            self._join()
            self._loaded = Loaded(self._model)
            if self._checkpoints is not None:
                self._checkpoints.watch(optimizers, self._model)
        except BaseException as error:
            self._fail(error)
            self._carry_out(self._core.close("interrupted"))
            raise

    # ------------------------------------------------------------ properties

    @property
    def _leads(self) -> bool:
        return self._rank == 0

    @property
    def _ending(self) -> bool:
        return self._terminated

    @property
    def done(self) -> bool:
        """See `Learner.done`; true at the same step in all ranks."""
        if not self._core.closed:
            self._check_machines()
            self._carry_out(self._core.check(None, terminated=self._terminated))
        return self._core.closed

    # ------------------------------------------------------------ training

    def _join(self) -> None:
        """Return when all ranks have the job's model, or when there is nothing left to do."""
        while not (self._core.joined or self._core.closed):
            boundary = self._boundary + 1
            if self._first is not None:
                ends = self._terminates()
                self._send(self._first.plan_to_join(boundary, terminated=ends))
            plan = self._plan(boundary)
            terminated = plan.terminated
            actions = self._core.join(plan.link_state, now=plan.now, terminated=terminated)
            self._carry_out(actions, plan)
            if self._core.closed:
                return
            self._enter(boundary, plan)
            if self._first is not None:
                self._await_ranks(boundary)
                self._first.settle(self._board.finished())
                if core.AwaitLink() in actions:
                    self._first.link.wait(JOIN_POLL_SECONDS)
        self._publish()

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        """One step of Algorithm 1, after the optimizer's: see `TrainerCore.step`."""
        if self._core.closed:
            return
        self._check_step(tokens, loss)
        self._check_machines()
        self._check_model()
        self._replica.stepped()
        self._kept.begin_steps(saving=self._checkpoints is not None)
        now, queued = time.monotonic(), self._run_queue.seconds()
        if self._checkpoints is not None:
            self._checkpoints.boundary()
        boundary = self._boundary + 1
        if self._first is not None:
            self._await_ranks(boundary - 1)
            self._compare_steps(boundary)
            self._show_findings()
            self._first.settle(self._board.finished())
        plan = self._plan(boundary)
        taken = self._optimizer_steps.taken()
        self._result_age = None
        actions = self._core.step(tokens, plan.link_state, now=now, optimizer_steps=taken)
        copies = self._carry_out(actions, plan)
        offers = self._core.copied([*copies], loss=self._loss.value, finite=self._loss.newly_finite)
        self._carry_out(offers, plan, copies)
        if plan.checkpoint is not None:
            self._begin_checkpoint(attempts=plan.checkpoint)
        self._enter(boundary, plan, copies)
        if self._first is not None:
            self._publish()
        line = self._core.line(
            now=time.monotonic(), queued_seconds=self._run_queue.seconds() - queued,
            copy_wait_seconds=None if self._checkpoints is None else self._checkpoints.wait_seconds,
        )  # fmt: skip
        self._append(line)
        if self._rank > 0:
            report_progress()  # rank 0's link does
        self._core.ended(now=time.monotonic())

    def take_block(self, data: Data) -> int | None:
        """See `Learner.blocks`: the ranks do not share blocks yet."""
        self._exit(
            "learner.blocks: this learner has several ranks, expected one process; give each rank its part of "
            "learner.shard(dataset)"
        )

    def close(self, error: BaseException | None = None) -> None:
        """See `Learner.close`; after an error of this rank's program, the other ranks end as well."""
        if isinstance(error, Exception):
            self._fail(error)
        self._carry_out(self._core.close("Closed"))

    def _fail(self, error: BaseException) -> None:
        """Let the ranks of all machines end, instead of seeing this one leave."""
        if not self._core.closed:
            rank = self._group.named([self._rank])
            self._board.fail(f"{rank} exited with {type(error).__name__}, so this learner exits")

    # ------------------------------------------------------------ local checkpoints

    def _load(self, plan: Plan, *, parameters: bool) -> None:
        """Give the optimizers and, if `parameters`, the model this rank's part of the checkpoint that was found."""
        if self._checkpoints is None or self._found is None:
            raise AssertionError("there is no checkpoint to load")
        found, self._found = self._found, None
        try:
            self._kept.saved = self._checkpoints.load_part(
                found, self._model, self._optimizers, parameters=parameters
            )
            if parameters:
                self._replica.loaded()
                actions = self._core.checkpoint_loaded(found.facts, now=plan.now)
            else:
                actions = self._core.optimizers_loaded()
        except UNUSABLE as error:
            why = f"{found.path.name} cannot be used: {error}"
            unusable = (
                self._core.checkpoint_unusable if parameters else self._core.optimizers_unusable
            )
            actions = unusable(why)
        self._carry_out(actions, plan)

    def _begin_checkpoint(self, *, attempts: int) -> None:
        if self._checkpoints is not None:
            self._checkpoints.begin(
                self._model, self._optimizers, attempts=attempts, kept=self._kept.objects.capture,
                local_step=self.local_step, global_step=self.step_index, facts=self._core.facts(),
                run=self._core.run,
            )  # fmt: skip

    def _next_checkpoint(self, plan: Plan) -> int | None:
        """Rank 0: whether the ranks begin a checkpoint with this plan; see `CheckpointSchedule.at`."""
        if self._checkpoints is None or not self._core.joined:
            return None
        if self._schedule is None:
            every = self._run_spec.learner_checkpoint.every_steps
            self._schedule = CheckpointSchedule(every, local_step=self.local_step)
        if (ended := self._checkpoints.ended()) is not None:
            self._schedule.ended(ended)
        return self._schedule.at(
            self.local_step + 1, busy=self._checkpoints.busy, trained=self._core.trained,
            ending=plan.terminated or plan.link_state.complete,
        )  # fmt: skip

    # ------------------------------------------------------------ the other ranks

    def _publish(self) -> None:
        """Rank 0: the plan of the next boundary."""
        if self._first is not None:
            ends = self._terminates()
            plan = self._first.plan(self._boundary + 1, terminated=ends)
            self._send(dataclasses.replace(plan, checkpoint=self._next_checkpoint(plan)))

    def _send(self, plan: Plan) -> None:
        self._machines.publish(plan, self._board.publish(plan))

    def _terminates(self) -> bool:
        return self._termination.received or any(ends for _, ends in self._board.rows())

    def _enter(
        self, boundary: int, plan: Plan, copies: Mapping[int, HostCopy] | None = None
    ) -> None:
        """This rank has followed the plan, and made these copies, or its device makes them."""
        finished = self._replica.end(boundary, plan.fetches)
        self._findings |= self._replica.findings
        self._board.enter(
            self._rank, boundary, terminated=self._termination.received, finished=finished,
            steps=self._optimizer_steps.first, findings=self._findings,
        )  # fmt: skip
        model, self._model_copied = self._model_copied, False
        places = plan.places if model else {p: plan.places[p] for p in copies or ()}
        self._machines.entered(boundary, places, model=model)
        self._boundary = boundary

    def _plan(self, boundary: int) -> Plan:
        """The plan of a boundary: it is there unless a step of the program has no collective."""
        found: list[Plan] = []

        def there() -> bool:
            try:
                plan = self._board.plan(boundary)
            except PassedError as error:
                self._exit(f"rank {self._rank} is too far behind rank 0: {error}; {EXPECTED}")
            found.extend([plan] if plan is not None else [])
            return plan is not None

        self._await(there, lambda: self._before(boundary), "did not end the step before")
        self._terminated = found[0].terminated
        return found[0]

    def _before(self, boundary: int) -> list[int]:
        """Why rank 0 has not written a plan: it waits for these ranks, or is behind itself."""
        reached = boundary - 2 if self._core.joined else boundary - 1
        return self._board.behind(reached) or [0]

    def _compare_steps(self, boundary: int) -> None:
        """
        Rank 0: end if a rank has called `step` more or less often than this one after as many optimizer steps.

        Its part of a copy would be of another step than those of others, and it would apply results at another one.
        """
        recent = {n: steps for n, steps in self._steps.items() if n > boundary - PLANS}
        self._steps = recent | {boundary: self._optimizer_steps.first}
        for rank, (reached, steps) in enumerate(self._board.steps()):
            own = self._steps.get(reached, 0)
            if own and steps and own != steps:  # 0: it does not report steps
                made = f"rank 0 has made {own} optimizer steps, and {self._group.named([rank])} {steps}"
                self._exit(f"after as many calls of learner.step(), {made}; {EXPECTED}")

    def _written(self, text: str) -> None:
        self._findings |= Finding.WRITTEN
        self._overwritten = text

    def _show_findings(self) -> None:
        """Rank 0: name what any rank has found out about the program."""
        for finding, ranks in self._findings_of_ranks.look(self._board.findings()):
            if finding in NAMED and 0 in ranks:
                continue  # this rank has named what it is
            text = FOUND[finding]
            if finding is Finding.WRITTEN and self._overwritten:
                text = self._overwritten
            if len(ranks) < self._group.size:  # the others may notice it later, with other results
                text = f"{text}; noticed in {self._group.named(ranks)}"
            if finding in PROBLEMS:
                found = (self._replica.problem_of_ranks, text)
                self._replica.problem_of_ranks = "; ".join(filter(None, found))
            log.warning("%s", text)

    def _await_ranks(self, boundary: int) -> None:
        """Rank 0: every rank has followed the plan of this boundary."""
        self._await(
            lambda: not self._board.behind(boundary), lambda: self._board.behind(boundary),
            "did not end the step before the last",
        )  # fmt: skip

    def _await(
        self, there: Callable[[], bool], ranks: Callable[[], Sequence[int]], failing: str
    ) -> None:
        """
        Return as soon as `there()` is true; without an end of the others, and with a deadline.

        Args:
            there: whether there is nothing to wait for.
            ranks: those that are waited for.
            failing: what they did not do, once training has begun.
        """
        if there():
            return
        began = checked = time.monotonic()
        shown = False
        while not there():
            now = time.monotonic()
            self._check_machines()
            if now - checked > ALIVE_SECONDS:
                checked = now
                self._check_ranks(there)
            if now - began > SHOWN_SECONDS and not shown:
                shown = True
                self._show_waiting(ranks())
            if now - began > WAIT_SECONDS:
                expected = EXPECTED
                if not self._core.joined:
                    failing, expected = (
                        "did not take the job's model",
                        "its own output has the reason",
                    )
                text = f"{self._group.named(ranks())} {failing} within {WAIT_SECONDS:.0f} s"
                self._exit(f"{text}; {expected}")
            time.sleep(WAIT_POLL_SECONDS)

    def _check_ranks(self, there: Callable[[], bool]) -> None:
        ended = [rank for rank, process in self._group.processes.items() if process.ended]
        ended += [rank for rank in self._group.hosts if self._board.left(rank)]
        if ended and not there():  # after its last step, a rank may end
            self._exit(f"{self._group.named(ended)} exited, so this learner exits")

    def _check_machines(self) -> None:
        """End if the learner has failed on another machine."""
        if text := self._machines.failure:
            self._exit(text)

    def _show_waiting(self, ranks: Sequence[int]) -> None:
        if self._rank == (1 if 0 in ranks else 0):
            text = f"waiting up to {WAIT_SECONDS:.0f} s for {self._group.named(ranks)}"
            print(f"diloco: {self.name}: {text}", file=sys.stderr, flush=True)

    def _exit(self, text: str) -> NoReturn:
        self._end(EXIT_TRY_AGAIN, text)

    def _end(self, code: int, text: str) -> NoReturn:
        self._board.fail(text)  # so that the ranks of other machines do not see this one leave
        self._carry_out(self._core.close("interrupted"))
        raise exit_with(code, f"{self.name}: {text}")

    # ------------------------------------------------------------ actions

    def _carry_out(
        self, actions: Sequence[core.Action], plan: Plan | None = None,
        copies: Mapping[int, HostCopy] | None = None,
    ) -> dict[int, HostCopy]:  # fmt: skip
        """
        Carry out the actions in order; returns the host copies of which this rank wrote its part.

        Args:
            actions: the same in all ranks.
            plan: that they follow.
            copies: what this boundary has copied, for the link to learn of.
        """
        copied: dict[int, HostCopy] = {}
        for action in actions:
            match action:
                case core.CopyFragment(fragment, copy) if plan is not None:
                    self._replica.copy_out(fragment, plan.places[fragment])
                    copied[fragment] = copy
                case core.ApplyFragment(fragment):
                    self._apply(fragment)
                case core.Send(state) if plan is not None:
                    if self._first is not None:
                        decisions = self._first.decisions
                        decisions.followed(
                            state, copies or {}, boundary=plan.boundary,
                            model=self._model_copied and not decisions.model_copying,
                        )  # fmt: skip
                case core.CopyModel(model) if plan is not None:
                    self._replica.copy_model(plan.places)
                    self._model_copied = True
                    if self._first is not None:
                        self._first.model_copied(model, plan.places)
                case core.ApplyModel(fragments):
                    self._replica.apply_model(fragments)
                case core.ShowProgress(text):
                    if self._first is not None:
                        print(f"diloco: {text}", file=sys.stderr, flush=True)
                case core.LoadCheckpoint() if plan is not None:
                    self._load(plan, parameters=True)
                case core.LoadOptimizers() if plan is not None:
                    self._load(plan, parameters=False)
                case core.AwaitLink():
                    pass  # `_join` does
                case core.Leave():
                    self._leave(action)
                case core.Exit(code, text):
                    raise exit_with(code, text)
                case _:
                    raise AssertionError(f"{action} without a plan")
        return copied

    def _leave(self, action: core.Leave) -> None:
        failed = bool(self._board.failure)
        self._board.leave(self._rank)
        self._machines.close()
        if self._first is not None:
            self._first.leave(action)
        if (
            self._checkpoints is not None and not failed
        ):  # else: pieces of some ranks will never come
            self._checkpoints.finish()
        if failed:
            self._replica.give_up()
        self._release()


EXPECTED = (
    "expected every rank to call learner.step() once after each optimizer step, and each step to have a collective of "
    "the training, such as the averaging of gradients"
)


def _journal(config: LearnerSettings, group: RankGroup) -> BackgroundWriter | None:
    """Rank 0's steps.jsonl; a disk that refuses it ends all ranks with that sentence."""
    journal, error = None, None
    if group.rank == 0 and config.state is not None:
        try:
            config.state.mkdir(0o700, parents=True, exist_ok=True)
            journal = BackgroundWriter(
                JournalWriter(config.state / "steps.jsonl"), part_bytes=STEPS_PART_BYTES
            )
        except DilocoError as problem:
            error = problem
        except OSError as problem:
            error = StorageError(f"{config.state}: {problem.strerror or problem}")
    group.agree("", error)
    return journal
