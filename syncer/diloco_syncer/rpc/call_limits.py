"""
Bounds what untrusted peers can hold: threads per service, streams per peer, the wait for a first message and
for a peer that does not read.

Every method is a stream for the server, also those that are unary for clients (the same bytes on the
wire): gRPC would wait for the message of a unary call without a limit, with a thread held.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from diloco.errors import DilocoError, ProtocolError, UnavailableError
from diloco.rpc.servers import MESSAGE_BYTES
from diloco.rpc.threads import Threads
from diloco.spec import RunSpec
from diloco_syncer.core.upload_limits import MIN_BYTES_PER_SECOND, START_SECONDS
from diloco_syncer.refusals import RefusalLog
from diloco_syncer.rpc.transfers import CHUNK_BYTES

WATCH_THREAD = "call-limits"
"""Name of the thread without which no limit in time is kept."""

WATCH_SECONDS = 10.0
"""How often counted refusals are written and missing threads are started when nothing else happens."""

log = logging.getLogger(__name__)

FIRST_SECONDS = 10.0
"""How long a stream may take to its first message: several round trips of any link."""

REPLY_SECONDS = FIRST_SECONDS + MESSAGE_BYTES / MIN_BYTES_PER_SECOND
"""How long a peer may take to read a reply: a status of the largest size, over the slowest link."""

QUERY_THREADS = 16
"""Threads for GetStatus and Evaluated; each takes milliseconds."""

OBSERVER_STREAMS = 32
"""Downloads without a learner (evaluators) at a time; an evaluator has one."""


JOINS_PER_MINUTE = 120
"""
Sessions of one learner that begin per minute. Each costs two lines of events.jsonl and a synced counter:
a learner in a tight loop must not fill the journal until older parts, with merges, are deleted.
"""


def most_learners(learners: Mapping[str, int]) -> int:
    """Learners that threads are provided for: twice those of all regions, and at least 64."""
    return max(64, 2 * sum(learners.values()))


@dataclass(slots=True, eq=False)
class _Wait:
    """A stream whose peer must send or read something, or that must end."""

    seconds: float
    """How long the peer may take."""
    deadline: float
    """Monotonic; infinite while it is not the peer's turn."""
    late: DilocoError
    """Why it ends at the deadline."""
    context: grpc.ServicerContext | None
    """None: the peer has done it, or the stream has ended."""
    ended: DilocoError | None = None
    """Why the syncer ended it."""

    def end(self, reason: DilocoError) -> grpc.ServicerContext | None:
        """Mark it as ended by the syncer; returns what to cancel."""
        context, self.context = self.context, None
        if context is not None:
            self.ended = reason
        return context


