"""
`Learner`: adds an ordinary torch training loop to a DiLoCo job.

    learner = Learner.connect(model, optimizer)
    while not learner.done:
        loss = train_one_step(model, optimizer, learner.step_index)
        learner.step(tokens=n_tokens, loss=loss)

`Learner` is a facade. In a job `joined.py` does the work; without one, `standalone.py` does. Neither
touches the network: the link process does (link/).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from diloco.errors import (
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    ConfigError,
    DilocoError,
    StorageError,
    UnavailableError,
)
from diloco.spec import RunSpec
from diloco_worker import settings
from diloco_worker.core.open_blocks import Data
from diloco_worker.data_blocks import Block, blocks_of, data_of
from diloco_worker.examined import ExaminedTrainer
from diloco_worker.identities import Identity, of, with_ranks
from diloco_worker.joined import JoinedTrainer
from diloco_worker.standalone import StandaloneTrainer
from diloco_worker.trainer.kept import Stateful
from diloco_worker.trainer.layout import is_dtensor
from diloco_worker.trainer.learning_rate import (
    GlobalStepScheduler,
    refuse_second,
    starting_over,
)
from diloco_worker.trainer.stepped import not_stepped
from diloco_worker.trainer.termination import exit_with, once_more
from diloco_worker.trainer.wrappers import optimizers_of

if TYPE_CHECKING:
    from diloco_worker.trainer.rank_group import RankGroup

log = logging.getLogger(__name__)


class Trainer(Protocol):
    """What `Learner` needs of its implementations; each member means what it means there."""

    name: str
    index: int
    spec: RunSpec | None
    config: dict[str, Any]

    @property
    def done(self) -> bool:
        """Whether to leave the loop."""

    @property
    def closed(self) -> bool:
        """Whether it has left the job."""

    @property
    def step_index(self) -> int:
        """Global step t."""

    @property
    def total_steps(self) -> int | None:
        """T."""

    @property
    def local_step(self) -> int:
        """t_m."""

    @property
    def resumed(self) -> bool:
        """Whether the optimizers continue with an earlier state."""

    def keep(self, objects: Mapping[str, Any]) -> None:
        """Keep the state of these objects in local checkpoints."""

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        """Count an optimizer step and exchange fragments."""

    def take_block(self, data: Data) -> int | None:
        """The serial of the next block of data; None: the loop ends."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job, perhaps after an error of the program."""


