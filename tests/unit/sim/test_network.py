"""Streams over links: order, bandwidth, flow control, cuts, half-open connections, resets, damage."""

from __future__ import annotations

import random

import pytest

from diloco_sim.clock import Clock, Process
from diloco_sim.network import Network
from diloco_sim.stream import Connection, Endpoint
from diloco_sim.wire import BULK, CONTROL, FRAME_BYTES
from diloco_testing.properties import seeds


class Log:
    """Receives a stream and keeps what it saw, with the time."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seen = clock, []
        self.data: list[bytes] = []

    def received(self, data: bytes) -> None:
        self.data.append(data)
        self.seen.append((round(self.clock.now, 6), "data"))

    def finished(self) -> None:
        self.seen.append((round(self.clock.now, 6), "finished"))

    def ended(self, reason: str) -> None:
        self.seen.append((round(self.clock.now, 6), f"ended {reason}".strip()))

    def writable(self) -> None:
        self.seen.append((round(self.clock.now, 6), "writable"))


class Server:
    """Keeps the streams that were opened."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.streams: list[tuple[Endpoint, str, Log]] = []

    def opened(self, endpoint: Endpoint, method: str) -> Log:
        log = Log(self.clock)
        self.streams.append((endpoint, method, log))
        return log


class TwoProcesses:
    def __init__(self, seed: int = 1, **options: float) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, random.Random(seed), latency=0.1, **options)
        self.client, self.server = self.clock.process("c"), self.clock.process("s")
        self.listener = Server(self.clock)
        self.network.listen(self.server, self.listener)
        self.outcomes: list[str] = []

    def connect(self, channel: int = CONTROL, client: Process | None = None) -> Connection:
        found: list[Connection] = []
        self.network.connect(
            client or self.client, self.server, channel, opened=found.append,
            failed=self.outcomes.append, lost=self.outcomes.append,
        )  # fmt: skip
        self.clock.run(self.clock.now + 0.2)
        return found[0]

    def stream(self, channel: int = CONTROL) -> tuple[Endpoint, Log]:
        log = Log(self.clock)
        return self.connect(channel).open("Method", log), log

    @property
    def received(self) -> list[bytes]:
        return self.listener.streams[0][2].data


def numbered(count: int, size: int = 4) -> list[bytes]:
    return [i.to_bytes(size, "little") for i in range(count)]


def test_a_connection_takes_a_round_trip_and_messages_arrive_in_order():
    world = TwoProcesses()
    stream, log = world.stream()
    assert world.clock.now == 0.2
    world.network.direction("c", "s").jitter = 0.5
    for data in numbered(50):
        stream.send(data)
    stream.finish()
    world.clock.run(5.0)
    assert world.received == numbered(50)
    endpoint, method, seen = world.listener.streams[0]
    assert (method, seen.seen[-1][1]) == ("Method", "finished")
    endpoint.send(b"reply")
    endpoint.end("NotFound")
    world.clock.run(10.0)
    assert log.data == [b"reply"]
    assert log.seen[-1][1] == "ended NotFound"


def test_bandwidth_is_shared_by_the_streams_of_a_link():
    world = TwoProcesses(bandwidth=(1000 + FRAME_BYTES) * 10)
    connection = world.connect()
    logs = [connection.open(name, Log(world.clock)) for name in "ab"]
    for stream in logs:
        for _ in range(5):
            stream.send(bytes(1000))
    world.clock.run(10.0)
    times = [[when for when, _ in log.seen] for _, _, log in world.listener.streams]
    assert max(times[0][-1], times[1][-1]) == pytest.approx(0.2 + 1.0 + 0.1, abs=0.02)
    assert abs(times[0][-1] - times[1][-1]) < 0.11  # in turn, not one after the other
    assert world.network.direction("c", "s").bytes == 10 * (1000 + FRAME_BYTES) + 2 * FRAME_BYTES


