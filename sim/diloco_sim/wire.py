"""
A direction between two processes: latency, jitter, cuts; and the pipe whose bandwidth it uses.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from diloco_sim.clock import Clock

CONTROL, BULK = 0, 1
"""Channels: connections of their own, which share the bandwidth of their link."""

FRAME_BYTES = 32
"""Per message on the wire besides its payload."""


class Sender(Protocol):
    """A stream that wants to send."""

    waiting: bool
    """It is among those that wait for a pipe."""

    def may_send(self) -> bool:
        """It has a message that may be sent now."""

    def transmit(self) -> None:
        """Send that message."""


class Pipe:
    """The bandwidth of a link, or of several that share it."""

    __slots__ = ("bandwidth", "clock", "free_at", "pumping", "waiting")

    def __init__(self, clock: Clock, bandwidth: float = math.inf) -> None:
        self.clock = clock
        self.bandwidth = bandwidth
        """Bytes per second."""
        self.free_at = 0.0
        self.waiting: deque[Sender] = deque()
        """Streams with something to send; each sends a message and goes to the end."""
        self.pumping = False

    def want(self, sender: Sender) -> None:
        """Let a stream send when it is its turn."""
        sender.waiting = True
        self.waiting.append(sender)
        if not self.pumping:
            self.pumping = True
            self.clock.at(self.free_at, self._pump)

    def _pump(self) -> None:
        waiting = self.waiting
        while waiting and self.free_at <= self.clock.now:
            sender = waiting.popleft()
            if not sender.may_send():
                sender.waiting = False
                continue
            sender.transmit()
            if sender.may_send():
                waiting.append(sender)
            else:
                sender.waiting = False
        self.pumping = bool(waiting)
        if waiting:
            self.clock.at(self.free_at, self._pump)


class Direction:
    """One direction between two processes."""

    __slots__ = (
        "bytes",
        "corruption",
        "cut_since",
        "cuts",
        "jitter",
        "latency",
        "pipe",
        "silent",
    )

    def __init__(self, pipe: Pipe, latency: float) -> None:
        self.pipe = pipe
        self.latency = latency
        """Seconds from the last byte sent to its arrival."""
        self.jitter = 0.0
        """Seconds; up to this much is added to the latency of each message."""
        self.corruption = 0.0
        """Probability that a byte of a bulk message is another one."""
        self.bytes = 0
        """Sent so far."""
        self.cuts, self.silent = [0, 0], [0, 0]
        self.cut_since = [math.inf, math.inf]

    def carries(self, channel: int) -> bool:
        """Data of this channel arrives."""
        return not self.cuts[channel]


@dataclass(frozen=True, slots=True)
class Wire:
    """What all connections of a network have in common; see `Network`."""

    clock: Clock
    random: random.Random
    timeout_seconds: tuple[float, float]
    window_bytes: int
    queue_bytes: int

    def delay(self, direction: Direction) -> float:
        """Latency of the next message of a link."""
        return direction.latency + (
            direction.jitter * self.random.random() if direction.jitter else 0.0
        )

    def timeout(self) -> float:
        """Seconds until an end notices a dead connection."""
        return self.random.uniform(*self.timeout_seconds)
