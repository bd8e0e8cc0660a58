"""
A TCP relay that breaks one learner's connections the way networks and machines do.

    python benchmarks/faulty_link.py TARGET_PORT

It prints its port, and then obeys lines on standard input: `mute`, `trickle`, `delay SECONDS` (each
way) or `heal`. Bulk data is distinguished from control messages by its rate, so that reports and heartbeats
pass while nothing else does.
"""

from __future__ import annotations

import asyncio
import sys
import time

BULK_BYTES_PER_SECOND = 64 * 1024
"""A connection that ever sent more than this within a second carries uploads."""

TRICKLE_BYTES_PER_SECOND = 100


class Link:
    """What is wrong at present."""

    def __init__(self) -> None:
        self.fault = "heal"
        self.delay_seconds = 0.0
        self.healed = asyncio.Event()

    def obey(self, line: str) -> None:
        """One command."""
        self.fault, _, value = line.strip().partition(" ")
        if self.fault == "delay":
            self.delay_seconds = float(value)
        if self.fault == "heal":
            self.healed.set()
        else:
            self.healed.clear()

    async def up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From the learner to the syncer."""
        bulk, begun, count = False, time.monotonic(), 0
        while data := await reader.read(1 << 16):
            now = time.monotonic()
            if now - begun > 1.0:
                begun, count = now, 0
            count += len(data)
            bulk = bulk or count > BULK_BYTES_PER_SECOND
            if bulk and self.fault in ("mute", "trickle"):
                await self._hold(data, writer)
            else:
                self._later(data, writer)
                await writer.drain()
        self._end_later(writer)

    async def _hold(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        while data and self.fault == "trickle":
            writer.write(data[:TRICKLE_BYTES_PER_SECOND])
            data = data[TRICKLE_BYTES_PER_SECOND:]
            await asyncio.sleep(1.0)
        await self.healed.wait()
        writer.write(data)

    async def down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From the syncer to the learner."""
        while data := await reader.read(1 << 16):
            self._later(data, writer)
            await writer.drain()
        self._end_later(writer)

    def _later(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        # Timers of one delay end in the order in which they began.
        if self.delay_seconds:
            asyncio.get_running_loop().call_later(self.delay_seconds, writer.write, data)
        else:
            writer.write(data)

    def _end_later(self, writer: asyncio.StreamWriter) -> None:
        asyncio.get_running_loop().call_later(self.delay_seconds, writer.close)


async def serve(target: int) -> None:
    """Until standard input ends."""
    link = Link()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to = await asyncio.open_connection("127.0.0.1", target)
            await asyncio.gather(link.up(reader, to), link.down(there, writer))
        except OSError:
            writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        link.obey(line)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
