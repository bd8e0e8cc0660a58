"""
One full outer sync of one 64 MiB fragment, two learners, against gloo:
`python benchmarks/bench_outer_sync.py [--quick] [--loopback | --wan]`.

Ours: the real syncer process and the real link process of each learner. The clock starts when both
trainers report a step and stops when the new Θ lies in both shared memories, so it holds the
report, the pull, encoding, upload, merge and Nesterov, download and decoding. Only the trainer is
scripted: its delta lies in the shared memory beforehand. Gloo: torch.distributed.all_reduce of the
same fp32 bytes and the same Nesterov on each rank, in the same run, before and after each of ours.

The goals are for a link of 1 Gbit/s and 50 ms between the learners (userspace emulator, wan.c),
syncer and one learner on one side. On loopback nothing is asked: it only measures the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numba
import numpy as np
import wan
from _job import F32, Syncer, Trainer, syncer
from _timing import Paired, Run, judge, paired, spread, table, write_results

from diloco.model.fragments import Tensor, cut
from diloco.runtime.malloc import tune_malloc
from diloco.spec import Checkpoint, RunSpec

MEMBERS = 2
LEARNING_RATE, MOMENTUM = 0.7, 0.5
ROUND_TRIP_MS, RATE_MBIT = 50.0, 1000.0
GOALS = {"fp32 both ways": 2.5, "int4 up, bf16 down": 4.5}
VARIANTS = {
    "fp32 both ways": {"merge": "Average", "wire_up": "FP32", "wire_down": "FP32"},
    "int4 up, bf16 down": {"merge": "Average", "wire_up": "Int4", "wire_down": "BF16"},
    "fp32, Radial, 8 tensors": {"merge": "Radial", "wire_up": "FP32", "wire_down": "FP32"},
    "bf16, Radial, 8 tensors": {"merge": "Radial", "wire_up": "BF16", "wire_down": "BF16"},
}
BITS = {"FP32": 32, "BF16": 16, "Int4": 4.25}


def spec_of(variant: str) -> RunSpec:
    """A job of one fragment that is due at every step."""
    return RunSpec(
        job="bench",
        steps=10**9,
        fragments=1,
        interval=1,
        overlap=1,
        quorum=MEMBERS,
        outer_learning_rate=LEARNING_RATE,
        outer_momentum=MOMENTUM,
        learners={"r": MEMBERS},
        syncer_checkpoint=Checkpoint(every_steps=10**9, keep=1),
        **VARIANTS[variant],  # type: ignore[arg-type]
    )


def tensors_of(variant: str, megabytes: int) -> list[Tensor]:
    """One tensor, or eight of equal size."""
    count = 8 if "8 tensors" in variant else 1
    rows = (megabytes << 18) // count // 1024
    return [Tensor(name=f"w{i}", shape=(rows, 1024), dtype="float32") for i in range(count)]


def delta_of(rank: int, elements: int) -> F32:
    """What this rank's training would have changed; a shorter result is a prefix of a longer one."""
    values_N = np.random.default_rng(rank).standard_normal(elements, dtype=np.float32)
    return values_N * np.float32(1e-3)


@numba.njit(fastmath={"contract"}, nogil=True)
def nesterov(theta_N: F32, momentum_N: F32, sum_N: F32) -> None:
    """What gloo's ranks do with the sum, in one pass."""
    scale = np.float32(1 / MEMBERS)
    rate, mu = np.float32(LEARNING_RATE), np.float32(MOMENTUM)
    for i in range(theta_N.size):
        delta = scale * sum_N[i]
        momentum_N[i] = mu * momentum_N[i] + delta
        theta_N[i] -= rate * (delta + mu * momentum_N[i])


# ---------------------------------------------------------------- the learners' processes


