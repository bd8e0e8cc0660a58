"""A plan of faults as text and by sample, and what the injector makes of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from diloco.runtime import disk as files
from diloco_sim import description, faults
from diloco_sim.clock import Clock, Process
from diloco_sim.disk import SimulatedDisk, Weakness
from diloco_sim.faults import Fault, Kind, Plan
from diloco_sim.injector import Injector
from diloco_sim.network import Network
from diloco_sim.seeds import fork
from diloco_sim.wire import BULK, CONTROL

LEARNERS = ("eu/0", "eu/1", "us/0")
EVERY_KIND = dict.fromkeys(Kind, 1.0)


def sample(seed: int, count: int = 50, **options: object) -> Plan:
    return Plan.sample(
        random.Random(seed),
        learners=LEARNERS,
        syncer="syncer",
        horizon=100.0,
        count=count,
        **options,
    )


def test_a_plan_can_be_printed_and_read_back():
    text = """
        3.250..9.000 cut eu/0 syncer   # the whole region
        4.100..4.900 crash syncer power
        0..8 trickle us/0 2000
        5..6 latency syncer us/0 one-way 0.5
    """
    plan = Plan.parse(text)
    assert [f.kind for f in plan] == [Kind.TRICKLE, Kind.CUT, Kind.CRASH, Kind.LATENCY]
    assert plan.faults[3] == Fault(Kind.LATENCY, "syncer", 5.0, 6.0, "us/0", 0.5, one_way=True)
    assert plan.faults[0] == Fault(Kind.TRICKLE, "us/0", 0.0, 8.0, amount=2000.0)
    assert plan.faults[1].peer == "syncer"
    assert str(plan.faults[2]) == "4.100..4.900 crash syncer power"
    assert (Plan.parse(str(plan)), plan.end, len(plan.at(3.5))) == (plan, 9.0, 2)
    assert plan.only(Kind.CUT) == Plan((plan.faults[1],))


@pytest.mark.parametrize(
    "line",
    ["cut eu/0", "1..2 nonsense eu/0", "1..2 cut a b 3 4", "1..2 cut a b one-way", "x..2 cut a b"],
)
def test_what_is_no_fault_is_refused(line):
    with pytest.raises(ValueError, match="is not a fault, expected 'BEGIN"):
        Plan.parse(line)


def test_a_sample_is_a_function_of_the_seed_and_survives_printing():
    for seed in range(30):
        plan = sample(seed, weights=EVERY_KIND)
        assert len(plan) == 50
        assert plan == sample(seed, weights=EVERY_KIND) == Plan.parse(str(plan))
    assert sample(1) != sample(2)
    assert sample(1, count=0) == Plan()


def test_a_sample_has_every_kind_that_has_a_weight_and_no_other():
    kinds = {fault.kind for seed in range(20) for fault in sample(seed, weights=EVERY_KIND)}
    assert kinds == set(Kind)
    honest = {fault.kind for seed in range(20) for fault in sample(seed)}
    assert honest == set(faults.WEIGHTS)
    assert not honest & set(faults.MISBEHAVIOUR)


def test_sampled_faults_name_what_exists():
    for fault in sample(3, count=500, weights=EVERY_KIND):
        assert fault.target in (*LEARNERS, "syncer", "learners")
        assert 0 <= fault.begin <= fault.end
        if fault.kind in faults.LINK:
            assert {fault.target, fault.peer} & {"syncer"}
            assert {fault.target, fault.peer} & set(LEARNERS)
        if fault.kind in faults.AMOUNTS:
            low, high = faults.AMOUNTS[fault.kind]
            assert 0.9 * low <= abs(fault.amount) <= 1.1 * high


class FakeFaultTarget:
    """Processes, a network and a disk under a plan."""

    def __init__(self, *lines: str) -> None:
        source = random.Random(1)
        self.clock = Clock()
        for name in (*LEARNERS, "syncer"):
            self.clock.process(name)
        self.network = Network(self.clock, fork(source), latency=0.1, bandwidth=1000.0)
        self.disk = SimulatedDisk(self.clock, fork(source))
        self.restarts: list[tuple[float, str]] = []
        self.calls: list[tuple[float, Kind, bool]] = []
        self.injector = Injector(
            Plan.parse("\n".join(lines)),
            clock=self.clock,
            network=self.network,
            disks={"syncer": self.disk},
            restart=self.restart,
            world=lambda fault, on: self.calls.append((self.clock.now, fault.kind, on)),
        )

    def restart(self, process: Process) -> None:
        assert process.alive
        self.restarts.append((self.clock.now, process.name))

    def carries(self, source: str, target: str) -> tuple[bool, bool]:
        direction = self.network.direction(source, target)
        return direction.carries(CONTROL), direction.carries(BULK)


def test_cuts_of_each_kind_reach_their_directions_and_channels():
    world = FakeFaultTarget(
        "1..2 cut eu/0 syncer", "1..2 half-open eu/1 syncer", "1..2 bulk-dead us/0 syncer"
    )
    world.clock.run(1.5)
    assert world.carries("eu/0", "syncer") == world.carries("syncer", "eu/0") == (False, False)
    assert world.carries("eu/1", "syncer") == (False, False)
    assert world.carries("syncer", "eu/1") == (True, True)
    assert world.carries("us/0", "syncer") == world.carries("syncer", "us/0") == (True, False)
    world.clock.run(3.0)
    for learner in LEARNERS:
        assert world.carries(learner, "syncer") == world.carries("syncer", learner) == (True, True)


def test_bulk_messages_pass_where_the_control_channel_is_dead():
    world = FakeFaultTarget("1..2 control-dead eu/0 syncer")
    world.clock.run(1.5)
    assert world.carries("eu/0", "syncer") == world.carries("syncer", "eu/0") == (False, True)
    world.clock.run(3.0)
    assert world.carries("eu/0", "syncer") == world.carries("syncer", "eu/0") == (True, True)


def test_overlapping_faults_of_a_link_add_up_and_end_one_by_one():
    world = FakeFaultTarget(
        "1..4 latency eu/0 syncer 0.5",
        "2..3 latency syncer eu/0 0.25",
        "2..3 bandwidth eu/0 syncer 0.1",
        "2..3 corruption eu/0 syncer 0.2",
        "2..3 jitter eu/0 syncer 0.3",
        "1..3 cut eu/0 syncer",
        "2..4 cut eu/0 syncer",
    )
    direction = world.network.direction("eu/0", "syncer")
    back = world.network.direction("syncer", "eu/0")
    world.clock.run(2.5)
    assert (direction.latency, direction.jitter, direction.corruption, back.corruption) == (
        0.85,
        0.3,
        0.2,
        0.0,
    )
    assert (back.latency, direction.pipe.bandwidth) == (0.85, 100.0)
    world.clock.run(3.5)
    assert (direction.latency, direction.jitter, direction.corruption) == (0.6, 0.0, 0.0)
    assert (direction.pipe.bandwidth, world.carries("eu/0", "syncer")) == (1000.0, (False, False))
    world.clock.run(5.0)
    assert (direction.latency, world.carries("eu/0", "syncer")) == (0.1, (True, True))


def test_latency_bandwidth_and_jitter_reach_one_direction_or_both():
    world = FakeFaultTarget(
        "1..4 latency eu/0 syncer one-way 0.5",
        "1..4 latency syncer eu/0 one-way 0.25",
        "2..3 latency eu/0 syncer 1",
        "1..4 bandwidth syncer eu/1 one-way 0.1",
        "1..4 jitter us/0 syncer one-way 0.3",
    )

    def of(source: str, target: str) -> tuple[float, float, float]:
        direction = world.network.direction(source, target)
        return round(direction.latency, 6), direction.pipe.bandwidth, direction.jitter

    world.clock.run(1.5)
    assert of("eu/0", "syncer") == (0.6, 1000.0, 0.0)
    assert of("syncer", "eu/0") == (0.35, 1000.0, 0.0)
    assert (of("syncer", "eu/1"), of("eu/1", "syncer")) == ((0.1, 100.0, 0.0), (0.1, 1000.0, 0.0))
    assert (of("us/0", "syncer"), of("syncer", "us/0")) == ((0.1, 1000.0, 0.3), (0.1, 1000.0, 0.0))
    world.clock.run(2.5)
    assert (of("eu/0", "syncer")[0], of("syncer", "eu/0")[0]) == (1.6, 1.35)
    world.clock.run(5.0)
    for learner in LEARNERS:
        assert of(learner, "syncer") == of("syncer", learner) == (0.1, 1000.0, 0.0)


def test_half_of_the_sampled_faults_that_have_a_direction_hit_one_only():
    found = [fault for seed in range(20) for fault in sample(seed, weights=EVERY_KIND)]
    directed = [fault.one_way for fault in found if fault.kind in faults.DIRECTED]
    assert 0.3 < sum(directed) / len(directed) < 0.7
    assert not any(fault.one_way for fault in found if fault.kind not in faults.DIRECTED)


def test_processes_crash_restart_pause_slow_down_and_jump():
    world = FakeFaultTarget(
        "1..3 crash eu/0",
        "2..5 crash eu/0",  # it is down already: no effect
        "1..2 crash syncer power",
        "1..4 pause eu/1",
        "1..4 slow us/0 3",
        "2..3 slow us/0 2",
        "2..2 jump us/0 100",
        "2..2 wall-jump us/0 -50",
    )
    eu0, eu1, us0 = (world.clock.processes[name] for name in LEARNERS)
    syncer = world.clock.processes["syncer"]
    world.clock.run(1.5)
    assert (eu0.alive, syncer.alive, syncer.power_lost, eu1.running) == (False, False, True, False)
    world.clock.run(2.5)
    assert (us0.slowness, us0.offset, us0.wall_offset) == (3.0, 100.0, 50.0)
    world.clock.run(3.5)
    assert us0.slowness == 3.0
    world.clock.run(9.0)
    assert world.restarts == [(2.0, "syncer"), (3.0, "eu/0")]
    assert (us0.slowness, eu1.running) == (1.0, True)
    assert world.injector.injected[Kind.CRASH] == 2


def test_faults_of_a_disk_are_known_to_it_before_they_begin():
    world = FakeFaultTarget(
        "1..2 disk-full syncer", "1..2 disk-slow syncer 50", "1..2 disk-hang eu/0"
    )
    assert world.disk._weaknesses == [
        (Weakness.FULL, 1.0, 2.0, 1.0),
        (Weakness.SLOW, 1.0, 2.0, 50.0),
    ]


def test_membership_misbehaviour_and_breaks_are_the_worlds():
    world = FakeFaultTarget("1..2 mute eu/0", "3..4 scale learners 5", "5..6 bulk-breaks eu/0 0.01")
    world.clock.run(9.0)
    assert world.calls == [
        (1.0, Kind.MUTE, True),
        (2.0, Kind.MUTE, False),
        (3.0, Kind.SCALE, True),
        (4.0, Kind.SCALE, False),
        (5.0, Kind.BULK_BREAKS, True),
        (6.0, Kind.BULK_BREAKS, False),
    ]


def test_in_a_sixth_of_the_worlds_a_connection_of_a_learner_breaks_after_each_pull():
    found = [description.sample(seed).plan.only(*faults.BREAKS) for seed in range(600)]
    assert 80 <= sum(map(len, found)) <= 120
    assert max(map(len, found)) == 1
    assert {fault.kind for plan in found for fault in plan} == set(faults.BREAKS)


def test_a_restored_disk_has_the_files_of_the_copy_and_its_process_starts_again():
    world = FakeFaultTarget("10..12 disk-restored syncer 4", "10..11 disk-restored eu/0 4")
    path = Path("/run/counter")
    world.disk.make_directory(path.parent)
    files.replace(world.disk, path, b"1")
    world.clock.at(5.9, files.replace, world.disk, path, b"2")
    world.clock.at(6.1, files.replace, world.disk, path, b"3")
    world.clock.run(9.0)
    assert files.read(world.disk, path) == b"3"
    world.clock.run(11.0)
    assert files.read(world.disk, path) == b"2"
    assert not world.clock.processes["syncer"].alive
    world.clock.run(20.0)
    assert world.restarts == [(12.0, "syncer")]
    assert world.injector.injected == {Kind.DISK_RESTORED: 1}


def test_a_copy_waits_until_no_operation_is_under_way():
    world = FakeFaultTarget("10..12 disk-restored syncer 4")
    path = Path("/run/counter")
    world.disk.make_directory(path.parent)
    files.replace(world.disk, path, b"1")
    world.disk.weaken(Weakness.SLOW, 5.0, 8.0, 1000.0)
    # Begun before the copy is due, and done after it.
    world.clock.at(5.9, lambda: world.disk.call(files.replace, world.disk, path, b"2"))
    world.clock.run(9.0)
    world.clock.run(11.0)
    assert files.read(world.disk, path) == b"2"


def test_a_fault_of_a_process_that_is_not_there_does_nothing():
    world = FakeFaultTarget("1..2 crash eu/9", "1..2 cut eu/9 syncer", "1..2 disk-flip syncer")
    world.clock.run(9.0)
    assert (world.injector.injected, world.restarts) == ({}, [])


def test_any_plan_can_be_carried_out_and_leaves_the_links_as_they_were():
    for seed in range(40):
        world = FakeFaultTarget(*str(sample(seed, weights=EVERY_KIND)).splitlines())
        world.clock.run(1000.0)
        for learner in LEARNERS:
            assert (
                world.carries(learner, "syncer") == world.carries("syncer", learner) == (True, True)
            )
            direction = world.network.direction(learner, "syncer")
            assert (direction.latency, direction.jitter, direction.corruption) == (0.1, 0.0, 0.0)
            assert direction.pipe.bandwidth == 1000.0
            back = world.network.direction("syncer", learner)
            assert (back.latency, back.jitter, back.pipe.bandwidth) == (0.1, 0.0, 1000.0)
        assert all(p.running and p.slowness == 1.0 for p in world.clock.processes.values())