def test_a_receiver_that_does_not_read_stops_the_sender():
    world = TwoProcesses(window_bytes=3000, queue_bytes=2000)
    stream, log = world.stream()
    world.clock.run(0.5)
    endpoint, _, seen = world.listener.streams[0]
    endpoint.read(False)
    accepted = sum(stream.send(bytes(1000)) for _ in range(6))
    world.clock.run(5.0)
    assert accepted == 5  # three under way, two queued; the next is too much
    assert (stream.queued, seen.data) == (3000, [])
    assert not log.seen
    endpoint.read(True)
    world.clock.run(10.0)
    assert len(seen.data) == 6
    assert [event for _, event in log.seen] == ["writable"]


def test_a_paused_receiver_stops_the_sender_too():
    world = TwoProcesses(window_bytes=3000, timeout_seconds=(100.0, 100.0))
    stream, _ = world.stream()
    world.server.pause(5.0)
    for _ in range(6):
        stream.send(bytes(1000))
    world.clock.run(4.9)
    assert stream.queued == 3000
    world.clock.run(6.0)
    assert len(world.received) == 6


def test_a_short_cut_delays_and_loses_nothing():
    world = TwoProcesses(timeout_seconds=(50.0, 50.0))
    stream, log = world.stream()
    world.network.direction("c", "s").jitter = 0.3
    for i, data in enumerate(numbered(200)):
        world.clock.at(0.3 + i * 0.02, stream.send, data)
    for begin, end in ((1.0, 2.5), (2.6, 2.7), (2.65, 3.0)):
        world.clock.at(begin, world.network.cut, "c", "s")
        world.clock.at(end, world.network.heal, "c", "s")
    world.clock.run(2.4)
    before = len(world.received)
    assert before < 60
    world.clock.run(30.0)
    assert world.received == numbered(200)
    assert log.seen == []


def test_a_long_cut_breaks_each_end_at_its_own_time_out():
    world = TwoProcesses(timeout_seconds=(10.0, 40.0))
    stream, log = world.stream()
    world.clock.run(1.0)
    for pair in (("c", "s"), ("s", "c")):
        world.network.cut(*pair)
    stream.send(b"lost")
    world.clock.run(60.0)
    server = world.listener.streams[0][2]
    assert [e for _, e in log.seen] == ["ended timed out"]
    assert [e for _, e in server.seen] == ["ended timed out"]
    assert log.seen[0][0] != server.seen[0][0]
    assert world.outcomes == ["timed out"]
    assert not world.network._connections


def test_what_broke_at_one_end_only_is_reset_when_the_link_is_healed():
    world = TwoProcesses(timeout_seconds=(10.0, 40.0))
    _, log = world.stream()
    world.clock.run(1.0)
    server = world.listener.streams[0][2]
    world.network.cut("c", "s")
    while not (log.seen or server.seen):
        world.clock.run(world.clock.now + 0.5)
    assert not (log.seen and server.seen)
    world.network.heal("c", "s")
    world.clock.run(world.clock.now + 1.0)
    assert sorted(e for _, e in log.seen + server.seen) == [
        "ended connection reset",
        "ended timed out",
    ]


def test_a_half_open_connection_shows_no_error_in_either_direction():
    world = TwoProcesses()
    stream, log = world.stream()
    world.clock.run(1.0)
    endpoint, _, seen = world.listener.streams[0]
    world.network.cut("c", "s", silent=True)
    stream.send(b"into the void")
    endpoint.send(b"still arrives")
    world.clock.run(1000.0)
    assert (seen.data, log.data) == ([], [b"still arrives"])
    assert [e for _, e in log.seen + seen.seen] == ["data"]
    world.network.heal("c", "s", silent=True)
    world.clock.run(1010.0)
    assert seen.data == [b"into the void"]


