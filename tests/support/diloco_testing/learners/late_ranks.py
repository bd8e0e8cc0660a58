"""The ranks of a learner, each on a device that does its work late, beside a model that does the same at once."""

from __future__ import annotations

import contextlib
import random

from diloco.spec import RunSpec
from diloco_testing.learners.late_learner import SPEC, LateLearner, Net, NoSignals, update
from diloco_testing.learners.link_in_process import LinkInProcess
from diloco_testing.learners.rank_threads import in_ranks
from diloco_testing.learners.slow_device import SlowDevice, to_device
from diloco_worker import distributed
from diloco_worker.distributed import DistributedTrainer
from diloco_worker.settings import from_env
from diloco_worker.trainer import first_rank
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_replica import RankReplica
from diloco_worker.trainer.replica import Replica


class LateRanks(LateLearner):
    """
    Real trainers of ranks that hold replicas, in one process: in each step, one after the other in any order.

    Args:
        monkeypatch: of the test.
        tmp_path: of the test.
        seed: of the delays.
        ranks: number of ranks.
        registers: whether memory of the host can be registered.
        spec: of the job.
    """

    def __init__(
        self, monkeypatch, tmp_path, *, seed: int, ranks: int, registers: bool = True,
        spec: RunSpec = SPEC,
    ) -> None:  # fmt: skip
        self._prepare(monkeypatch, tmp_path, spec)
        self.order = random.Random(seed)
        self.devices = [SlowDevice(seed + rank, registers=registers) for rank in range(ranks)]
        self.device = self.devices[0]
        self.models = [Net() for _ in range(ranks)]
        self.model = self.models[0]
        for model in self.models:
            to_device(model)

        def replica_of(model, spec, group) -> RankReplica:
            return RankReplica(model, spec, group, device=self.devices[group.rank])

        monkeypatch.setattr(distributed.rank_replica, "replica_of", replica_of)
        monkeypatch.setattr(distributed, "Termination", NoSignals)
        monkeypatch.setattr(distributed, "RunQueue", NoRunQueue)
        links: list[LinkInProcess] = []

        def link(shared) -> LinkInProcess:
            links.append(LinkInProcess(shared, spec, seed))
            return links[0]

        monkeypatch.setattr(first_rank, "LinkProcess", link)

        def trainer(group: RankGroup) -> DistributedTrainer:
            model = self.models[group.rank]
            return DistributedTrainer(
                from_env(), model, [], group=group, connect_timeout_seconds=60
            )

        self.trainers = in_ranks(ranks, trainer)
        assert all(isinstance(t, DistributedTrainer) for t in self.trainers), self.trainers
        self.trainer = self.trainers[0]
        (self.link,) = links
        self.plain = Replica(self.shadow, spec)
        for fragment in range(len(self.plain.layout.fragments)):
            self._apply_to_shadow(fragment)

        def no_wait(there, ranks, failing) -> None:
            assert there(), f"a rank waits in a step: {failing}"

        for trainer_ in self.trainers:
            monkeypatch.setattr(trainer_, "_await", no_wait)

    def step(self, *, waits: bool = False) -> None:
        """One step of all ranks."""
        step = self.trainer.local_step + 1
        self._step_shadow(step)
        before = [*self.trainer._core.applied]
        for rank in self.order.sample(range(len(self.trainers)), len(self.trainers)):
            device, model = self.devices[rank], self.models[rank]
            device.train(lambda model=model: update(model, step))
            if waits:
                device.finish_training()  # what a blocking copy does
            with device.no_waiting, device.unguarded() if waits else contextlib.nullcontext():
                self.trainers[rank].step(tokens=10)
        for trainer in self.trainers:
            assert trainer._core.applied == self.trainer._core.applied
        self._follow(before)

    def pass_time(self, most: int) -> None:
        """Each device does some of its work."""
        for device in self.devices:
            device.pass_time(self.order.randint(0, most))

    def finish(self) -> None:
        """Each device does all of its work."""
        for device in self.devices:
            device.finish()

    def close(self) -> None:
        """All ranks leave."""
        for trainer in self.trainers:
            trainer.close()


class NoRunQueue:
    """In place of `RunQueue`, whose thread must not end."""

    def seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass
