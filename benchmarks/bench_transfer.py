"""
One 64 MiB fragment up and down against raw TCP: `python benchmarks/bench_transfer.py [--quick]`.

Loopback, one stream each, the server in a process of its own. Our side is what runs in use: raw
gRPC methods, `wire.pack` and `wire.unpack` with checksums, 1 MiB chunks, into buffers that were
made before. Raw TCP moves the same bytes with sendall and recv_into, without checksums. Goals: up
at least 0.55 and down at least 0.50 of TCP's speed, at most 20 minor page faults per MB moved on
either side.
"""

from __future__ import annotations

import argparse
import resource
import socket
import statistics
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
import numpy as np
from _timing import Run, judge, paired, spread, table, write_results

from diloco.codec import frames
from diloco.rpc import channels, servers
from diloco.runtime import interpreter, malloc

CHUNK_BYTES = 1 << 20
FRAGMENT_BYTES = 64 << 20
ROUNDS = 15
GOALS = {"up": 0.55, "down": 0.50}
MAX_FAULTS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What this process has used so far."""

    faults: int
    cpu_seconds: float

    @classmethod
    def now(cls) -> Usage:
        """Read the process's counters."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(faults=used.ru_minflt, cpu_seconds=used.ru_utime + used.ru_stime)

    def since(self, before: Usage) -> Usage:
        """The difference."""
        return Usage(
            faults=self.faults - before.faults, cpu_seconds=self.cpu_seconds - before.cpu_seconds
        )


class Side:
    """The fragment of one side, and how it goes into messages and comes out of them."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(0).integers(0, 255, FRAGMENT_BYTES, np.uint8)
        self.target = np.ones_like(self.source)

    def messages(self) -> Iterator[bytes]:
        """Every chunk, packed, then the end."""
        view = memoryview(self.source.data)
        for index, start in enumerate(range(0, FRAGMENT_BYTES, CHUNK_BYTES)):
            yield frames.pack(frames.Kind.CHUNK, index, view[start : start + CHUNK_BYTES])
        yield frames.pack(frames.Kind.END, 0)

    def receive(self, messages: Iterator[bytes]) -> None:
        """Check every message and put its chunk in place."""
        arrivals = frames.Arrivals(FRAGMENT_BYTES // CHUNK_BYTES)
        for message in messages:
            envelope = frames.unpack(message)
            if envelope.kind is frames.Kind.END:
                break
            arrivals.received(envelope.index)
            start = envelope.index * CHUNK_BYTES
            self.target[start : start + CHUNK_BYTES] = np.frombuffer(envelope.payload, np.uint8)
        if arrivals.missing():
            raise RuntimeError(f"chunks {arrivals.missing()} did not arrive")

    def send_raw(self, connection: socket.socket) -> None:
        """The same bytes, without envelope."""
        view = memoryview(self.source.data)
        for start in range(0, FRAGMENT_BYTES, CHUNK_BYTES):
            connection.sendall(view[start : start + CHUNK_BYTES])

    def receive_raw(self, connection: socket.socket) -> None:
        """The same bytes, without envelope."""
        view, done = memoryview(self.target.data), 0
        while done < FRAGMENT_BYTES:
            count = connection.recv_into(view[done : done + CHUNK_BYTES])
            if not count:
                raise RuntimeError(f"connection closed after {done} of {FRAGMENT_BYTES} bytes")
            done += count


# The server's process


def serve() -> None:
    """Serve both kinds until standard input closes; prints the two ports."""
    malloc.tune_malloc()
    interpreter.tune_interpreter()
    side = Side()

    def upload(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        side.receive(messages)
        yield frames.pack(frames.Kind.TRAILER, 0)

    def download(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        return side.messages()

    def usage(request: bytes, context: grpc.ServicerContext) -> bytes:
        now = Usage.now()
        return struct.pack("<qd", now.faults, now.cpu_seconds)

    handlers: dict[str, Any] = {
        "Upload": grpc.stream_stream_rpc_method_handler(upload),
        "Download": grpc.unary_stream_rpc_method_handler(download),
        "Usage": grpc.unary_unary_rpc_method_handler(usage),
    }
    server = servers.server(
        [grpc.method_handlers_generic_handler("bench", handlers)], max_workers=4
    )
    port = servers.bind(server, "127.0.0.1:0", None)
    server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_raw, args=(listener, side), daemon=True).start()
    print(port, listener.getsockname()[1], flush=True)
    sys.stdin.read()
    server.stop(None).wait()


def serve_raw(listener: socket.socket, side: Side) -> None:
    """One connection; each request is one byte: u or d."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(1):
            if request == b"u":
                side.receive_raw(connection)
                connection.sendall(b"k")
            else:
                side.send_raw(connection)


