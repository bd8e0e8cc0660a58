"""
Links between processes, and streams of real bytes over them, as gRPC over TCP behaves.

    Connection (client ─► server, CONTROL or BULK)
      └ streams: Endpoint ◄─► Endpoint, ordered messages, flow control
           └ Direction (from one process to another): latency, jitter, cut
                └ Pipe: bandwidth, shared message by message by all streams that wait for it

What is held up and what is lost follows TCP: a cut link holds what was sent, in order. When it is
healed in time everything arrives; otherwise each end breaks at its own time-out and learns nothing of
how far the other got. A process that is killed resets its connections; a machine without power, or a
paused process, is silent until its peers time out. Bulk messages can be damaged, since they have
checksums of their own; control messages cannot.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from diloco_sim.clock import Clock, Process
from diloco_sim.stream import RESUME_SECONDS, Connection, Listener, Side
from diloco_sim.wire import BULK, CONTROL, Direction, Pipe, Wire

__all__ = ["BULK", "CONTROL", "Network"]


class Network:
    """
    All links and servers of a world.

    Args:
        random: for jitter, damage and time-outs; its own, so that a fault less changes nothing else.
        latency: of each link to begin with, seconds.
        bandwidth: likewise, bytes per second.
        timeout_seconds: least and most time until an end notices that a connection is dead
            (keep-alive: 30 s + 10 s, less if it is waiting for an acknowledgement).
        connect_seconds: until an attempt to connect fails.
        window_bytes: what a stream sends before it is read.
        queue_bytes: what a stream holds before `send` returns False.
    """

    def __init__(
        self, clock: Clock, random: random.Random, *, latency: float = 0.01, bandwidth: float = math.inf,
        timeout_seconds: tuple[float, float] = (10.0, 40.0), connect_seconds: float = 20.0,
        window_bytes: int = 4 << 20, queue_bytes: int = 1 << 20,
    ) -> None:  # fmt: skip
        self.clock = clock
        self._wire = Wire(clock, random, timeout_seconds, window_bytes, queue_bytes)
        self._latency, self._bandwidth = latency, bandwidth
        self._connect_seconds = connect_seconds
        self._directions: dict[tuple[str, str], Direction] = {}
        self._listeners: dict[str, Listener] = {}
        self._connections: dict[Connection, None] = {}
        self._by_direction: dict[Direction, dict[Connection, None]] = {}

    def direction(self, source: str, target: str) -> Direction:
        """The link from one process to another, made on first use."""
        direction = self._directions.get((source, target))
        if direction is None:
            direction = Direction(Pipe(self.clock, self._bandwidth), self._latency)
            self._directions[source, target] = direction
        return direction

    def listen(self, server: Process, listener: Listener) -> None:
        """Accept connections, in this life of the process only."""
        self._observe(server)
        self._listeners[server.name] = listener

    def connect(
        self, client: Process, server: Process, channel: int, *, opened: Callable[[Connection], None],
        failed: Callable[[str], None], lost: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """
        Try to connect.

        Args:
            client: calls `opened`, or `failed` with a reason.
            server: what it connects to.
            channel: CONTROL or BULK.
            opened: gets the connection.
            failed: refused, or no answer in time.
            lost: called once if the connection breaks later, with the reason.
        """
        self._observe(client)
        self._observe(server)
        ends = (
            Side(client, self.direction(client.name, server.name)),
            Side(server, self.direction(server.name, client.name)),
        )
        connection = Connection(self._wire, *ends, channel, self._forget, opened, failed, lost)
        clock = self.clock
        connection.timer = clock.at(
            clock.now + self._connect_seconds, connection.fail, "no answer", process=client
        )
        forward = connection.client.direction
        if forward.carries(channel):
            clock.at(clock.now + self._wire.delay(forward), self._arrived, connection)

    def cut(
        self, source: str, target: str, channel: int | None = None, *, silent: bool = False
    ) -> None:
        """
        Let nothing pass in this direction until `heal`; cuts add up.

        Args:
            source: the sending process.
            target: the receiving process.
            channel: CONTROL or BULK; None: both.
            silent: neither end ever notices (a middlebox answers for the other end).
        """
        direction = self.direction(source, target)
        for c in (CONTROL, BULK) if channel is None else (channel,):
            direction.cuts[c] += 1
            direction.silent[c] += silent
            if direction.cuts[c] == 1:
                direction.cut_since[c] = self.clock.now
        self._check(direction)

    def heal(
        self, source: str, target: str, channel: int | None = None, *, silent: bool = False
    ) -> None:
        """End a cut with the same arguments: what was sent meanwhile arrives, in its order."""
        direction = self.direction(source, target)
        for c in (CONTROL, BULK) if channel is None else (channel,):
            direction.cuts[c] -= 1
            direction.silent[c] -= silent
            if direction.cuts[c]:
                continue
            down_seconds = self.clock.now - direction.cut_since[c]
            direction.cut_since[c] = math.inf
            for connection in list(self._by_direction.get(direction, ())):
                if connection.channel == c:
                    connection.healed(direction, min(RESUME_SECONDS, down_seconds))
        self._check(direction)

    # ------------------------------------------------------------ processes

    def crashed(self, process: Process, *, power: bool) -> None:
        """Reset its connections; without power its peers find out for themselves."""
        self._listeners.pop(process.name, None)
        for connection in list(self._connections):
            for side in (connection.client, connection.server):
                if side.process is process and not side.lost:
                    side.lost = side.dead = True
                    side.silent = power
                    connection.reset(side.other)
            connection.check()

    def paused(self, process: Process) -> None:
        """It answers no keep-alive."""
        self._check_process(process)

    def resumed(self, process: Process) -> None:
        """It answers again."""
        self._check_process(process)

    def _check_process(self, process: Process) -> None:
        for connection in list(self._connections):
            if process is connection.client.process or process is connection.server.process:
                connection.check()

    def _check(self, direction: Direction) -> None:
        for connection in list(self._by_direction.get(direction, ())):
            connection.check()

    def _observe(self, process: Process) -> None:
        if self not in process.observers:
            process.observers.append(self)

    def _arrived(self, connection: Connection) -> None:
        """The first packet of a client reached the server's machine."""
        server, clock = connection.server, self.clock
        if server.process.name in self._listeners:
            clock.at(clock.now, self._accept, connection, process=server.process)
        elif not server.process.power_lost:
            clock.at(
                clock.now + self._wire.delay(server.direction), connection.fail, "connection refused",
                process=connection.client.process,
            )  # fmt: skip

    def _accept(self, connection: Connection) -> None:
        clock, server = self.clock, connection.server
        listener = self._listeners.get(server.process.name)
        abandoned = connection.client.process.life != connection.client_life
        if listener is None or abandoned or not connection.timer.pending:
            return
        connection.listener = listener
        self._connections[connection] = None
        connection.accepted = True
        for direction in (connection.client.direction, server.direction):
            self._by_direction.setdefault(direction, {})[connection] = None
        if server.direction.carries(connection.channel):
            server.last_arrival = clock.now + self._wire.delay(server.direction)
            clock.at(server.last_arrival, connection.open_client, process=connection.client.process)
        connection.check()

    def _forget(self, connection: Connection) -> None:
        """Both ends know that it is over."""
        self._connections.pop(connection, None)
        for side in (connection.client, connection.server):
            self._by_direction.get(side.direction, {}).pop(connection, None)
