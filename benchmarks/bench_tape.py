"""
What writing a tape costs: `python benchmarks/bench_tape.py [--quick]`.

CPU time of the calling thread, so that a busy machine does not count: the line of one local step, which the training
loop hands to another thread, without a result, with one and with 24, and its bytes on the disk; and the digests of a
fragment of 16.8 M values, beside what the same thread of the link does with it: the delta, its encoding, and its
norms. Goals: 1 kB per step also with 24 results; the line takes less than 0.2 ms; the digests take less than the rest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _timing import judge, table, write_results

from diloco.codec import formats
from diloco.journal.parts import parts
from diloco.model.digests import digests
from diloco.model.fragments import CHUNK, Fragment, Tensor, cut
from diloco_worker.core import trainer as core
from diloco_worker.core.messages import LinkState
from diloco_worker.trainer.tape import Tape

LINE_BYTES = 1000
LINE_SECONDS = 2e-4
SHARE = 1.0
FRAGMENTS = 24
TENSORS, SIDE = 4, 2048


def main() -> None:
    """Print and write the results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true")
    quick = arguments.parse_args().quick
    steps, repeats = (200, 3) if quick else (5000, 9)
    lines = [line_cost(results, steps) for results in (0, 1, FRAGMENTS)]
    rows = [
        [str(n), f"{size:.0f}", f"{1e6 * s:.1f}"]
        for n, (size, s) in zip((0, 1, FRAGMENTS), lines, strict=True)
    ]
    fragment = cut(
        [Tensor(name=f"t{n}", shape=(SIDE, SIDE), dtype="float32") for n in range(TENSORS)],
        num_fragments=1,
    ).fragments[0]
    hashing, encoding = digest_cost(fragment, repeats)
    other = [
        [name, f"{1e3 * hashing:.1f}", f"{1e3 * seconds:.1f}", f"{100 * hashing / seconds:.1f} %"]
        for name, seconds in encoding.items()
    ]
    text = (
        "The line of one local step in `tape.jsonl`: bytes on the disk, and median CPU time of the training loop.\n\n"
        + table(["results applied", "bytes", "CPU µs"], rows)
        + "\n\nDigests of a fragment of 16.8 M values (64 MiB), and the rest of an upload: delta, encoding, norms. "
        "CPU time of one thread of the link.\n\n"
        + table(["format", "digests ms", "rest ms", "digests of the rest"], other)
    )
    print(text)
    goals = {
        "bytes of a line": (max(size for size, _ in lines), LINE_BYTES),
        "µs of a line": (1e6 * max(seconds for _, seconds in lines), 1e6 * LINE_SECONDS),
        "digests, share of the rest": (hashing / min(encoding.values()), SHARE),
    }
    if not quick:
        write_results("tape", "The cost of a tape", text, packages=("numpy", "xxhash"))
    sys.exit(judge(goals, at_most=frozenset(goals)))


def line_cost(results: int, steps: int) -> tuple[float, float]:
    """Bytes and CPU seconds of one line."""
    trainer = core.TrainerCore(
        name="eu/0", fragments=FRAGMENTS, found=None, checkpoint_every=None, connect_timeout_seconds=1.0
    )  # fmt: skip
    trainer.link_state = LinkState(step=100_000, incarnation=100)
    trainer.ledger.versions = [(1, 100_000)] * FRAGMENTS
    trainer.ledger.local_step = 100_000
    actions = [core.ApplyFragment(fragment) for fragment in range(results)]
    with tempfile.TemporaryDirectory() as directory:
        tape, spent = Tape(Path(directory), learner="eu/0", restarts=0), list[float]()
        for _ in range(steps):
            before = time.thread_time()
            tape.step(trainer, actions, seen=100_000)
            spent.append(time.thread_time() - before)
            time.sleep(0.0005)  # as a training step, which lets the other thread write
        tape.close()
        [(_, path)] = parts(Path(directory) / "tape.jsonl")
        return path.stat().st_size / steps, statistics.median(spent)


def digest_cost(fragment: Fragment, repeats: int) -> tuple[float, dict[str, float]]:
    """CPU seconds of the digests, and of the encoding by format."""
    values_N = np.random.default_rng(0).standard_normal(fragment.elements, np.float32)
    base_N = np.zeros_like(values_N)
    buffer = np.empty(formats.encoded_bytes(formats.FP32, CHUNK), np.uint8)
    delta_N, decoded_N = np.empty((2, CHUNK), np.float32)

    def encode(fmt: int) -> None:
        for index in range(fragment.chunks):
            lo, hi = fragment.chunk(index)
            np.subtract(base_N[lo:hi], values_N[lo:hi], out=delta_N)
            size = formats.encode(fmt, delta_N, buffer)
            formats.decode(fmt, buffer[:size], decoded_N)

    hashing = median(lambda: digests(fragment, values_N), repeats)
    kinds = {"BF16": formats.BF16, "INT8": formats.INT8, "INT4": formats.INT4}
    return hashing, {name: median(lambda f=fmt: encode(f), repeats) for name, fmt in kinds.items()}  # type: ignore[misc]


def median(action: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds."""
    action()
    found = []
    for _ in range(repeats):
        before = time.thread_time()
        action()
        found.append(time.thread_time() - before)
    return statistics.median(found)


if __name__ == "__main__":
    main()
