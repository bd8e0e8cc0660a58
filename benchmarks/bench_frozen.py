"""
What a frozen base costs a job with `sync.frozen` Keep and Ship: `python benchmarks/bench_frozen.py [--quick]`.

A real syncer and two real learners, whose connections pass a relay that counts bytes: the first learner
initializes the job, the second joins, and both train to the end without a forward pass. The model is a base
of 24 square matrices in bf16, 100.7 M values, each with two trained matrices of rank 3, as in LoRA (0.29 %).
Two more rows have a base of 1 billion values, the one with Ship only where 18 GB of memory are available.
Goals: with Keep, the second learner receives at most 0.1 times the bytes of the base, and a snapshot and the
peak of the syncer above an empty one are at most 0.1 times those with Ship.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _job import Syncer, learner_environment, memory_bytes, syncer
from _timing import judge, table, write_results

from diloco.spec import Checkpoint, RunSpec

GOAL = 0.1
WIDTH, LAYERS, RANK = 2048, 24, 3
BILLION = 6464
"""Width of a base of 1.0 billion values."""
SHIP_GIGABYTES = 18.0
"""For a job with it and Ship."""
STEPS = 48
SECONDS = 300.0


class Relay:
    """Forwards TCP connections to a port of this machine, and counts their bytes."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        self.port = 0
        self._target = target
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        ready.wait(30)

    async def _serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(self._copy(reader, to, "up"), self._copy(there, writer, "down"))
        except OSError:
            writer.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        while data := await reader.read(1 << 18):
            setattr(self, way, getattr(self, way) + len(data))
            writer.write(data)
            await writer.drain()
        writer.close()