# The client's process


@dataclass(slots=True)
class Client:
    """Both connections, and what was used by ours."""

    side: Side
    channel: grpc.Channel
    raw: socket.socket
    here: dict[str, list[Usage]] = field(default_factory=lambda: {"up": [], "down": []})
    there: dict[str, list[Usage]] = field(default_factory=lambda: {"up": [], "down": []})

    def up(self) -> None:
        """One upload by gRPC."""
        upload: Any = self.channel.stream_stream("/bench/Upload")
        replies: Iterator[bytes] = upload(self.side.messages())
        if [frames.unpack(reply).kind for reply in replies] != [frames.Kind.TRAILER]:
            raise RuntimeError("the upload was not acknowledged")

    def down(self) -> None:
        """One download by gRPC."""
        download: Any = self.channel.unary_stream("/bench/Download")
        self.side.receive(download(b""))

    def raw_up(self) -> None:
        """One upload by TCP."""
        self.raw.sendall(b"u")
        self.side.send_raw(self.raw)
        if self.raw.recv(1) != b"k":
            raise RuntimeError("the upload was not acknowledged")

    def raw_down(self) -> None:
        """One download by TCP."""
        self.raw.sendall(b"d")
        self.side.receive_raw(self.raw)

    def counted(self, name: str, run: Run) -> Run:
        """The same work, noting what both processes used for it; only the work is timed."""

        def work() -> float:
            there, here = self._usage_there(), Usage.now()
            start = perf_counter()
            run()
            seconds = perf_counter() - start
            self.here[name].append(Usage.now().since(here))
            self.there[name].append(self._usage_there().since(there))
            return seconds

        return work

    def _usage_there(self) -> Usage:
        usage: Any = self.channel.unary_unary("/bench/Usage")
        faults, cpu_seconds = struct.unpack("<qd", usage(b""))
        return Usage(faults=faults, cpu_seconds=cpu_seconds)


@contextmanager
def connected() -> Iterator[Client]:
    """A server process and both connections to it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port, raw_port = map(int, process.stdout.readline().split())
        with (
            channels.channel(f"127.0.0.1:{port}", tls=None, purpose="bulk") as channel,
            socket.create_connection(("127.0.0.1", raw_port)) as raw,
        ):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Client(side=Side(), channel=channel, raw=raw)
        process.communicate("")


def main() -> int:
    """Measure, write results/transfer.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, no results file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    malloc.tune_malloc()
    interpreter.tune_interpreter()
    rounds = 3 if arguments.quick else ROUNDS
    with connected() as client:
        results = paired(
            {"up": client.counted("up", client.up), "down": client.counted("down", client.down)},
            {"up": client.raw_up, "down": client.raw_down},
            rounds=rounds,
            warmup=3,
        )
    megabytes = FRAGMENT_BYTES / 1e6
    rows, goals = [], {}
    for name, result in results.items():
        here, there = client.here[name][-rounds:], client.there[name][-rounds:]
        faults = [statistics.mean(u.faults for u in side) / megabytes for side in (here, there)]
        cpu = sum(statistics.mean(u.cpu_seconds for u in side) for side in (here, there))
        rows.append(
            [
                name,
                megabytes / 1e3 / statistics.median(result.base_seconds),
                megabytes / 1e3 / result.median_seconds,
                result.ratio,
                spread(result.ratios),
                f"≥ {GOALS[name]}",
                faults[0],
                faults[1],
                cpu / megabytes * 1e3,
            ]
        )
        goals[f"{name} against TCP"] = (result.ratio, GOALS[name])
        goals[f"faults per MB, {name}"] = (max(faults), MAX_FAULTS)
    body = table(
        [
            "direction",
            "TCP GB/s",
            "ours GB/s",
            "ratio",
            "lowest … highest",
            "goal",
            "faults/MB client",
            "faults/MB server",
            "CPU s/GB both",
        ],
        rows,
    )
    if arguments.quick:
        print(body)
    else:
        control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
        note = (
            f"64 MiB in chunks of 1 MiB over loopback ({control.read_text().strip()}), one stream, "
            f"{rounds} rounds, every run between two of raw TCP. Ours checks an xxh3 checksum of "
            "every chunk; raw TCP checks nothing. Client and server share the cores: this is a "
            "benchmark of CPU, not of a network."
        )
        write_results(
            "transfer",
            "One fragment up and down against raw TCP",
            f"{note}\n\n{body}",
            packages=("grpcio", "xxhash", "numpy"),
        )
    return judge(goals, at_most=frozenset(name for name in goals if name.startswith("faults")))


if __name__ == "__main__":
    raise SystemExit(main())
