"""
Connections and streams: ordered messages with flow control over two links, one for each direction.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from diloco_sim.clock import Process, Timer
from diloco_sim.wire import BULK, FRAME_BYTES, Direction, Wire

EPSILON_SECONDS = 1e-9

RESUME_SECONDS = 2.0
"""A healed link carries data again up to this much later: TCP retries at growing intervals."""


class Receiver(Protocol):
    """What a stream calls in the process of its end."""

    def received(self, data: bytes) -> None:
        """The next message."""

    def finished(self) -> None:
        """The client sends no more messages; it still receives."""

    def ended(self, reason: str) -> None:
        """The stream is over, by the other end or a broken connection; empty: in an orderly way."""

    def writable(self) -> None:
        """After `send` returned False: there is room again."""


class Listener(Protocol):
    """A server."""

    def opened(self, endpoint: Endpoint, method: str) -> Receiver:
        """A client opened a stream; returns what receives its messages."""


class Side:
    """One end of a connection."""

    __slots__ = (
        "dead", "direction", "held", "last_arrival", "lost", "other", "process", "resumed_at", "silent", "streams",
        "timer",
    )  # fmt: skip

    def __init__(self, process: Process, direction: Direction) -> None:
        self.process = process
        self.direction = direction
        """To the other end."""
        self.other: Side
        self.streams: dict[Endpoint, None] = {}
        self.held: deque[tuple[Endpoint, bytes | Mark]] = deque()
        """Sent to the other end while the link was cut."""
        self.last_arrival = 0.0
        """Of what was sent so far: nothing overtakes it."""
        self.resumed_at = 0.0
        """What was under way when the link was healed arrives then, behind what was held."""
        self.lost = False
        """The connection is over for this end."""
        self.dead = False
        """The process ended."""
        self.silent = False
        """Its machine ended: it resets nothing."""
        self.timer: Timer | None = None


class Connection:
    """A connection of one channel; streams are opened by the client."""

    def __init__(
        self, wire: Wire, client: Side, server: Side, channel: int, forget: Callable[[Connection], None],
        opened: Callable[[Connection], None], failed: Callable[[str], None],
        lost: Callable[[str], None] | None,
    ) -> None:  # fmt: skip
        self.wire, self.channel = wire, channel
        self.client, self.server = client, server
        self.client.other, self.server.other = self.server, self.client
        self.listener: Listener
        self.timer: Timer
        """Until the client stops to wait for the server to accept."""
        self.client_life = client.process.life
        self.accepted = False
        """By the server."""
        self._forget, self._opened, self._failed, self._lost = forget, opened, failed, lost

    @property
    def alive(self) -> bool:
        """As far as the client knows."""
        return not self.client.lost

    def open(self, method: str, receiver: Receiver) -> Endpoint:
        """
        Open a stream; messages may be sent at once.

        Raises:
            ConnectionError: the connection is over.
        """
        if self.client.lost:
            raise ConnectionError(f"the connection of {self.client.process.name} is over")
        ours = Endpoint(self, self.client, receiver)
        theirs = Endpoint(self, self.server, None)
        ours.peer, theirs.peer = theirs, ours
        self.client.streams[ours] = None
        self.server.streams[theirs] = None
        ours.push(Mark("open", method))
        return ours

    def close(self) -> None:
        """End it, with all streams, for the client."""
        if not self.client.lost:
            self._lose(self.client, "", notify=False)

    def sever(self, when: float) -> None:
        """Something near the client resets it then; the server learns it as soon as the link allows."""
        client = self.client
        self.wire.clock.at(when, self._lose, client, "connection reset", process=client.process)

    def open_client(self) -> None:
        """The server accepted."""
        if self.timer.pending:
            self.wire.clock.cancel(self.timer)
            self._opened(self)
        else:
            self._lose(self.client, "abandoned", notify=False)

    def fail(self, reason: str) -> None:
        """There is no connection."""
        clock = self.wire.clock
        clock.cancel(self.timer)
        self.client.lost = True
        self._failed(reason)
        if self.accepted:  # its answer did not arrive
            self.reset(self.server)

    def check(self) -> None:
        """Begin or end the time-out of either end: a link, a process or a machine changed."""
        clock, channel = self.wire.clock, self.channel
        for side in (self.client, self.server):
            other = side.other
            dead = (
                side.direction.cuts[channel] > side.direction.silent[channel]
                or other.direction.cuts[channel] > other.direction.silent[channel]
                or other.process.waiting is not None
                or other.dead
            )
            if dead and side.timer is None and not side.lost:
                when = clock.now + self.wire.timeout()
                side.timer = clock.at(when, self._lose, side, "timed out", process=side.process)
            elif side.timer is not None and (side.lost or not dead):
                clock.cancel(side.timer)
                side.timer = None
        if self.client.lost and self.server.lost:
            self._forget(self)

    def healed(self, direction: Direction, slack_seconds: float) -> None:
        """Data passes again over this link."""
        side = self.client if direction is self.client.direction else self.server
        other, clock = side.other, self.wire.clock
        if side.lost:
            if not other.lost:
                self.reset(other)
            return
        begin = clock.now + self.wire.random.random() * slack_seconds
        arrival = max(side.last_arrival + EPSILON_SECONDS, begin + self.wire.delay(direction))
        for endpoint, item in side.held:
            clock.at(arrival, endpoint.arrive, item, arrival)
        if side.held:
            side.resumed_at = arrival
            # What was under way arrives with what was held, and what is sent from now on later.
            side.last_arrival = arrival + EPSILON_SECONDS
            side.held.clear()
        for endpoint in list(side.streams):
            endpoint.credit(0)
            endpoint.pump()

    def reset(self, side: Side) -> None:
        """The other end is over; this one learns it as soon as the link allows."""
        clock, direction = self.wire.clock, side.other.direction
        if side.lost or side.other.silent or not direction.carries(self.channel):
            return
        when = max(clock.now + self.wire.delay(direction), side.other.last_arrival)
        clock.at(when, self._lose, side, "connection reset", process=side.process)

    def _lose(self, side: Side, reason: str, *, notify: bool = True) -> None:
        if side.lost:
            return
        side.lost = True
        for endpoint in list(side.streams):
            endpoint.over(reason if notify else None)
        side.streams.clear()
        if notify and side is self.client and self._lost is not None:
            self._lost(reason)
        self.reset(side.other)
        self.check()


class Mark:
    """What a stream carries besides messages."""

    __slots__ = ("kind", "text")

    def __init__(self, kind: str, text: str = "") -> None:
        self.kind, self.text = kind, text


class Endpoint:
    """
    One end of a stream.

    Messages arrive in the order of `send`. An end that does not read (`read(False)`) stops the
    sender once the window is full.
    """

    __slots__ = (
        "blocked", "closed", "connection", "credits", "inbox", "outbox", "outstanding", "owed", "peer", "queued",
        "reading", "receiver", "side", "timer", "waiting",
    )  # fmt: skip

    def __init__(self, connection: Connection, side: Side, receiver: Receiver | None) -> None:
        self.connection, self.side, self.receiver = connection, side, receiver
        self.peer: Endpoint
        self.outbox: deque[bytes | Mark] = deque()
        self.queued = 0
        """Bytes that wait to be sent."""
        self.outstanding = 0
        """Bytes sent and, as far as this end knows, not read yet."""
        self.credits: deque[tuple[float, int]] = deque()
        """When this end learns how much was read."""
        self.owed = 0
        """Bytes read that a cut link keeps the other end from learning."""
        self.inbox: deque[bytes | Mark] = deque()
        """Arrived and not read."""
        self.reading = True
        self.blocked = False
        """`send` returned False."""
        self.waiting = False
        """Among those that wait for the pipe."""
        self.closed = False
        """Over for this end: nothing more is sent or received."""
        self.timer: Timer | None = None

    def send(self, data: bytes) -> bool:
        """
        Send a message; nothing if the stream is over.

        Returns:
            False: enough is queued, wait for `writable`.
        """
        if self.closed:
            return True
        self.queued += len(data)
        self.push(data)
        self.blocked = self.queued > self.connection.wire.queue_bytes
        return not self.blocked

    def finish(self) -> None:
        """Send no more; for a client."""
        if not self.closed:
            self.push(Mark("finish"))

    def end(self, reason: str = "") -> None:
        """End the stream after what was sent; nothing more is received."""
        if not self.closed:
            self.push(Mark("end", reason))
            self.receiver = None

    def cancel(self, reason: str = "cancelled") -> None:
        """End the stream now; what was not sent yet is dropped."""
        if not self.closed:
            self.outbox.clear()
            self.queued = 0
            self.end(reason)

    def read(self, on: bool) -> None:
        """Receive messages from now on, or let them wait."""
        self.reading = on
        if on and self.inbox:
            wire = self.connection.wire
            wire.clock.at(wire.clock.now, self._drain, process=self.side.process)

    # ------------------------------------------------------------ sending

    def push(self, item: bytes | Mark) -> None:
        """Send after everything that is queued."""
        self.outbox.append(item)
        if len(self.outbox) == 1:
            self.pump()

    def pump(self) -> None:
        """Send what may be sent."""
        if self.waiting or not self.outbox or not self.may_send():
            return
        pipe = self.side.direction.pipe
        now = pipe.clock.now
        while not pipe.waiting and pipe.free_at <= now:
            self.transmit()
            if not self.outbox or not self.may_send():
                return
        pipe.want(self)

    def may_send(self) -> bool:
        """There is something to send, the link carries it, and the other end has room for it."""
        outbox, side = self.outbox, self.side
        if not outbox or side.lost or side.direction.cuts[self.connection.channel]:
            return False
        wire = self.connection.wire
        now, credits_ = wire.clock.now, self.credits
        while credits_ and credits_[0][0] <= now:
            self.outstanding -= credits_.popleft()[1]
        item = outbox[0]
        if isinstance(item, Mark) or not self.outstanding:
            return True
        if self.outstanding + len(item) <= wire.window_bytes:
            return True
        if credits_ and (self.timer is None or not self.timer.pending):
            self.timer = wire.clock.at(credits_[0][0], self.pump)
        return False

    def transmit(self) -> None:
        """Send the first message."""
        side, wire, peer = self.side, self.connection.wire, self.peer
        item, direction = self.outbox.popleft(), side.direction
        size = FRAME_BYTES
        if isinstance(item, Mark):
            if item.kind == "end":
                self.over(None)
        else:
            size += len(item)
            self.queued -= len(item)
            self.outstanding += len(item)
            if direction.corruption and self.connection.channel == BULK:
                item = _damaged(item, direction.corruption, wire.random)
        direction.bytes += size
        clock, pipe = wire.clock, direction.pipe
        pipe.free_at = sent = max(clock.now, pipe.free_at) + size / pipe.bandwidth
        arrival = max(sent + wire.delay(direction), side.last_arrival)
        side.last_arrival = arrival
        clock.at(arrival, peer.arrive, item, arrival)
        if self.blocked and self.queued <= wire.queue_bytes // 2:
            self.blocked = False
            clock.at(clock.now, self._writable, process=side.process)

    def _writable(self) -> None:
        if self.receiver is not None and not self.closed:
            self.receiver.writable()

    # ------------------------------------------------------------ receiving

    def arrive(self, item: bytes | Mark, when: float) -> None:
        """A message reaches the machine of this end, unless the link is cut."""
        side, connection = self.side, self.connection
        if side.lost or self.closed:
            return
        sender = side.other
        clock = connection.wire.clock
        if sender.held and sender.lost:
            return  # what is held is never sent again, and nothing is delivered behind a gap
        if when < sender.resumed_at:
            clock.at(sender.resumed_at, self.arrive, item, sender.resumed_at)
        elif sender.direction.cuts[connection.channel]:
            sender.held.append((self, item))
        elif self.inbox or not self.reading:
            self.inbox.append(item)
        elif side.process.waiting is not None:
            self.inbox.append(item)
            clock.at(when, self._drain, process=side.process)
        else:
            self._deliver(item)

    def _drain(self) -> None:
        while self.reading and self.inbox and not self.closed:
            self._deliver(self.inbox.popleft())

    def _deliver(self, item: bytes | Mark) -> None:
        if not isinstance(item, Mark):
            self.credit(len(item))
            if self.receiver is not None:
                self.receiver.received(item)
        elif item.kind == "open":
            self.receiver = self.connection.listener.opened(self, item.text)
        elif item.kind == "finish":
            if self.receiver is not None:
                self.receiver.finished()
        else:
            self.over(item.text)

    def credit(self, count: int) -> None:
        """Let the other end know that this much was read, and what it is owed."""
        direction, wire, peer = self.side.direction, self.connection.wire, self.peer
        if direction.cuts[self.connection.channel]:
            self.owed += count
            return
        count, self.owed = count + self.owed, 0
        if count and not peer.closed:
            when = wire.clock.now + direction.latency
            if peer.credits:
                when = max(when, peer.credits[-1][0])
            peer.credits.append((when, count))
            if peer.outbox and (peer.timer is None or not peer.timer.pending):
                peer.timer = wire.clock.at(when, peer.pump)

    def over(self, reason: str | None) -> None:
        """The stream is over for this end; None: it knows."""
        if self.closed:
            return
        self.closed = True
        self.side.streams.pop(self, None)
        receiver, self.receiver = self.receiver, None
        self.outbox.clear()
        self.inbox.clear()
        self.queued = 0
        if reason is not None and receiver is not None:
            receiver.ended(reason)
        if self.peer.closed:
            # Nothing is sent after this. A circle would wait for the garbage collection, with all that it holds.
            del self.peer.peer, self.peer


def _damaged(data: bytes, probability: float, random: random.Random) -> bytes:
    if not data or random.random() >= probability:
        return data
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)
