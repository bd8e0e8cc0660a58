"""What rank 0 of a learner does beside its share: the link process, and the decisions for all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence

from diloco_worker.core.agreement import HOME, FirstRank, Plan
from diloco_worker.core.ledger import HostCopy
from diloco_worker.core.messages import LinkState
from diloco_worker.core.trainer import Leave, TrainerCore
from diloco_worker.ipc.link_process import LinkProcess
from diloco_worker.trainer.rank_machines import RankMachines
from diloco_worker.trainer.rank_replica import RankReplica

NOTHING = HostCopy(local_step=0, steps=0, tokens=0, base=0)


class LinkRank:
    """The rank that has the link process: it decides for all of them, and lets the link know what they did."""

    def __init__(self, replica: RankReplica, trainer: TrainerCore, machines: RankMachines) -> None:
        self._replica, self._core, self._machines = replica, trainer, machines
        self._shared = replica.shared
        self.link = LinkProcess(self._shared)
        self.decisions = FirstRank(
            len(replica.layout.fragments), replica.spares, devices=replica.devices
        )
        self.decisions.followed(trainer.state(), {})
        self.decisions.settle([])
        self._link_state = trainer.link_state
        self._locks: contextlib.ExitStack | None = None
        """Of all fragments, while the ranks copy the whole model."""

    def plan_to_join(self, boundary: int, *, terminated: bool) -> Plan:
        """The plan of a boundary before training."""
        state = self._newest()
        model = self._model_wanted(state)
        if not model:
            state = self._without_request(state)
        places = dict.fromkeys(range(len(self.decisions.places.current)) if model else (), HOME)
        return Plan(
            boundary=boundary, link_state=state, places=places, terminated=terminated, now=time.monotonic()
        )  # fmt: skip

    def plan(self, boundary: int, *, terminated: bool) -> Plan:
        """The plan of a boundary in training."""
        state = self._newest()
        model = self._model_wanted(state)
        if not model:
            state = self._without_request(state)
        plan = self.decisions.plan(
            boundary, state, applied=self._core.applied, terminated=terminated, now=time.monotonic(), model=model
        )  # fmt: skip
        self._free_places(state)
        return plan

    def settle(self, finished: int) -> None:
        """
        All ranks have followed the last plan: let the link know, as far as the copies have arrived.

        Args:
            finished: the newest boundary of which the devices of all ranks have finished the work.
        """
        self.decisions.finished = finished
        while (oldest := self.decisions.oldest) is not None:
            if oldest.boundary > finished or not self._machines.arrived(oldest):
                break
            offers = []
            for fragment, place, copy in self.decisions.written():
                with self._try_lock(fragment) as held:
                    if held:
                        self._shared.set_host_copy(fragment, copy, place=place)
                        offers.append((fragment, place))
            state = self.decisions.settle(offers)
            self._release()
            if state is not None:
                self.link.offer(state)
            following = self.decisions.oldest
            if offers and following is not None and not following.copying:
                break  # the link reads the newest report only: that one would replace these offers
        self._release()

    def _release(self) -> None:
        """Release the locks, if no copy of the whole model is being made or on its way."""
        copied = self._core.initial_copied >= self._link_state.initial_requested
        if self._locks is not None and copied and not self.decisions.model_copying:
            self._locks.close()
            self._locks = None

    def model_copied(self, copies: Sequence[HostCopy], places: Mapping[int, int]) -> None:
        """The counters of the copies, which the link reads after `settle`."""
        for fragment, copy in enumerate(copies):
            self._shared.set_host_copy(fragment, copy, place=places[fragment])

    def leave(self, action: Leave) -> None:
        """End the link."""
        if self._locks is not None:
            self._locks.close()
        self.link.leave(action.state)

    def _newest(self) -> LinkState:
        now = time.monotonic()
        if self.link.pid is None:
            self.link.ensure(self.decisions.settled, now=now)
        self._link_state = self.link.newest(now=now) or self._link_state
        return self._machines.visible(self._link_state)

    def _model_wanted(self, state: LinkState) -> bool:
        """Whether the ranks copy the whole model at the next boundary: the link reads nothing meanwhile."""
        if state.initial_requested <= self._core.initial_copied or self.decisions.copying:
            return False
        if self._locks is None:
            with contextlib.ExitStack() as locks:
                for fragment in range(len(self._replica.layout.fragments)):
                    if not locks.enter_context(self._shared.try_lock(fragment)):
                        return False  # the next boundary tries again
                self._locks = locks.pop_all()
        return True

    def _without_request(self, state: LinkState) -> LinkState:
        """The state as if the syncer had not requested a model yet; copies come to an end if it has."""
        copied = self._core.initial_copied
        if state.initial_requested <= copied:
            return state
        return dataclasses.replace(state, initial_requested=copied, open=())

    def _free_places(self, state: LinkState) -> None:
        """
        For each fragment that lacks a place, release one of a fragment that is not announced: of the oldest copy.

        One whose announcement has just ended is likely to be pulled.
        """
        for fragment in self.decisions.short:
            places = self.decisions.places
            idle = [p for p in places.idle(state.open) if places.fits(fragment, p)]
            for other in sorted(idle, key=lambda p: self._shared.host_copy(p).local_step):
                if self._is_released(other):
                    break

    def _is_released(self, fragment: int) -> bool:
        """Release the place of a fragment's copy; False: the link is reading it."""
        with self._try_lock(fragment) as held:
            if held:
                self._shared.set_host_copy(fragment, NOTHING)
                self.decisions.places.current[fragment] = HOME
            return held

    def _try_lock(self, fragment: int) -> contextlib.AbstractContextManager[bool]:
        """The fragment's lock; held already while the whole model is copied: record locks do not nest."""
        if self._locks is not None:
            return contextlib.nullcontext(True)
        return self._shared.try_lock(fragment)