def test_a_dead_bulk_channel_leaves_control_alone():
    world = TwoProcesses()
    control, bulk = world.connect(CONTROL), world.connect(BULK)
    streams = [c.open(n, Log(world.clock)) for c, n in ((control, "control"), (bulk, "bulk"))]
    world.clock.run(1.0)
    world.network.cut("c", "s", BULK)
    world.network.cut("s", "c", BULK)
    for stream in streams:
        stream.send(b"x")
    world.clock.run(100.0)
    data = {method: log.data for _, method, log in world.listener.streams}
    assert data == {"control": [b"x"], "bulk": []}
    assert (control.alive, bulk.alive) == (True, False)


def test_only_bulk_messages_are_damaged():
    world = TwoProcesses()
    world.network.direction("c", "s").corruption = 0.5
    for channel in (CONTROL, BULK):
        stream = world.connect(channel).open("m", Log(world.clock))
        for _ in range(100):
            stream.send(bytes(64))
    world.clock.run(10.0)
    control, bulk = (log.data for _, _, log in world.listener.streams)
    assert control == [bytes(64)] * 100
    damaged = [data for data in bulk if data != bytes(64)]
    assert 20 < len(damaged) < 80
    assert all(len(d) == 64 and sum(map(int.bit_count, d)) == 1 for d in damaged)


def test_a_killed_process_resets_its_connections_and_can_be_reached_again():
    world = TwoProcesses()
    _, log = world.stream()
    world.clock.run(1.0)
    world.server.crash()
    world.clock.run(2.0)
    assert log.seen == [(1.1, "ended connection reset")]
    world.network.connect(
        world.client, world.server, CONTROL, opened=lambda c: None, failed=world.outcomes.append
    )
    world.clock.run(3.0)
    assert world.outcomes == ["connection reset", "connection refused"]
    world.server.start()
    world.network.listen(world.server, world.listener)
    assert world.connect().alive


def test_a_severed_connection_is_over_for_both_ends_behind_what_was_sent_before():
    world = TwoProcesses()
    endpoint, log = world.stream(BULK)
    endpoint.connection.sever(1.0)
    world.clock.at(0.95, endpoint.send, b"in time")
    world.clock.at(1.05, endpoint.send, b"too late")
    world.clock.run(3.0)
    assert world.received == [b"in time"]
    assert log.seen == [(1.0, "ended connection reset")]
    assert world.listener.streams[0][2].seen[-1] == (1.1, "ended connection reset")
    assert world.outcomes == ["connection reset"]


def test_a_server_learns_that_a_connection_was_severed_when_the_link_is_healed():
    world = TwoProcesses()
    endpoint, _ = world.stream(BULK)
    endpoint.connection.sever(1.0)
    world.clock.run(0.9)
    world.network.cut("c", "s", silent=True)
    world.clock.run(5.0)
    assert world.listener.streams[0][2].seen == []
    assert not endpoint.connection.alive
    world.network.heal("c", "s", silent=True)
    world.clock.run(8.0)
    assert world.listener.streams[0][2].seen[-1][1] == "ended connection reset"


def test_a_machine_without_power_is_silent():
    world = TwoProcesses(timeout_seconds=(10.0, 12.0), connect_seconds=5.0)
    _, log = world.stream()
    world.clock.run(1.0)
    world.server.crash(power=True)
    world.network.connect(
        world.client, world.server, CONTROL, opened=lambda c: None, failed=world.outcomes.append
    )
    world.clock.run(10.0)
    assert (world.outcomes, log.seen) == (["no answer"], [])
    world.clock.run(14.0)
    assert [e for _, e in log.seen] == ["ended timed out"]


def test_a_paused_server_accepts_when_it_resumes_unless_the_client_has_timed_out():
    world = TwoProcesses(connect_seconds=5.0)
    found: list[Connection] = []
    arguments = {"opened": found.append, "failed": world.outcomes.append}
    world.server.pause(3.0)
    world.network.connect(world.client, world.server, CONTROL, **arguments)
    world.clock.run(4.0)
    assert len(found) == 1
    world.server.pause(20.0)
    world.network.connect(world.client, world.server, CONTROL, **arguments)
    world.clock.run(30.0)
    assert (len(found), world.outcomes) == (1, ["no answer"])


