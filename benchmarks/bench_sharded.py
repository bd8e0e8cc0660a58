"""
What each rank of a learner copies, holds and takes from training: `python benchmarks/bench_sharded.py [--quick]`.

Real processes: the syncer, the ranks of one learner on gloo, its link. The ranks train a stack of linear layers with
FSDP2 or DistributedDataParallel; R = 1 is a learner of one process. Bytes are those of the parts of host copies and
results that a rank copies, per copy of a fragment; host memory is what the shared memory occupies, divided by R; time
is processor time of the training thread in `learner.step()`, which other work on the machine changes little. Each case
runs at two widths: steps that copy as many fragments differ only in bytes, so the difference gives the time per MB, and
the rest is a fixed part. Goals: bytes and host memory fall as 1/R within 15 %, and so does the time per MB of FSDP2;
of DDP, whose ranks read whole results, it falls as the bytes do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _job import learner_environment, syncer
from _timing import judge, table, write_results
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco.spec import RunSpec
from diloco_worker import Learner

FRAGMENTS = 24
SKIPPED = 10
"""First steps, which find cold caches and make the pages of the host copies."""
RANKS = (1, 2, 4)
NAMES = {"alone": "none", "fsdp": "FSDP2", "ddp": "DDP"}
WIDER = 2
"""The second width, as a multiple of the first."""

Kind = tuple[int, int]
"""Copies and results of a step."""


def main() -> int:
    """Measure every case, or be one rank of a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model; writes nothing")
    parser.add_argument("--rank-of", choices=["alone", "fsdp", "ddp"], help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=768, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=60, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of, width=options.width, steps=options.steps)
        return 0
    width, steps = (64, 30) if options.quick else (options.width, options.steps)
    cases = [("alone", 1), *((how, ranks) for how in ("fsdp", "ddp") for ranks in RANKS[1:])]
    found = {case: measure(*case, width=width, steps=steps) for case in cases}
    wider = {case: measure(*case, width=WIDER * width, steps=steps) for case in cases}
    times = {case: split(found[case], wider[case]) for case in cases}
    base = found["alone", 1]
    rows = [row(how, ranks, found[how, ranks], base) for how, ranks in cases]
    header = [
        "sharding", "R", "out, MB", "of 1/R", "in, MB", "held", "host memory, MB", "of 1/R", "step() ms, rank 0",
        "other ranks", "copies per step",
    ]  # fmt: skip
    split_header = [
        "sharding", "R", "steps with", "fixed ms, rank 0", "other ranks", "ms per MB of fragments", "of 1/R",
        "bytes, of 1/R", "of its bytes",
    ]  # fmt: skip
    split_rows = [
        split_row(how, ranks, times[how, ranks], times["alone", 1]) for how, ranks in cases
    ]
    body = f"""{FRAGMENTS} linear layers of {width} × {width}, {FRAGMENTS} fragments, τ = 2, {steps} steps.

- *out*: bytes that a rank writes per host copy of a fragment, the mean over ranks and copies; *in*: those that it reads
  per result; *held*: the share of the model that it holds, all of which is read.
- *of 1/R*: as a multiple of the value for one process divided by R.
- *step()*: median processor time of the training thread.

{table(header, rows)}

What several ranks hold (DDP) is divided among them to be copied out, and read by each of them.

The time of `step()` has a part for each MB of the fragments that the learner copies, and a fixed one, in rank 0 larger:
it has the plan, the link and steps.jsonl. From the steps with the same number of copies and results, at {width} and at
{WIDER * width}, medians over steps and means over ranks:

{table(split_header, split_rows)}

- *steps with*: host copies + results, as most steps have.
- *of 1/R*: as a multiple of the value for one process divided by R; *bytes, of 1/R*: those of a rank, likewise.
- *of its bytes*: the first as a multiple of the second."""
    if not options.quick:
        write_results(
            "sharded",
            "Copies, memory and time of the ranks of one learner",
            body,
            packages=("torch",),
        )
    else:
        print(body)
    goals = {
        f"{name} of {how}, R = {ranks}, of 1/R": (float(ratio), 1.15)
        for how, ranks in cases[1:]
        for name, ratio in (
            ("bytes out", ranks * found[how, ranks]["out"] / base["out"]),
            ("host memory", found[how, ranks]["memory"] / base["memory"]),
        )
    }
    if not options.quick:  # whose fragments are too small for a time
        for how, ranks in cases[1:]:
            share, expected = shares(ranks, times[how, ranks], times["alone", 1])
            goals[f"time per MB of {how}, R = {ranks}, of its bytes"] = (share / expected, 1.15)
    return judge(goals, at_most=frozenset(goals))