class Learner:
    """
    One learner of a job; without a job (DILOCO_SYNCER is not set) it only counts steps.

    Create it with `Learner.connect`, in the main thread and after the model is on its device.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        identity: Identity | None = None,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._trainer, self._pid = trainer, os.getpid()
        self._unchecked = optimizers
        """Whose schedules the first step checks, if this process has begun in the middle of the job."""
        self._caught: SystemExit | None = None
        """With which a method has ended the process; if the program continues, it has been caught."""
        self._schedulers: dict[int, GlobalStepScheduler] = {}
        """By id of what they wrap."""
        self.identity = identity or Identity()
        """Which learner this is; its local step is that at which this process began to train."""

    @staticmethod
    def connect(
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        standalone_steps: int | None = None,
        connect_timeout_seconds: float = 600,
        every_rank: bool | None = None,
    ) -> Learner:
        """
        Join the job that the environment names; return when the model holds the job's parameters.

        Of a learner of several processes (RANK, WORLD_SIZE), each calls it, after
        torch.distributed.init_process_group and with the model that it trains: DistributedDataParallel,
        `fully_shard`, `parallelize_module`, or all of them. All of them call `step` once after each optimizer
        step. They may be on several machines.

        Args:
            model: its parameters are overwritten in place, now and during training; move it to its
                device first.
            optimizer: one or several, of the model's own parameters, also as Accelerate and Lightning wrap them.
            standalone_steps: without a job, `done` after this many steps; None: never.
            connect_timeout_seconds: how long to wait for a syncer, or a rank, that does not answer.
            every_rank: False: rank 0 alone connects, and the others take its parameters after each `step`, for
                example with torch.distributed.broadcast. None: rank 0 finds out; it waits up to 10 s for another
                rank, with DistributedDataParallel up to `connect_timeout_seconds`; with DTensors all connect.

        Raises:
            SystemExit: 78 if the job permanently refuses this model, spec or name, or if the ranks do not
                fit together; 75 if the syncer or a rank does not answer in time or a newer process replaced this
                one; 1 if DILOCO_STATE cannot be written. One sentence on standard error gives the
                reason.
            TypeError: `model` is no module, or `optimizer` no optimizer.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}, expected one torch.nn.Module; put several into one "
                "torch.nn.ModuleList"
            )
        optimizers = optimizers_of(optimizer)
        try:
            config = settings.from_env()
            if config is None:
                return Learner(StandaloneTrainer(steps=standalone_steps))
            _refuse_import()
            _refuse_second(config.learner)
            config = with_ranks(config)
            with torch.inference_mode(False):  # of what is made here, views are written later
                trainer = _trainer(
                    config, model, optimizers, every_rank=every_rank, timeout_seconds=connect_timeout_seconds
                )  # fmt: skip
            _connected[config.learner] = trainer
            if trainer.closed and config.rank == 0:
                log.warning(
                    "%s: there is nothing left to train, so that this model has no parameters of the job; what it "
                    "trained is the exported model", config.learner,
                )  # fmt: skip
            own = of(config, local_step=trainer.local_step)
            return Learner(trainer, identity=own, optimizers=optimizers)
        except UnavailableError as error:
            raise exit_with(EXIT_TRY_AGAIN, str(error)) from None
        except StorageError as error:
            # Not a refusal: the disk may work again after a restart.
            raise exit_with(1, str(error)) from None
        except DilocoError as error:
            raise exit_with(EXIT_REFUSED, str(error)) from None

    # ------------------------------------------------------------ properties

    @property
    def done(self) -> bool:
        """
        Whether to leave the loop: the job is complete, or this process received SIGTERM.

        The first time it is true, the learner leaves the job.
        """
        own, (caught, self._caught) = self._own("done"), (self._caught, None)
        if caught is not None:  # a refusal must not pass for a loop that ended by itself
            raise once_more(caught)
        done = own.done
        self._follow()
        return done

    @property
    def step_index(self) -> int:
        """Global step t, for the learning rate schedule; without a job: the local step."""
        return self._trainer.step_index

    @property
    def total_steps(self) -> int | None:
        """
        T, as last received from the syncer (it can be raised while the job runs); without a job:
        `standalone_steps`.
        """
        return self._trainer.total_steps

    @property
    def local_step(self) -> int:
        """t_m: steps of this learner over all its restarts, so the position in its data."""
        return self._trainer.local_step

    @property
    def resumed(self) -> bool:
        """
        Whether the optimizers continue with the state of a local checkpoint, or of a peer; without a job: False.

        False after a restart: they start with new state, and the learning rate may need a warm-up of its own.
        """
        return self._trainer.resumed

    @property
    def name(self) -> str:
        """ "<region>/<index>"; without a job: "alone/0"."""
        return self._trainer.name

    @property
    def index(self) -> int:
        """
        A number that no other learner of the job has: index in the region × number of regions +
        position of the region.

        Adding or removing learners does not change it; only another set of regions does. Without a
        job: 0.
        """
        return self._trainer.index

    @property
    def spec(self) -> RunSpec | None:
        """What all processes of the job share; without a job: None."""
        return self._trainer.spec

    @property
    def config(self) -> dict[str, Any]:
        """DILOCO_CONFIG; without a job: empty."""
        return self._trainer.config

    # ------------------------------------------------------------ state of the training program

    def keep(self, **objects: Stateful) -> None:
        """
        Keep the state of these objects in the local checkpoints, taken at the same step as the rest.

        Call it before the first `step`. If the optimizers continue with a checkpoint (`resumed`) that has
        the state of an object, its `load_state_dict` is called now. Without a job, nothing is kept.

        Args:
            objects: by name, anything with `state_dict` and `load_state_dict`, such as a data loader, an
                average of the parameters, a sampler or a GradScaler. States consist of tensors, numbers,
                strings, None, lists, tuples and dicts.

        Raises:
            TypeError: an object has not both methods.
            ValueError: a name is taken, or training has begun.
            SystemExit: 78 if an object does not take the state that it had. The first `step` ends the same
                way if a state cannot be saved.
        """
        self._own("keep").keep(objects)

    def scheduler(self, scheduler: LRScheduler) -> GlobalStepScheduler:
        """
        Let a learning-rate scheduler follow the global step, also after restarts and in learners that join later.

        The scheduler is at `step_index` when this returns, after each `step`, and after `done` was read.
        Calling its `step` as well changes nothing.

        Args:
            scheduler: a new one of torch.optim.lr_scheduler, made for the job's global steps.

        Returns:
            The scheduler to use instead.

        Raises:
            TypeError: not a scheduler of torch, or ReduceLROnPlateau, which follows a metric.
            ConfigError: it is more than 10,000,000 steps behind, or its optimizer has one already.
        """
        found = self._schedulers.get(id(scheduler))
        if found is None:
            refuse_second(scheduler, [other.scheduler for other in self._schedulers.values()])
            found = GlobalStepScheduler(scheduler, lambda: self.step_index)
            self._schedulers[id(scheduler)] = found
        return found

    def _check_schedules(self) -> None:
        """Name schedulers that begin again with each process."""
        optimizers, self._unchecked = self._unchecked, ()
        if self.spec is None or self.step_index <= self.spec.interval or self.identity.process:
            return  # rank 0 names what is the same in all ranks
        if found := starting_over(optimizers):
            log.warning(
                "%s: the schedule of the learning rate (%s) starts over, because it counts the steps of this process, "
                "which began at global step %d; let learner.scheduler(scheduler) follow the global step, and ignore "
                "this line if its rates are those of learner.step_index",
                self.name, ", ".join(found), self.step_index,
            )  # fmt: skip

    def _follow(self) -> None:
        for scheduler in self._schedulers.values():
            scheduler.step()

    # ------------------------------------------------------------ data and seeds

    def shard(
        self, dataset: Any, *, max_learners_per_region: int | Mapping[str, int] | None = None
    ) -> Any:
        """The items of a dataset that no other learner reads: see `Identity.shard`."""
        return self.identity.shard(dataset, max_learners_per_region=max_learners_per_region)

    def seed(self) -> int:
        """A seed that differs between learners and between restarts: see `Identity.seed`."""
        return self.identity.seed()

    def blocks(self, dataset: Any, *, size: int, ahead: int = 2) -> Iterator[Block]:
        """
        Blocks of a dataset until `done`, each at one learner of the job at a time; another pass follows each.

        A block that a lost learner had goes to another one. It counts as trained on when the loop takes the next
        one. Without a job, this learner gets all blocks.

        Args:
            dataset: something with a length, or the number of its items; the same in all learners.
            size: items of a block; the last one may have fewer.
            ahead: blocks to have besides the one in use, so that the loop does not wait for the network.

        Raises:
            SystemExit: 78 if another learner has stated another dataset, the syncer is of an earlier release, or
                this learner has several ranks; 75 if no block came in time.
            TypeError: the dataset has no length, or a number is not whole.
            ValueError: a number is out of its range, or blocks of another dataset were taken before.
        """
        take = self._own("blocks").take_block
        return blocks_of(data_of(dataset, size=size, ahead=ahead), take)

    # ------------------------------------------------------------ training

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        """
        Call this once after each optimizer step.

        Args:
            tokens: amount of work of the step, more than 0: tokens, or any other unit, such as images, that
                is the same in all learners; the weight of this learner in a merge.
            loss: one number, for logs and metrics; a tensor on another device is read one step later, so that
                the step does not wait for the device.

        Raises:
            ValueError: `tokens` is not a whole number, or `loss` is not one number.
        """
        count = int(tokens) if isinstance(tokens, np.integer) else tokens
        own = self._own("step")
        if self._unchecked:
            self._check_schedules()
        try:
            own.step(tokens=count, loss=loss)
        except SystemExit as error:
            self._caught = error
            raise
        self._follow()

    def close(self) -> None:
        """Leave the job; `done` is true from now on. Not needed after `done` became true."""
        self._leave()

    def __enter__(self) -> Learner:
        """Return this learner, for `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Leave the job."""
        self._leave(error)

    # ------------------------------------------------------------ processes that the program forks

    def _own(self, method: str) -> Trainer:
        # A fork has the memory and the socket of the process that trains: what it took there would be missing here.
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"learner.{method}: used in process {os.getpid()}, which was forked from process {self._pid}, where "
                "Learner.connect was called; only that one can use the learner: pass the others what they need, such "
                "as a multiprocessing.Event for `done`"
            )
        return self._trainer

    def _leave(self, error: BaseException | None = None) -> None:
        if os.getpid() == self._pid:  # a fork that ends inside of `with` is not the learner
            self._trainer.close(error)