def test_a_paused_peer_times_out_and_one_that_resumes_in_time_does_not():
    for seconds, expected in ((5.0, []), (60.0, ["ended timed out"])):
        world = TwoProcesses(timeout_seconds=(10.0, 20.0))
        _, log = world.stream()
        world.clock.run(1.0)
        world.server.pause(1.0 + seconds)
        world.clock.run(100.0)
        assert [e for _, e in log.seen] == expected


def test_a_client_that_crashes_while_it_connects_leaves_nothing():
    world = TwoProcesses()
    world.network.connect(
        world.client, world.server, CONTROL, opened=lambda c: None, failed=world.outcomes.append
    )
    world.clock.at(0.05, world.client.crash)
    world.clock.run(60.0)
    assert (world.outcomes, dict(world.network._connections)) == ([], {})


def test_a_cancelled_stream_drops_what_it_had_not_sent():
    world = TwoProcesses(window_bytes=1000)
    stream, log = world.stream()
    for _ in range(5):
        stream.send(bytes(1000))
    stream.cancel("no longer needed")
    world.clock.run(5.0)
    server = world.listener.streams[0][2]
    assert [e for _, e in server.seen] == ["data", "ended no longer needed"]
    assert log.seen == []
    assert stream.closed


def test_closing_a_connection_ends_its_streams_at_the_server():
    world = TwoProcesses()
    connection = world.connect()
    log = Log(world.clock)
    connection.open("m", log).send(b"x")
    connection.close()
    world.clock.run(5.0)
    assert not connection.alive
    assert log.seen == []
    assert not world.network._connections
    with pytest.raises(ConnectionError, match="is over"):
        connection.open("m", log)


def play(seed: int) -> tuple[int, list[int], int]:
    """Clients that reconnect and send under random faults of the links; what each stream brought."""
    world = TwoProcesses(seed, bandwidth=1e6, timeout_seconds=(1.0, 4.0), connect_seconds=2.0)
    clock, network, source = world.clock, world.network, random.Random(seed)
    network.direction("c", "s").jitter = 0.2
    sent: list[int] = []

    def start() -> None:
        network.connect(world.client, world.server, BULK, opened=run, failed=again, lost=again)

    def again(_: str) -> None:
        world.client.after(0.1, start)

    def run(connection: Connection) -> None:
        stream = connection.open("m", Log(clock))
        sent.append(0)
        push(stream, len(sent) - 1)

    def push(stream: Endpoint, index: int) -> None:
        if not stream.closed:
            stream.send(sent[index].to_bytes(4, "little") * 250)
            sent[index] += 1
            world.client.after(0.02, push, stream, index)

    for _ in range(12):
        begin, seconds = source.random() * 30, source.random() * 4
        pair = source.choice((("c", "s"), ("s", "c")))
        kind = source.randrange(4)
        if kind == 0:
            clock.at(begin, world.server.pause, begin + seconds)
        elif kind == 1:
            clock.at(begin, world.client.pause, begin + seconds)
        else:
            clock.at(begin, network.cut, *pair)
            clock.at(begin + seconds, network.heal, *pair)
    start()
    clock.run(40.0, most_events=200_000)
    for _, _, log in world.listener.streams:
        numbers = [int.from_bytes(data[:4], "little") for data in log.data]
        assert numbers == list(range(len(numbers)))
    return clock.digest, sent, sum(len(log.data) for _, _, log in world.listener.streams)


@pytest.mark.parametrize("seed", seeds(10, [1183, 1458, 5264, *range(40)]))
def test_under_any_faults_streams_stay_in_order_and_a_run_repeats_itself(seed):
    digest, sent, received = play(seed)
    assert received > 0.3 * sum(sent)
    assert (digest, sent, received) == play(seed)