@dataclass(slots=True, eq=False)
class Pool:
    """The threads of one service, and the streams that hold one and wait for their peer."""

    name: str
    threads: int
    """For streams of which nothing is known yet: half of them may wait for their peers."""
    slots: int = 0
    """As many threads more: for the transfers that `CallLimits.slot` counts."""
    executor: Threads = field(init=False)
    waiting: dict[str, deque[_Wait]] = field(default_factory=dict)
    """Address of a peer → its streams that have not sent a message, or whose reply is not read; oldest first."""
    _methods: list[Callable[..., Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.executor = Threads(self.threads + self.slots, thread_name_prefix=self.name)

    def grow(self, threads: int, slots: int = 0) -> None:
        """Provide at least this many threads for streams that begin; open ones keep theirs."""
        if threads > self.threads or slots > self.slots:
            self.threads, self.slots = max(threads, self.threads), max(slots, self.slots)
            self.executor = Threads(self.threads + self.slots, thread_name_prefix=self.name)
            for method in self._methods:
                method.experimental_thread_pool = self.executor  # type: ignore[attr-defined]

    @property
    def most_waiting(self) -> int:
        """Streams of all peers that wait: half of the threads stay for the others."""
        return self.threads // 2

    @property
    def most_waiting_per_peer(self) -> int:
        """
        Those of one address, which may be a gateway with many learners behind it.
        """
        return self.threads // 4

    def handler(
        self, behavior: Callable[..., Any], **codec: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A method of this service; its calls run in these threads only."""

        def run(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            return behavior(requests, context)

        run.experimental_thread_pool = self.executor  # type: ignore[attr-defined]
        self._methods.append(run)
        return grpc.stream_stream_rpc_method_handler(run, **codec)

    def excess(self, address: str) -> _Wait | None:
        """
        The stream that must end before another one of this address may wait; None: there is room.

        The oldest ends, not the newest: an honest stream sends its message and reads the reply at once.
        """
        if len(self.waiting.get(address, ())) >= self.most_waiting_per_peer:
            return self.waiting[address].popleft()
        if sum(map(len, self.waiting.values())) >= self.most_waiting:
            return max(self.waiting.values(), key=len).popleft()
        return None

    def add(self, address: str, wait: _Wait) -> None:
        """A stream begins to wait."""
        self.waiting.setdefault(address, deque()).append(wait)

    def remove(self, address: str, wait: _Wait) -> None:
        """A stream no longer waits."""
        waits = self.waiting.get(address, deque())
        if wait in waits:
            waits.remove(wait)
        if not waits:
            self.waiting.pop(address, None)


class CallLimits:
    """
    The limits of all services of one syncer. Thread-safe.

    Args:
        spec: the job; the number of threads follows its learners.
        refusals: where refused streams are recorded.
        first_seconds: how long a stream may take to its first message.
        reply_seconds: how long a peer may take to read a reply.
        frame_seconds: how long a download may wait until a frame of it is read; None: as long as all streams
            of a learner together may take for a chunk over the slowest link, and for the longest pause.
    """

    def __init__(
        self, spec: RunSpec, refusals: RefusalLog, *, first_seconds: float = FIRST_SECONDS,
        reply_seconds: float = REPLY_SECONDS, frame_seconds: float | None = None,
    ) -> None:  # fmt: skip
        learners = most_learners(spec.learners)
        self.refusals = refusals
        self._overlap = spec.overlap
        self._streams_per_learner = 8 + 4 * spec.overlap
        self.sessions = Pool("session", 2 * learners)
        self.queries = Pool("query", QUERY_THREADS)
        self.bulk = Pool("bulk", 2 * learners * spec.overlap, self._most_transfers(spec.learners))
        self._first_seconds, self._reply_seconds = first_seconds, reply_seconds
        if frame_seconds is None:
            chunks = self._streams_per_learner * CHUNK_BYTES
            frame_seconds = START_SECONDS + chunks / MIN_BYTES_PER_SECOND
        self._frame_seconds = frame_seconds
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        """Learner → its bulk streams."""
        self._joined: dict[str, deque[float]] = {}
        """Learner → when its newest sessions began, monotonic."""
        self._waits: list[tuple[float, int, _Wait]] = []
        """Of all services, a heap by the time at which each must be checked."""
        self._numbers = itertools.count()
        self._begun = threading.Condition(self._lock)
        threading.Thread(target=self._watch, name=WATCH_THREAD, daemon=True).start()

    def first(self, pool: Pool, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """
        The first message of a stream; None: the peer ended it without a message.

        A stream whose message is late, or that is the oldest of too many, is cancelled.
        """
        seconds = self._first_seconds
        late = ProtocolError(f"no message within {seconds:g} s")
        with self._waiting(pool, context, seconds, late):
            return next(requests, None)

    @contextmanager
    def replying(self, pool: Pool, context: grpc.ServicerContext) -> Iterator[None]:
        """
        While a reply is yielded to gRPC, which returns once the peer has room for it.

        A stream whose reply is not read, or that is the oldest of too many, is cancelled.
        """
        seconds = self._reply_seconds
        late = ProtocolError(f"its reply was not read within {seconds:g} s")
        with self._waiting(pool, context, seconds, late):
            yield

    def sending(
        self, frames: Iterator[bytes], context: grpc.ServicerContext, learner: str
    ) -> Iterator[bytes]:
        """The frames of a download, which is cancelled if its peer has no room for the next one for long."""
        seconds = self._frame_seconds
        late = UnavailableError(f"none of it was read within {seconds:g} s; request it again")
        wait = _Wait(seconds, math.inf, late, context)
        with self._lock:
            self._push(wait, time.monotonic() + seconds)
        try:
            for frame in frames:
                wait.deadline = time.monotonic() + seconds
                yield frame
                wait.deadline = math.inf
        finally:
            with self._lock:
                wait.context = None
            if wait.ended:
                self.refusals.refuse("a download", learner, wait.ended)

    def cancel_later(self, context: grpc.ServicerContext) -> None:
        """
        Cancel a stream that the syncer has ended, unless it ends by itself meanwhile.

        A peer that does not read would keep the threads of its stream as long as its connection.
        """
        seconds = self._first_seconds
        deadline, late = time.monotonic() + seconds, UnavailableError("its end was not read")
        with self._lock:
            self._push(_Wait(seconds, deadline, late, context), deadline)

    @contextmanager
    def _waiting(
        self, pool: Pool, context: grpc.ServicerContext, seconds: float, late: DilocoError
    ) -> Iterator[None]:
        address, deadline = address_of(context.peer()), time.monotonic() + seconds
        wait = _Wait(seconds, deadline, late, context)
        with self._lock:
            oldest, many = pool.excess(address), "too many streams wait for their peers"
            ended = oldest.end(ProtocolError(many)) if oldest else None
            pool.add(address, wait)
            self._push(wait, deadline)
        if ended is not None:
            ended.cancel()
        try:
            yield
        finally:
            with self._lock:
                wait.context = None
                pool.remove(address, wait)
            if wait.ended:
                self.refusals.refuse(f"a {pool.name} stream", "", wait.ended)

    def _push(self, wait: _Wait, due: float) -> None:
        """Called with the lock."""
        heapq.heappush(self._waits, (due, next(self._numbers), wait))
        if self._waits[0][2] is wait:
            self._begun.notify()

    def provide(self, learners: Mapping[str, int]) -> None:
        """Provide threads for these learners, by region; never fewer than before."""
        most = most_learners(learners)
        with self._lock:
            self.sessions.grow(2 * most)
            self.bulk.grow(2 * most * self._overlap, self._most_transfers(learners))

    def _most_transfers(self, learners: Mapping[str, int]) -> int:
        """All that `slot` admits at a time, so that no member can keep the threads of the others."""
        return sum(learners.values()) * self._streams_per_learner + OBSERVER_STREAMS

    def join(self, learner: str, now: float) -> None:
        """
        Count a session of a learner of the job; `now` is in monotonic seconds.

        Raises:
            UnavailableError: it has begun too many within a minute.
        """
        with self._lock:
            begun = self._joined.setdefault(learner, deque(maxlen=JOINS_PER_MINUTE))
            if len(begun) == JOINS_PER_MINUTE and now < begun[0] + 60.0:
                raise UnavailableError(
                    f"{learner} began {JOINS_PER_MINUTE} sessions within a minute; check its logs for why they end"
                )
            begun.append(now)

    @contextmanager
    def slot(self, learner: str) -> Iterator[str]:
        """
        Count a bulk stream of a learner whose identity was checked; "": an observer. Gives the name.

        Raises:
            UnavailableError: it has too many.
        """
        most = self._streams_per_learner if learner else OBSERVER_STREAMS
        with self._lock:
            if self._open[learner] >= most:
                raise UnavailableError(
                    f"{learner or 'observers'}: {most} transfers are open; end one first"
                )
            self._open[learner] += 1
        try:
            yield learner
        finally:
            with self._lock:
                self._open[learner] -= 1
                if not self._open[learner]:
                    del self._open[learner]

    def _watch(self) -> None:
        """Cancel the streams whose peer is late, and start the threads that are missing."""
        while True:
            for context in self._late():
                context.cancel()
            self.refusals.flush()
            for pool in (self.sessions, self.queries, self.bulk):
                pool.executor.recover()

    def _late(self) -> list[grpc.ServicerContext]:
        """Wait for the next deadline, at most WATCH_SECONDS; returns the streams to cancel."""
        late = []
        with self._lock:
            due = self._waits[0][0] if self._waits else math.inf
            self._begun.wait(min(WATCH_SECONDS, max(0.0, due - time.monotonic())))
            now = time.monotonic()
            while self._waits and (self._waits[0][2].context is None or self._waits[0][0] <= now):
                _, _, wait = heapq.heappop(self._waits)
                if wait.context is not None and wait.deadline > now:
                    self._push(wait, min(wait.deadline, now + wait.seconds))
                elif (context := wait.end(wait.late)) is not None:
                    late.append(context)
        return late


def address_of(peer: str) -> str:
    """
    The address in gRPC's name of a peer, without the port.

    >>> address_of("ipv4:10.0.0.7:41820"), address_of("ipv6:%5B::1%5D:41820")
    ('ipv4:10.0.0.7', 'ipv6:%5B::1%5D')
    """
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