_connected: weakref.WeakValueDictionary[str, Trainer] = weakref.WeakValueDictionary()
"""By name of the learner, what this process has connected; forks know it, too."""


def _refuse_second(name: str) -> None:
    # It would replace the first one at the syncer, as the next process of a learner does.
    if (first := _connected.get(name)) is not None and not first.closed:
        raise ConfigError(
            f"Learner.connect: called again although learner {name} is connected; a learner has one model: put "
            "several modules into one torch.nn.ModuleDict, and connect it once with all optimizers; to connect again, "
            "call close() of the first one before"
        )


def _trainer(
    config: settings.LearnerSettings, model: nn.Module, optimizers: Sequence[Optimizer], *,
    every_rank: bool | None, timeout_seconds: float,
) -> Trainer:  # fmt: skip
    """A trainer in a job or in an examination: of one process, or of one rank of several."""
    # Before the ranks meet: ranks whose optimizers are alike end alike.
    if (problem := not_stepped(model, optimizers)) and config.rank == 0:
        log.warning("%s", problem)
    group = _ranks(config, model, every_rank=every_rank, timeout_seconds=timeout_seconds)
    if config.examination is not None:
        return ExaminedTrainer(config, model, optimizers, group=group)
    if group is None:
        return JoinedTrainer(config, model, optimizers, connect_timeout_seconds=timeout_seconds)
    # Of all learners, only those of several ranks need the seconds that this import takes.
    from diloco_worker.distributed import DistributedTrainer

    return DistributedTrainer(
        config, model, optimizers, group=group, connect_timeout_seconds=timeout_seconds
    )


