"""
A durable snapshot against `dd conv=fsync`: `python benchmarks/bench_snapshot.py [--quick]`.

About 1 GB in 48 arrays (Θ and momentum of 24 fragments), through the real Store: data, SHA-256 of
every tensor, fsync, rename, manifest, fsync of the directory, deletion of the snapshot before.
`dd` writes as many bytes of zeros to the same disk and hashes nothing. Goal: at least 0.75 of its
speed. Also: how long another Python thread is held up meanwhile, beside the same during dd, when
this process only waits: the difference is ours, the rest is the machine's.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from _timing import judge, paired, spread, table, write_results

from diloco_syncer.storage.capture import Snapshot
from diloco_syncer.storage.store import Store

ROUNDS = 9
GOAL = 0.75
BLOCK_BYTES = 8 << 20
TICK_SECONDS = 0.001


class Pulse:
    """A thread that wakes every millisecond; `longest_seconds` is how late it ever was."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        before = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self.longest_seconds = max(self.longest_seconds, now - before - TICK_SECONDS)
            before = now


def snapshot(megabytes: int) -> Snapshot:
    """48 fp32 arrays of normal values, of sizes that fill no page exactly."""
    rng = np.random.default_rng(0)
    elements = megabytes * 250_000 // 48 - 13
    arrays = {
        f"{kind}.{fragment}": rng.standard_normal(elements, dtype=np.float32)
        for fragment in range(24)
        for kind in ("theta", "momentum")
    }
    return Snapshot(step=48, epoch=1, arrays=arrays, meta={"tokens": 1})


def main() -> int:
    """Measure, write results/snapshot.md, exit 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short, no results file")
    parser.add_argument("--dir", type=Path, help="where to write; default: the temporary folder")
    arguments = parser.parse_args()
    taken = snapshot(128 if arguments.quick else 1060)
    size_bytes = sum(array.nbytes for array in taken.arrays.values())
    root = Path(tempfile.mkdtemp(prefix="bench-snapshot-", dir=arguments.dir))
    store = Store(root / "snapshots", keep=1)
    held_up: dict[str, list[float]] = {"snapshot": [], "dd": []}

    def write() -> None:
        with Pulse() as pulse:
            store.write(taken)
        held_up["snapshot"].append(pulse.longest_seconds)

    def dd() -> None:
        command = ["dd", "if=/dev/zero", f"of={root / 'dd'}", f"bs={BLOCK_BYTES}"]
        command += [f"count={size_bytes}", "iflag=count_bytes", "conv=fsync"]
        with Pulse() as pulse:
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        held_up["dd"].append(pulse.longest_seconds)

    rounds = 3 if arguments.quick else ROUNDS
    try:
        result = paired({"snapshot": write}, dd, rounds=rounds)["snapshot"]
        if store.newest() is None:
            raise RuntimeError("the snapshot that was written does not verify")
    finally:
        shutil.rmtree(root)

    base_seconds = float(np.median(result.base_seconds))
    body = table(
        ["", "GB/s", "ratio to dd", "lowest … highest", "goal"],
        [
            ["dd conv=fsync", size_bytes / base_seconds / 1e9, 1.0, "", ""],
            [
                "durable snapshot",
                size_bytes / result.median_seconds / 1e9,
                result.ratio,
                spread(result.ratios),
                f"≥ {GOAL}",
            ],
        ],
    )
    if arguments.quick:
        print(body)
    else:
        note = (
            f"{size_bytes / 1e9:.2f} GB in 48 arrays, {ROUNDS} rounds, every snapshot between two "
            "runs of dd. Each snapshot is hashed with SHA-256, dd hashes nothing. A Python thread "
            "that wakes every millisecond was late by (median of the runs' longest) "
            f"{_milliseconds(held_up['snapshot'])} during a snapshot and by "
            f"{_milliseconds(held_up['dd'])} during dd, when this process only waits."
        )
        write_results(
            "snapshot",
            "Durable snapshot against dd conv=fsync",
            f"{note}\n\n{body}",
            packages=("numpy",),
        )
    return judge({"snapshot": (result.ratio, GOAL)})


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * float(np.median(seconds)):.1f} ms"


if __name__ == "__main__":
    raise SystemExit(main())
