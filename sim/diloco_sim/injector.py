"""
Carries out a plan of faults on the clock, the network and the disks; what only a world can do goes to the world.

Overlapping faults of a kind add up: of two cuts the link is healed when the second is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diloco_sim import faults
from diloco_sim.checkers.observations import Copied, Flipped, Restored
from diloco_sim.clock import Clock, Process
from diloco_sim.disk import Files, SimulatedDisk, Weakness
from diloco_sim.faults import Fault, Kind, Plan
from diloco_sim.network import Network
from diloco_sim.wire import BULK, CONTROL, Direction

Begin = Callable[[Fault, bool], object]
"""Called with a fault, and True at its beginning, False at its end."""

_WEAKNESSES = {
    Kind.DISK_SLOW: Weakness.SLOW,
    Kind.DISK_HANG: Weakness.HANG,
    Kind.DISK_FULL: Weakness.FULL,
    Kind.DISK_FAIL: Weakness.FAIL,
    Kind.DISK_FORGET: Weakness.FORGET,
}
_OF_THE_WORLD = frozenset(
    (
        *faults.BLOCKS,
        *faults.BREAKS,
        *faults.CHECKPOINT,
        *faults.MEMBERSHIP,
        *faults.MISBEHAVIOUR,
        *faults.PEERS,
    )
)


class Injector:
    """
    Schedules all faults of a plan.

    Args:
        plan: a fault of a process that is not there does nothing.
        clock: its processes are the targets.
        network: carries out the faults of links.
        disks: of the processes that have one.
        restart: starts the program of a process that has crashed; called after `Process.start`.
        world: carries out membership, misbehaviour, connections that break after each pull, and what learners
            find on their own disks.
        observe: gets what happens to files, for the checkers.
        worth_a_copy: whether a copy of a disk that is made now can be restored.
    """

    def __init__(
        self, plan: Plan, *, clock: Clock, network: Network, disks: Mapping[str, SimulatedDisk],
        restart: Callable[[Process], object], world: Begin,
        observe: Callable[[object], object] = lambda event: None,
        worth_a_copy: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._clock, self._network, self._disks = clock, network, disks
        self._restart, self._world, self._observe = restart, world, observe
        self._worth_a_copy = worth_a_copy
        self._active: list[Fault] = []
        self._copies: dict[Fault, Files] = {}
        self._bases: dict[tuple[str, str], tuple[float, float, float, float]] = {}
        self.injected: dict[Kind, int] = {}
        """How many faults of each kind took effect."""
        for fault in plan:
            if fault.kind in _WEAKNESSES:
                self._weaken(fault)
                continue
            if fault.kind is Kind.DISK_RESTORED and fault.target in disks:
                clock.at(max(0.0, fault.begin - fault.amount), self._copy, fault)
            clock.at(fault.begin, self._begin, fault)

    def _copy(self, fault: Fault) -> None:
        """Copy the disk as soon as no operation is under way: what is restored is a state that was."""
        disk, now = self._disks[fault.target], self._clock.now
        if disk.busy_until > now:
            self._clock.at(disk.busy_until, self._copy, fault)
        elif now < fault.begin and self._worth_a_copy():
            self._copies[fault] = disk.copy()
            self._observe(Copied(fault))

    def _weaken(self, fault: Fault) -> None:
        disk = self._disks.get(fault.target)
        if disk is not None:
            self._count(fault)
            disk.weaken(_WEAKNESSES[fault.kind], fault.begin, fault.end, fault.amount or 1.0)

    def _begin(self, fault: Fault) -> None:
        processes = self._clock.processes
        kind = fault.kind
        if kind in _OF_THE_WORLD:
            self._world(fault, True)
        elif kind is Kind.DISK_FLIP:
            disk = self._disks.get(fault.target)
            path = disk.flip() if disk is not None else None
            if path is None:
                return
            self._observe(Flipped(path))
        elif kind in faults.LINK:
            if fault.target not in processes or fault.peer not in processes:
                return
            self._link(fault, True)
        elif fault.target not in processes or not self._strike(fault, processes[fault.target]):
            return
        self._count(fault)
        self._active.append(fault)
        self._clock.at(fault.end, self._end, fault)

    def _end(self, fault: Fault) -> None:
        self._active.remove(fault)
        if fault.kind in _OF_THE_WORLD:
            self._world(fault, False)
        elif fault.kind in faults.LINK:
            self._link(fault, False)
        elif fault.kind is Kind.SLOW:
            self._slow(self._clock.processes[fault.target])
        elif fault.kind in faults.CRASHES:
            process = self._clock.processes[fault.target]
            down = any(f.kind in faults.CRASHES and f.target == fault.target for f in self._active)
            if not process.alive and not down:
                process.start()
                self._restart(process)

    def _strike(self, fault: Fault, process: Process) -> bool:
        """Begin a fault of a process; whether it has an effect."""
        if not process.alive:
            return False
        match fault.kind:
            case Kind.CRASH:
                process.crash(power=fault.peer == faults.POWER)
            case Kind.DISK_RESTORED:
                return self._restore(fault, process)
            case Kind.PAUSE:
                process.pause(fault.end)
            case Kind.JUMP:
                process.jump(fault.amount)
            case Kind.WALL_JUMP:
                process.set_wall(fault.amount)
            case Kind.SLOW:
                process.slowness = max(process.slowness, fault.amount)
        return True

    def _restore(self, fault: Fault, process: Process) -> bool:
        files = self._copies.pop(fault, None)
        if files is None:
            return False
        process.crash(power=False)  # what the machine loses besides is replaced
        self._disks[fault.target].restore(files)
        self._observe(Restored(fault))
        return True

    def _slow(self, process: Process) -> None:
        """Of the strongest fault that is still there: a step that has begun is no longer shortened."""
        slow = (f for f in self._active if f.kind is Kind.SLOW and f.target == process.name)
        process.slowness = max((fault.amount for fault in slow), default=1.0)

    def _link(self, fault: Fault, begins: bool) -> None:
        a, b, network = fault.target, fault.peer, self._network
        change = network.cut if begins else network.heal
        match fault.kind:
            case Kind.CUT:
                change(a, b)
                change(b, a)
            case Kind.HALF_OPEN:
                change(a, b, silent=True)
            case Kind.BULK_DEAD:
                change(a, b, BULK)
                change(b, a, BULK)
            case Kind.CONTROL_DEAD:
                change(a, b, CONTROL)
                change(b, a, CONTROL)
            case _:
                for pair in ((a, b), (b, a)):
                    if _reaches(fault, pair):
                        self._adjust(pair, fault if begins else None)

    def _adjust(self, pair: tuple[str, str], begins: Fault | None) -> None:
        """Set a link to what it was at first, changed by all faults of it."""
        direction: Direction = self._network.direction(*pair)
        if pair not in self._bases:
            self._bases[pair] = (
                direction.latency,
                direction.jitter,
                direction.corruption,
                direction.pipe.bandwidth,
            )
        latency, jitter, corruption, full = self._bases[pair]
        share = 1.0
        for fault in [*self._active, begins] if begins else self._active:
            if not _reaches(fault, pair):
                continue
            match fault.kind:
                case Kind.LATENCY:
                    latency += fault.amount
                case Kind.JITTER:
                    jitter += fault.amount
                case Kind.BANDWIDTH:
                    # The product of several would let one message outlast the faults by hours.
                    share = min(share, fault.amount)
                case Kind.CORRUPTION:
                    corruption = max(corruption, fault.amount)
        direction.latency, direction.jitter, direction.corruption = latency, jitter, corruption
        direction.pipe.bandwidth = full * share

    def _count(self, fault: Fault) -> None:
        self.injected[fault.kind] = self.injected.get(fault.kind, 0) + 1


def _reaches(fault: Fault, pair: tuple[str, str]) -> bool:
    """Whether a fault of a link changes this direction of it."""
    one_way = fault.one_way or fault.kind is Kind.CORRUPTION
    ways = [(fault.target, fault.peer)]
    return pair in (ways if one_way else [*ways, (fault.peer, fault.target)])