class Rank:
    """One learner in every variant, and one rank of gloo."""

    def __init__(self, rank: int, plan: dict[str, object]) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = str(plan["interface"])
        store = f"tcp://{plan['store']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=MEMBERS)
        self._reduce: Callable[[], object] = lambda: dist.all_reduce(self._sum)
        self.rank, self.megabytes = rank, int(str(plan["megabytes"]))
        elements = self.megabytes << 18
        self.delta_N = delta_of(rank, elements)
        self._sum = torch.zeros(elements)
        # Zeros that were written: a fresh page would cost more than the work on it.
        self._theta_N, self._momentum_N = (np.full(elements, 0, np.float32) for _ in range(2))
        self.trainers = {}
        for name, (endpoint, spec_file) in plan["syncers"].items():  # type: ignore[attr-defined]
            spec = RunSpec.from_json(Path(spec_file).read_text())
            layout = cut(tensors_of(name, self.megabytes), num_fragments=1)
            self.trainers[name] = Trainer(
                layout, spec, f"r/{rank}", endpoint=endpoint, spec_file=Path(spec_file)
            )

    def arm(self, name: str) -> None:
        """Everything that is not part of a sync."""
        if name == "gloo":
            self._sum.numpy()[:] = self.delta_N
        else:
            self.trainers[name].take(0, self.delta_N)

    def run(self, name: str) -> float:
        """One sync; a number that all ranks must have in common."""
        if name == "gloo":
            self._reduce()
            nesterov(self._theta_N, self._momentum_N, self._sum.numpy())
            return float(self._theta_N[12345])
        trainer = self.trainers[name]
        trainer.step(tokens=1000, offers=[0])
        trainer.receive(0)
        return float(trainer.shared.inbox(0)[12345])

    def serve(self) -> None:
        """Obey standard input until it ends."""
        print("ready", flush=True)
        for line in sys.stdin:
            self.arm(line.strip())
            print("armed", flush=True)
            sys.stdin.readline()
            print(json.dumps(self.run(line.strip())), flush=True)
        for trainer in self.trainers.values():
            trainer.close()


# ---------------------------------------------------------------- the conductor


class Bench:
    """All processes of one network."""

    def __init__(self, syncers: dict[str, Syncer], ranks: list[subprocess.Popen[str]]) -> None:
        self._syncers, self._ranks = syncers, ranks
        self.values: dict[str, list[float]] = {name: [] for name in (*syncers, "gloo")}
        self.after_pause: dict[str, list[float]] = {name: [] for name in syncers}
        """Seconds of the syncs before the measured ones."""

    def op(self, name: str) -> Run:
        """
        One sync of all ranks, timed from the last command sent to the last reply.

        Another of ours goes before it, noted apart: rounds of a job follow each other, but here a
        variant's connections lie idle while the others run, far longer than gloo's ever do, and a
        sync after such a pause was seen to stall for 0.3 s.
        """

        def run() -> float:
            if name != "gloo":
                self.after_pause[name].append(self._once(name))
            return self._once(name)

        return run

    def _once(self, name: str) -> float:
        self._send(name)
        self._receive()
        start = time.perf_counter()
        self._send("go")
        replies = self._receive()
        seconds = time.perf_counter() - start
        values = {float(line) for line in replies}
        if len(values) != 1:
            raise RuntimeError(f"{name}: the ranks hold different values: {replies}")
        self.values[name].append(values.pop())
        return seconds

    def check(self, megabytes: int) -> None:
        """Every variant's first steps must be those of Nesterov on the mean delta."""
        deltas = [delta_of(rank, megabytes << 18)[12345] for rank in range(MEMBERS)]
        mean = float(np.mean(np.array(deltas, np.float64)))
        for name, values in self.values.items():
            if "Radial" in name or "int4" in name:
                continue  # another Δ, on purpose; only the agreement of the ranks is checked
            theta = momentum = 0.0
            for value in values[:3]:
                momentum = MOMENTUM * momentum + mean
                theta -= LEARNING_RATE * (mean + MOMENTUM * momentum)
                if abs(value - theta) > 1e-5 * abs(theta) + 1e-9:
                    raise RuntimeError(f"{name}: {value}, Nesterov gives {theta}")

    def _send(self, line: str) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(line + "\n")
            rank.stdin.flush()

    def _receive(self) -> list[str]:
        return [_line(rank) for rank in self._ranks]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"a learner's process ended with {process.wait()}; see above")
    return line