def _refuse_import() -> None:
    # It would replace the learner that starts this process, such as a worker of its data loader, at each start.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "Learner.connect: called while a process of multiprocessing (spawn or forkserver) imports the program, "
            'expected the program alone to join the job; put what trains below `if __name__ == "__main__":`'
        )


def _ranks(
    config: settings.LearnerSettings, model: nn.Module, *, every_rank: bool | None, timeout_seconds: float
) -> RankGroup | None:  # fmt: skip
    """The ranks of this learner, all of which have connected; None: this process connects alone."""
    sharded = any(is_dtensor(parameter) for parameter in model.parameters())
    several = every_rank is not False and (config.world_size > 1 or sharded)
    if several and distributed.is_available() and distributed.is_initialized():
        from diloco_worker.trainer.rank_group import RankGroup

        _compare_ranks(config)
        group = RankGroup.of_process(config.learner, timeout_seconds=timeout_seconds)
        averaged = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        seconds = timeout_seconds if averaged else None
        if not group.alone(may_be=every_rank is None and not sharded, seconds=seconds):
            group.wait_for_all()
            group.find_machines(config.machine)
            return group
    elif every_rank:
        raise ConfigError(
            "Learner.connect: every_rank is True, expected more than one process and "
            "torch.distributed.init_process_group before"
        )
    _refuse_other_ranks(config)
    return None


def _compare_ranks(config: settings.LearnerSettings) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if (rank, size) != (config.rank, config.world_size):
        raise ConfigError(
            f"RANK and WORLD_SIZE: {config.rank} and {config.world_size}, expected {rank} and {size} as "
            "torch.distributed has them; start the program with torchrun, or set both"
        )


def _refuse_other_ranks(config: settings.LearnerSettings) -> None:
    # The syncer sees the ranks as one learner, so each connection would replace the previous one.
    if config.rank > 0:
        raise ConfigError(
            f"RANK: {config.rank}, expected 0: of the {config.world_size} processes of learner "
            f"{config.learner} only rank 0 connects if torch.distributed is not initialized or every_rank is False; "
            "call init_process_group before Learner.connect in every rank, or let the others take the parameters of "
            "rank 0, for example by torch.distributed.broadcast after its learner.step()"
        )
