"""What one rank does for a learner whose ranks are on several machines; where all are on one, nothing."""

from __future__ import annotations

from collections.abc import Mapping

from diloco_worker.core.agreement import Board, Followed, Plan
from diloco_worker.core.messages import LinkState
from diloco_worker.trainer import rendezvous
from diloco_worker.trainer.machines import FirstMachine, FurtherMachine
from diloco_worker.trainer.rank_group import RankGroup
from diloco_worker.trainer.rank_replica import RankReplica
from diloco_worker.trainer.rank_watch import RankWatch


class RankMachines:
    """
    The connections to other machines, and the watch over this one. Creating it connects them.

    Args:
        group: the ranks, which have found their machines.
        replica: of this rank.
        board: of this machine.
        master: host of rank 0, as this rank reaches it; "": not known.
        port: on which rank 0 listens; 0: any free one.

    Raises:
        UnavailableError: two machines cannot connect; in all ranks.
    """

    def __init__(
        self, group: RankGroup, replica: RankReplica, board: Board, *, master: str, port: int
    ) -> None:
        self._board = board
        self._first: FirstMachine | None = None
        self._further: FurtherMachine | None = None
        self._watch: RankWatch | None = None
        if len(group.machines) == 1:
            return
        sockets = rendezvous.connect(group, master=master, port=port)
        watched = dict(group.processes)
        if group.rank == 0:
            self._first = FirstMachine(
                replica.shared, board, replica.machines, ranks=group.size, named=group.named
            )
            self._first.begin(sockets)
        elif group.rank == group.leader:
            (own,) = replica.machines
            others = [rank for rank in range(group.size) if rank not in own.ranks]
            self._further = FurtherMachine(
                replica.shared, board, own, others=others, first=group.named([0])
            )
            self._further.begin(sockets[0])
        else:
            watched = {group.leader: watched[group.leader]}
        self._watch = RankWatch(board, watched, learner=group.learner, check=self._check)
        self._watch.start()

    @property
    def failure(self) -> str:
        """Why all ranks are to end; empty: they are not."""
        return self._board.failure if self._watch is not None else ""

    def publish(self, plan: Plan, record: bytes) -> None:
        """Rank 0: the plan of a boundary is on the own board."""
        if self._first is not None:
            self._first.publish(plan, record)

    def visible(self, state: LinkState) -> LinkState:
        """Rank 0: a state of the link, without what has not reached all machines."""
        return state if self._first is None else self._first.visible(state)

    def arrived(self, followed: Followed) -> bool:
        """Rank 0: whether the copies of a boundary are complete."""
        return self._first is None or self._first.arrived(followed)

    def entered(self, boundary: int, places: Mapping[int, int], *, model: bool) -> None:
        """This rank has followed a plan; see `FurtherMachine.entered`."""
        if self._further is not None:
            self._further.entered(boundary, places, model=model)

    def close(self) -> None:
        """This rank leaves the job, or ends by itself."""
        if self._watch is not None:
            self._watch.close()
        for machine in (self._first, self._further):
            if machine is not None:
                machine.close()

    def _check(self) -> None:
        for machine in (self._first, self._further):
            if machine is not None:
                machine.check()