def train(width: int, layers: int) -> None:
    """A learner: prints facts about its start as JSON, waits for a line, and trains to the end."""
    import torch
    from torch import nn

    from diloco_worker import Learner
    from diloco_worker.trainer.frozen import with_digests
    from diloco_worker.trainer.layout import describe

    torch.manual_seed(0)
    model = nn.Module()
    for layer in range(layers):
        block = nn.Module()
        block.base = nn.Linear(width, width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        block.lora_a = nn.Linear(width, RANK, bias=False)
        block.lora_b = nn.Linear(RANK, width, bias=False)
        model.add_module(f"layer{layer:02d}", block)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    begun = time.perf_counter()
    with_digests(describe(model).frozen)
    digests = time.perf_counter() - begun
    begun = time.perf_counter()
    learner = Learner.connect(model, optimizer)
    facts = {"digests": digests, "connect": time.perf_counter() - begun}
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()
    while not learner.done:
        for parameter in trained:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        learner.step(tokens=100)
        time.sleep(0.05)


class Child:
    """A learner process that sees the syncer through a relay of its own."""

    def __init__(self, name: str, spec: RunSpec, process: Syncer, size: tuple[int, int]) -> None:
        self.relay = Relay(int(process.endpoint.rpartition(":")[2]))
        endpoint = f"127.0.0.1:{self.relay.port}"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--learner", *map(str, size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **learner_environment(spec, name, endpoint, process.spec_file)},
        )  # fmt: skip

    def joined(self) -> dict[str, float]:
        """Wait until it has the model; seconds that it states, and bytes that it moved."""
        assert self._process.stdout is not None
        stated = self._process.stdout.readline()
        if not stated:
            raise RuntimeError(f"a learner ended with {self._process.wait()}")
        return {**json.loads(stated), "up": self.relay.up, "down": self.relay.down}

    def train(self) -> None:
        """Let it train."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self, seconds: float) -> None:
        """Wait for its end; kill it after the timeout."""
        try:
            code = self._process.wait(seconds)
        finally:
            self._process.kill()
            self._process.wait()
        if code:
            raise RuntimeError(f"a learner ended with {code}")


def measure(frozen: str, size: tuple[int, int]) -> dict[str, Any]:
    """One job; bytes and seconds."""
    spec = RunSpec(
        job="bench", steps=STEPS, fragments=8, interval=8, quorum=1, learners={"r": 2}, frozen=frozen,
        syncer_checkpoint=Checkpoint(every_steps=STEPS // 2, keep=1),
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="bench-frozen-") as folder,
        syncer(spec, Path(folder)) as process,
    ):
        idle = memory_bytes(process.pid, "VmRSS")
        first = Child("r/0", spec, process, size)
        initial = first.joined()
        second = Child("r/1", spec, process, size)
        width, layers = size
        base = 2 * layers * width * width
        facts = {"frozen": frozen, "base": base, "initial": initial, "join": second.joined()}
        for child in (first, second):
            child.train()
        for child in (first, second):
            child.end(SECONDS)
        snapshots = process.directory / "snapshots"
        largest = max(path.stat().st_size for path in snapshots.rglob("*") if path.is_file())
        model = (process.directory / "model" / "model.safetensors").stat().st_size
        peak = memory_bytes(process.pid)
        return {**facts, "idle": idle, "peak": peak, "snapshot": largest, "model": model}


def row(facts: dict[str, Any]) -> list[object]:
    """Of the table."""
    initial, join = facts["initial"], facts["join"]
    sizes = (
        facts["peak"], facts["peak"] - facts["idle"], facts["snapshot"], facts["model"], initial["up"],
        initial["down"], join["down"],
    )  # fmt: skip
    seconds = (join["digests"], join["connect"])
    base = f"{facts['base'] / 1e6:.0f}"
    return [facts["frozen"], base, *(f"{size / 1e6:.1f}" for size in sizes), *map(float, seconds)]


def memory_gigabytes() -> float:
    """That is available."""
    [line] = [x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x]
    return int(line.split()[1]) * 1024 / 1e9


def main() -> int:
    """Measure, write results/frozen.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, no results, no goals")
    parser.add_argument("--learner", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.learner:
        train(*arguments.learner)
        return 0
    size = (256, 4) if arguments.quick else (WIDTH, LAYERS)
    keep, ship = (measure(frozen, size) for frozen in ("Keep", "Ship"))
    width, layers = size
    base, trained = layers * width * width, layers * 2 * width * RANK
    wide = (2 * width if arguments.quick else BILLION, layers)
    found = [keep, ship, measure("Keep", wide)]
    if memory_gigabytes() >= SHIP_GIGABYTES:
        found.append(measure("Ship", wide))
    body = table(
        ["sync.frozen", "base MB", "peak of the syncer MB", "above an empty one MB", "snapshot MB", "exported model MB",
         "first learner, up MB", "down MB", "second learner, down MB", "digests s", "connect of the second s"],
        [*map(row, found)],
    )  # fmt: skip
    note = (
        f"A frozen base of {base / 1e6:.1f} M values in bf16 ({2 * base / 1e6:.0f} MB), and {trained / 1e6:.2f} M "
        f"trained parameters ({trained / base:.2%}) in fp32; from the third row on, "
        f"{found[2]['base'] / 2e9:.2g} billion values; two learners, {STEPS} global steps. Up and down: "
        "bytes of the learner's TCP connections until its `connect` returned. Snapshot: the largest file. Peak: "
        "VmHWM over the whole job. Digests: computing them once for the whole base; part of `connect` with Keep."
    )
    if arguments.quick:
        print(f"{note}\n\n{body}")
        return 0
    write_results(
        "frozen", "A frozen base that stays with the learners", f"{note}\n\n{body}",
        packages=("torch", "xxhash", "grpcio"),
    )  # fmt: skip
    goals = {
        "bytes of a join against the base": (keep["join"]["down"] / (2 * base), GOAL),
        "snapshot against Ship": (keep["snapshot"] / ship["snapshot"], GOAL),
        "peak above an empty syncer against Ship": (
            (keep["peak"] - keep["idle"]) / (ship["peak"] - ship["idle"]), GOAL,
        ),
    }  # fmt: skip
    return judge(goals, at_most=frozenset(goals))


if __name__ == "__main__":
    raise SystemExit(main())