@contextmanager
def processes(megabytes: int, names: list[str], link: wan.Wan | None) -> Iterator[Bench]:
    """Syncers and rank 0 on the near side, rank 1 on the far side; without a link all together."""
    near, far = (link.inside(link.near), link.inside(link.far)) if link else ([], [])
    host = wan.NEAR_ADDRESS if link else "127.0.0.1"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-sync-")))
        syncers = {
            name: stack.enter_context(
                syncer(spec_of(name), folder / str(i), host=host, prefix=near)
            )
            for i, name in enumerate(names)
        }
        plan = {
            "megabytes": megabytes,
            "interface": "tun0" if link else "lo",
            "store": f"{host}:{_free_port()}",
            "syncers": {n: (s.endpoint, str(s.spec_file)) for n, s in syncers.items()},
        }
        ranks = []
        for rank in range(MEMBERS):
            command = [sys.executable, __file__, "--rank", str(rank), "--plan", json.dumps(plan)]
            process = subprocess.Popen(
                [*(near if rank == 0 else far), *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(_end, process)
            ranks.append(process)
        for process in ranks:
            _line(process)
        yield Bench(syncers, ranks)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate("", timeout=20)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(
    megabytes: int, names: list[str], link: wan.Wan | None, rounds: int
) -> tuple[dict[str, Paired], dict[str, float]]:
    """Every variant against gloo; and the median seconds of a sync after a pause."""
    with processes(megabytes, names, link) as bench:
        # The first transfers find small TCP windows.
        results = paired(
            {name: bench.op(name) for name in names}, bench.op("gloo"), rounds=rounds, warmup=1
        )
        bench.check(megabytes)
    pauses = {n: statistics.median(s[-rounds:]) for n, s in bench.after_pause.items()}
    return results, pauses


def rows_of(
    results: dict[str, Paired], pauses: dict[str, float], megabytes: int, *, floor: bool
) -> Iterator[list[object]]:
    """One row per variant; with `floor`, beside what the link itself needs."""
    for name, result in results.items():
        bits = max(BITS[VARIANTS[name]["wire_up"]], BITS[VARIANTS[name]["wire_down"]])
        least = (megabytes << 18) * bits / RATE_MBIT / 1e6 + ROUND_TRIP_MS / 1e3
        gloo = sorted(result.base_seconds)[len(result.base_seconds) // 2]
        row: list[object] = [name, f"{gloo * 1e3:.0f}", f"{result.median_seconds * 1e3:.0f}"]
        row += [result.ratio, spread(result.ratios), f"{pauses[name] * 1e3:.0f}"]
        if floor:
            row += [f"{least * 1e3:.0f}", least / result.median_seconds]
            row += [f"≥ {GOALS[name]}" if name in GOALS else "none"]
        yield row


def main() -> int:
    """Measure, write results/outer_sync.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small, loopback unless --wan, no results"
    )
    parser.add_argument("--loopback", action="store_true", help="only loopback")
    parser.add_argument("--wan", action="store_true", help="only the emulated link")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tune_malloc()
    if arguments.rank is not None:
        Rank(arguments.rank, arguments.plan).serve()
        return 0
    megabytes, names, rounds = 64, list(VARIANTS), 5
    if arguments.quick:
        megabytes, names, rounds = 8, list(GOALS), 2
    columns = [
        "ours",
        "gloo fp32 ms",
        "ours ms",
        "gloo's time / ours",
        "lowest … highest",
        "ours after a pause ms",
    ]
    parts, goals = [], {}
    if not arguments.loopback and (arguments.wan or not arguments.quick):
        problem = wan.missing()
        if problem:
            print(f"the emulated link is skipped: {problem}")
        else:
            with wan.link(round_trip_ms=ROUND_TRIP_MS, rate_mbit=RATE_MBIT) as link:
                results, pauses = measure(megabytes, names, link, rounds)
            body = table(
                [*columns, "link floor ms", "floor / ours", "goal"],
                rows_of(results, pauses, megabytes, floor=True),
            )
            parts.append(f"## Link of {link.description}\n\n{body}")
            if not arguments.quick:
                goals = {
                    f"{name}, emulated link": (results[name].ratio, GOALS[name]) for name in GOALS
                }
    if not arguments.wan:
        results, pauses = measure(megabytes, names, None, rounds)
        body = table(columns, rows_of(results, pauses, megabytes, floor=False))
        parts.append(f"## Loopback (CPU only; no goal)\n\n{body}")
    if arguments.quick:
        print("\n\n".join(parts))
        return 0
    note = (
        f"One fragment of {megabytes} MiB fp32, {MEMBERS} learners, {rounds} rounds, each run of ours "
        "between two of gloo. Ours: from both trainers' report to the new Θ in both shared memories "
        "(report, pull, encode, upload, merge, Nesterov, download, decode), real syncer and link "
        "processes, scripted trainers. Gloo: all_reduce in fp32 and the same Nesterov on each rank; "
        "lossy formats do not compute the same numbers. Before each measured sync of ours, "
        "one runs that is not part of the ratio, because our connections were idle while gloo and the "
        "other variants ran; gloo's connections are never idle for so long. Link floor: "
        "the larger direction's bytes at the link's rate plus one round trip."
    )
    if not goals:
        print("\n\n".join(parts))
        return 0
    write_results(
        "outer_sync", "A full outer sync against gloo all_reduce", "\n\n".join([note, *parts]),
        packages=("grpcio", "torch", "numpy", "numba"),
    )  # fmt: skip
    return judge(goals)


if __name__ == "__main__":
    raise SystemExit(main())
