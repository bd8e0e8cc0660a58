"""
TCP proxies between learners and the syncer, one per learner, on 127.0.0.1.

They run on one event loop in a thread of their own and end with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from diloco_local.faults import Fault, Kind

BLOCK_BYTES = 1 << 16
QUEUED_BLOCKS = 64
"""Of one direction of a connection; after that, the sender has to wait."""

BULK = b"diloco-bulk"
"""
User agent of connections with fragments. Only their bytes have checksums (protos/diloco/v1/bulk.proto): without
TLS, a changed byte of a session may be another valid message, which no receiver can notice.
"""
MAX_CONNECTIONS = 32
"""Of one learner, which uses few: so many are there only if they hang and their ends are closed."""
MIN_CORRUPT_BYTES = 1024
"""Smaller blocks are mostly frames of HTTP/2 and requests."""

_Block = tuple[float, bytes]
"""When it may be sent, on the clock of the loop, and what; b"": the direction ends."""


class Proxies:
    """The proxies of one run; `close` ends them."""

    def __init__(self, learners: Iterable[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._proxies = {name: Proxy() for name in learners}
        for proxy in self._proxies.values():
            asyncio.run_coroutine_threadsafe(proxy.listen(), self._loop).result()

    def endpoint(self, learner: str, target: str) -> str:
        """Where this learner reaches the syncer, which listens at `target`."""
        proxy = self._proxies[learner]
        self._call(proxy.aim, target)
        return f"127.0.0.1:{proxy.port}"

    def set_fault(self, learner: str, fault: Fault | None) -> None:
        """Disturb the connections of a learner from now on; None: no longer."""
        self._call(self._proxies[learner].set_fault, fault)

    def flipped(self, learner: str) -> int:
        """Bytes that were inverted since the last fault began."""
        return self._proxies[learner].flipped

    def close(self) -> None:
        """Close all connections; may be called again."""
        if not self._thread.is_alive():
            return
        for proxy in self._proxies.values():
            asyncio.run_coroutine_threadsafe(proxy.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop and wait for it."""

        async def call() -> None:
            function(*arguments)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()


@dataclass(slots=True)
class Proxy:
    """The proxy of one learner; all methods run on the loop."""

    port: int = 0
    flipped: int = 0
    _target: tuple[str, int] = ("", 0)
    _fault: Fault | None = None
    _flip_at: float = 0.0
    _passes: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def listen(self) -> None:
        """Listen on a free port."""
        self._passes.set()
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def aim(self, target: str) -> None:
        """Connect to this host:port from now on."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def set_fault(self, fault: Fault | None) -> None:
        """Disturb from now on; None: no longer."""
        if fault is not None:
            self.flipped, self._flip_at = 0, 0.0
        self._fault = fault
        kind = fault.kind if fault is not None else None
        if kind is Kind.HANG:
            self._passes.clear()
        else:
            self._passes.set()
        if kind is Kind.CUT:
            for connection in self._connections:
                connection.cancel()

    async def close(self) -> None:
        """End the proxy."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, near: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("called outside of a task")
        self._connections.add(task)
        ends = [out]
        try:
            cut = self._fault is not None and self._fault.kind is Kind.CUT
            if not cut and len(self._connections) <= MAX_CONNECTIONS:
                far, up = await asyncio.open_connection(*self._target)
                ends.append(up)
                await self._carry((near, up), (far, out))
        except (OSError, asyncio.CancelledError):
            # A peer that is gone, a cut, or the end of the run: the task ends with its connections.
            for end in ends:
                end.transport.abort()
        finally:
            self._connections.discard(task)
            for end in ends:
                end.close()  # sends what is buffered, unless it is aborted

    async def _carry(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Until one of both directions has ended."""
        bulk = asyncio.Event()
        readers, senders = [], []
        for source, sink in ways:
            queue: asyncio.Queue[_Block] = asyncio.Queue(QUEUED_BLOCKS)
            readers.append(asyncio.ensure_future(self._read(source, queue, bulk)))
            senders.append(asyncio.ensure_future(self._send(queue, sink, bulk)))
        try:
            await asyncio.wait(senders, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*readers, *senders):
                task.cancel()
            await asyncio.gather(*readers, *senders, return_exceptions=True)

    async def _read(
        self, source: asyncio.StreamReader, queue: asyncio.Queue[_Block], bulk: asyncio.Event
    ) -> None:
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(OSError):
            while data := await source.read(BLOCK_BYTES):
                if not bulk.is_set() and BULK in data:
                    bulk.set()
                fault = self._fault
                delayed = fault is not None and fault.kind is Kind.DELAY
                await queue.put((clock() + (fault.amount if fault and delayed else 0.0), data))
        await queue.put((0.0, b""))

    async def _send(
        self, queue: asyncio.Queue[_Block], sink: asyncio.StreamWriter, bulk: asyncio.Event
    ) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            ready_at, data = await queue.get()
            await self._passes.wait()
            if not data:
                return
            await asyncio.sleep(max(0.0, ready_at - clock()))
            fault = self._fault
            if fault is not None and fault.bandwidth:
                await asyncio.sleep(len(data) / fault.bandwidth)
            if fault is not None and fault.kind is Kind.CORRUPT and bulk.is_set():
                data = self._flip(data, clock(), fault.amount)
            sink.write(data)
            await sink.drain()

    def _flip(self, data: bytes, now: float, every_seconds: float) -> bytes:
        if len(data) < MIN_CORRUPT_BYTES or now < self._flip_at:
            return data
        self._flip_at, self.flipped = now + every_seconds, self.flipped + 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
