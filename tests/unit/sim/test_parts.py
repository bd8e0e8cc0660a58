"""All parts together: a server that keeps durably what clients send, under sampled faults, judged and made smaller."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from diloco.runtime import disk as files
from diloco.runtime.disk import Disk
from diloco_sim.clock import Clock, Process
from diloco_sim.disk import SimulatedDisk, Weakness
from diloco_sim.faults import DISK, Kind, Plan
from diloco_sim.injector import Injector
from diloco_sim.network import Network
from diloco_sim.seeds import fork
from diloco_sim.shrink import shrink
from diloco_sim.stream import Connection, Endpoint
from diloco_sim.wire import CONTROL
from diloco_testing.properties import seeds

FILE = Path("/data/count")
HORIZON = 60.0


@dataclass(frozen=True)
class Description:
    seed: int
    learners: int
    steps: int
    plan: Plan
    eager: bool = False
    """The defect: the server acknowledges before the disk does."""


class Server:
    """Counts requests, durably, before it acknowledges them."""

    def __init__(
        self, process: Process, network: Network, disk: SimulatedDisk, *, eager: bool
    ) -> None:
        self.disk, self.thread, self.eager = disk, disk.thread(process), eager
        reads: Disk = disk
        found = files.read(reads, FILE) if disk.size(FILE) is not None else b"0"
        self.count = int(found or b"0")
        network.listen(process, self)

    def opened(self, endpoint: Endpoint, method: str) -> Requests:
        return Requests(self, endpoint)


class Requests:
    def __init__(self, server: Server, endpoint: Endpoint) -> None:
        self.server, self.endpoint = server, endpoint

    def received(self, data: bytes) -> None:
        server, endpoint = self.server, self.endpoint
        server.count += 1
        answer = str(server.count).encode()
        if server.eager:
            endpoint.send(answer)

        def done(completion: object) -> None:
            if getattr(completion, "error", None) is None and not server.eager:
                endpoint.send(answer)

        server.thread.call(files.replace, server.disk, FILE, answer, done=done)

    def finished(self) -> None:
        pass

    def ended(self, reason: str) -> None:
        pass

    def writable(self) -> None:
        pass


class Client:
    """Requests again and again, over a connection after the other; the largest acknowledged count."""

    def __init__(self, world: WorldOfParts, process: Process) -> None:
        self.world, self.process, self.largest, self.left = world, process, 0, world.of.steps
        self.connect()

    def connect(self, _: str = "") -> None:
        world = self.world
        self.process.after(0.2, lambda: world.network.connect(
            self.process, world.server, CONTROL, opened=self.opened, failed=self.connect, lost=self.connect
        ))  # fmt: skip

    def opened(self, connection: Connection) -> None:
        self.stream = connection.open("Count", self)
        self.stream.send(b"next")

    def received(self, data: bytes) -> None:
        self.largest = max(self.largest, int(data))
        self.left -= 1
        if self.left > 0:
            self.process.after(0.1, self.stream.send, b"next")

    def finished(self) -> None:
        pass

    def ended(self, reason: str) -> None:
        pass

    def writable(self) -> None:
        pass


class WorldOfParts:
    def __init__(self, of: Description) -> None:
        self.of = of
        source = random.Random(of.seed)
        self.clock = Clock()
        self.network = Network(
            self.clock, fork(source), timeout_seconds=(2.0, 5.0), connect_seconds=3.0
        )
        self.disk = SimulatedDisk(self.clock, fork(source))
        self.disk.make_directory(FILE.parent)
        self.disk.weaken(Weakness.SLOW, 0.0, HORIZON, 5.0)
        self.server = self.clock.process("syncer")
        self.disk.attach(self.server)
        self.clients: dict[str, Client] = {}
        self.lost = ""
        self.serve()
        for i in range(of.learners):
            process = self.clock.process(f"eu/{i}")
            self.clients[process.name] = Client(self, process)
        Injector(
            of.plan, clock=self.clock, network=self.network, disks={"syncer": self.disk},
            restart=self.restart, world=lambda fault, on: None,
        )  # fmt: skip
        self.clock.run(HORIZON, most_events=200_000)

    def serve(self) -> None:
        server = Server(self.server, self.network, self.disk, eager=self.of.eager)
        acknowledged = max((c.largest for c in self.clients.values()), default=0)
        if server.count < acknowledged:
            self.lost = f"{acknowledged} was acknowledged, {server.count} is on the disk"

    def restart(self, process: Process) -> None:
        if process is self.server:
            self.serve()
        else:
            self.clients[process.name] = Client(self, process)


def sample(seed: int, *, eager: bool = False) -> Description:
    plan = Plan.sample(
        random.Random(seed), learners=["eu/0", "eu/1", "eu/2"], syncer="syncer", horizon=40.0, count=12,
        weights={k: 1.0 for k in Kind if k not in {*DISK, Kind.DISK_RESTORED}},
    )  # fmt: skip
    return Description(seed, 3, 200, plan, eager)


@pytest.mark.parametrize("seed", seeds(6, range(30)))
def test_an_acknowledged_request_is_never_lost_and_a_world_repeats_itself(seed):
    world = WorldOfParts(sample(seed))
    assert world.lost == ""
    assert sum(c.largest for c in world.clients.values()) > 0
    assert WorldOfParts(sample(seed)).clock.digest == world.clock.digest


@pytest.mark.slow
def test_a_defect_is_found_by_a_seed_and_shrinks_to_the_faults_that_show_it():
    for seed in range(200):
        description = sample(seed, eager=True)
        if WorldOfParts(description).lost:
            break
    found = shrink(description, lambda d: bool(WorldOfParts(d).lost), most_runs=80)
    assert WorldOfParts(found).lost
    assert len(found.plan) <= 3
    assert any(f.target == "syncer" for f in found.plan.only(Kind.CRASH))
    assert (found.learners, found.steps) < (3, 200)
    assert not WorldOfParts(replace(found, eager=False)).lost


def test_a_disk_that_fails_costs_answers_and_no_promise():
    plan = Plan.parse(
        "5..9 disk-fail syncer 0.5\n 20..21 crash syncer power\n 30..40 disk-hang syncer"
    )
    world = WorldOfParts(Description(1, 2, 200, plan))
    assert world.lost == ""