def row(how: str, ranks: int, found: dict[str, float], base: dict[str, float]) -> list[object]:
    """One row of the table."""
    return [
        NAMES[how], ranks, found["out"] / 1e6,
        ranks * found["out"] / base["out"], found["in"] / 1e6, found["in"] / base["in"],
        found["memory"] / ranks / 1e6, found["memory"] / base["memory"], 1e3 * found["first"],
        1e3 * found["others"] if ranks > 1 else "", found["copies"],
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The time of `step()`, in a fixed part and one per MB."""

    kind: Kind
    """Copies and results of the steps that were compared."""
    fixed: tuple[float, ...]
    """Seconds by rank."""
    per_mb: float
    """Seconds per MB of whole fragments that the learner copies; the mean over ranks."""
    moved: float
    """Bytes that a rank copies for each byte of a whole fragment; the mean over ranks."""


def split(narrow: Mapping[str, Any], wide: Mapping[str, Any]) -> Split:
    """
    Compare steps that copy as many fragments, at two widths.

    Args:
        narrow: what `measure` found at the smaller width.
        wide: at the larger one.
    """
    kind = most_frequent(narrow["times"][0], wide["times"][0])
    fixed, slopes = [], []
    for small, large in zip(narrow["times"], wide["times"], strict=True):
        seconds = [statistics.median(times.get(kind, [math.nan])) for times in (small, large)]
        megabytes = [sum(kind) * found["fragment"] / 1e6 for found in (narrow, wide)]
        slopes.append((seconds[1] - seconds[0]) / (megabytes[1] - megabytes[0]))
        fixed.append(seconds[0] - slopes[-1] * megabytes[0])
    copied = kind[0] * wide["out"] + kind[1] * wide["in"]
    return Split(
        kind=kind, fixed=tuple(fixed), per_mb=statistics.mean(slopes),
        moved=copied / (sum(kind) * wide["fragment"]),
    )  # fmt: skip


def most_frequent(small: Mapping[Kind, list[float]], large: Mapping[Kind, list[float]]) -> Kind:
    """The kind of steps of which both have many; of rank 0, as all ranks do the same at the same step."""
    common = [kind for kind in small.keys() & large.keys() if sum(kind)]
    if not common:
        raise RuntimeError(f"no steps to compare: {sorted(small)} and {sorted(large)}")
    return max(common, key=lambda kind: (min(len(small[kind]), len(large[kind])), kind))


def shares(ranks: int, found: Split, base: Split) -> tuple[float, float]:
    """Time per MB, and bytes, as multiples of those of one process divided by R."""
    return ranks * found.per_mb / base.per_mb, ranks * found.moved / base.moved


def split_row(how: str, ranks: int, found: Split, base: Split) -> list[object]:
    """One row of the table of times."""
    share, expected = shares(ranks, found, base)
    others = 1e3 * statistics.mean(found.fixed[1:]) if ranks > 1 else ""
    return [
        NAMES[how], ranks, f"{found.kind[0]} + {found.kind[1]}", 1e3 * found.fixed[0], others,
        f"{1e3 * found.per_mb:.4f}", share, expected, share / expected,
    ]  # fmt: skip


def measure(how: str, ranks: int, *, width: int, steps: int) -> dict[str, Any]:
    """Train with so many ranks; means over the ranks."""
    spec = RunSpec(
        job="bench", steps=10**9, learners={"r": 1}, fragments=FRAGMENTS, interval=FRAGMENTS
    )
    with tempfile.TemporaryDirectory() as folder, syncer(spec, Path(folder)) as running:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        environment = {
            **os.environ, **learner_environment(spec, "r/0", running.endpoint, running.spec_file),
            "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [
            sys.executable, __file__, "--rank-of", how, "--width", str(width), "--steps", str(steps),
        ]  # fmt: skip
        processes = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=1200)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    replies = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        "out": statistics.mean(reply["out"] for reply in replies),
        "in": statistics.mean(reply["in"] for reply in replies),
        "memory": replies[0]["memory"],
        "first": replies[0]["seconds"],
        "others": statistics.mean(reply["seconds"] for reply in replies[1:] or replies),
        "copies": replies[0]["copies"],
        "fragment": 4 * width**2,
        "times": [by_kind(reply["steps"]) for reply in replies],
    }


def by_kind(steps: Sequence[tuple[float, int, int]]) -> dict[Kind, list[float]]:
    """Seconds of the steps with each number of copies and results."""
    found: dict[Kind, list[float]] = {}
    for seconds, out, into in steps[SKIPPED:]:
        found.setdefault((out, into), []).append(seconds)
    return found


# ---------------------------------------------------------------- one rank


def run_rank(how: str, *, width: int, steps: int) -> None:
    """Train, and print what this rank did as JSON."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(width, width, bias=False) for _ in range(FRAGMENTS))
    )
    ranks = int(os.environ["WORLD_SIZE"])
    if how != "alone":
        distributed.init_process_group("gloo")
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    learner = Learner.connect(model, optimizer, every_rank=None if how == "alone" else True)
    replica = learner._trainer._replica  # type: ignore[attr-defined]
    counts = counted(replica, "try_copy" if how == "alone" else "copy_out")
    done = []
    for _ in range(steps):
        before = counts["out"], counts["in"]
        seconds = step_seconds(model, optimizer, learner, width)
        done.append((seconds, counts["out"] - before[0], counts["in"] - before[1]))
    print(
        json.dumps(
            {
                "out": counts["out_bytes"] / max(1, counts["out"]),
                "in": counts["in_bytes"] / max(1, counts["in"]),
                "copies": counts["out"] / steps,
                "memory": os.fstat(replica.shared.fd).st_blocks * 512,
                "seconds": statistics.median(seconds for seconds, *_ in done[SKIPPED:]),
                "steps": done,
            }
        ),
        flush=True,
    )
    if how != "alone":
        distributed.barrier()
    learner.close()


def step_seconds(
    model: nn.Module, optimizer: torch.optim.Optimizer, learner: Learner, width: int
) -> float:
    """Train one step; processor time of `learner.step()`."""
    loss = model(torch.randn(4, width)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    began = time.thread_time()
    learner.step(tokens=4, loss=loss)
    return time.thread_time() - began


def counted(replica: Any, copy: str) -> dict[str, int]:
    """Count the copies of a replica from now on, and their bytes."""
    counts = dict.fromkeys(("out", "out_bytes", "in", "in_bytes"), 0)
    copier, copy_out, apply = replica._copier, getattr(replica, copy), replica.apply

    def count_out(fragment: int, *arguments: Any) -> Any:
        counts["out"] += 1
        counts["out_bytes"] += sum(pair.view.nbytes for pair in copier.out[fragment][0])
        return copy_out(fragment, *arguments)

    def count_in(fragment: int) -> None:
        counts["in"] += 1
        counts["in_bytes"] += sum(pair.view.nbytes for pair in copier.held[fragment])
        apply(fragment)

    setattr(replica, copy, count_out)
    replica.apply = count_in
    return counts


if __name__ == "__main__":
    sys.exit(main())
