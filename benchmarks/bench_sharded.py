"""
What each rank of a learner copies, holds and takes from training: `python benchmarks/bench_sharded.py [--quick]`.

Real processes: the syncer, the ranks of one learner on gloo, its link. The ranks train a stack of linear layers with
FSDP2 or DistributedDataParallel; R = 1 is a learner of one process. Bytes are those of the parts of host copies and
results that a rank copies, per copy of a fragment; host memory is what the shared memory occupies, divided by R; time
is processor time of the training thread in `learner.step()`, which other work on the machine changes little. Goals:
bytes and host memory fall as 1/R within 15 %.
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


def main() -> int:
    """Measure every case, or be one rank of a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model; writes nothing")
    parser.add_argument("--rank-of", choices=["alone", "fsdp", "ddp"], help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=768, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=40, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of, width=options.width, steps=options.steps)
        return 0
    width, steps = (64, 30) if options.quick else (options.width, options.steps)
    cases = [("alone", 1), *((how, ranks) for how in ("fsdp", "ddp") for ranks in RANKS[1:])]
    found = {case: measure(*case, width=width, steps=steps) for case in cases}
    base = found["alone", 1]
    rows = [row(how, ranks, found[how, ranks], base) for how, ranks in cases]
    header = [
        "sharding", "R", "out, MB", "of 1/R", "in, MB", "held", "host memory, MB", "of 1/R", "step() ms, rank 0",
        "other ranks", "copies per step",
    ]  # fmt: skip
    body = f"""{FRAGMENTS} linear layers of {width} × {width}, {FRAGMENTS} fragments, τ = 2, {steps} steps.

- *out*: bytes that a rank writes per host copy of a fragment, the mean over ranks and copies; *in*: those that it reads
  per result; *held*: the share of the model that it holds, all of which is read.
- *of 1/R*: as a multiple of the value for one process divided by R.
- *step()*: median processor time of the training thread.

{table(header, rows)}

What several ranks hold (DDP) is divided among them to be copied out, and read by each of them. The time of a step has
a fixed part beside the copies, in rank 0 a larger one: it has the plan, the link and steps.jsonl."""
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
    return judge(goals, at_most=frozenset(goals))


def row(how: str, ranks: int, found: dict[str, float], base: dict[str, float]) -> list[object]:
    """One row of the table."""
    return [
        {"alone": "none", "fsdp": "FSDP2", "ddp": "DDP"}[how], ranks, found["out"] / 1e6,
        ranks * found["out"] / base["out"], found["in"] / 1e6, found["in"] / base["in"],
        found["memory"] / ranks / 1e6, found["memory"] / base["memory"], 1e3 * found["first"],
        1e3 * found["others"] if ranks > 1 else "", found["copies"],
    ]  # fmt: skip


def measure(how: str, ranks: int, *, width: int, steps: int) -> dict[str, float]:
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
    }


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
    seconds = [step_seconds(model, optimizer, learner, width) for _ in range(steps)]
    print(
        json.dumps(
            {
                "out": counts["out_bytes"] / max(1, counts["out"]),
                "in": counts["in_bytes"] / max(1, counts["in"]),
                "copies": counts["out"] / steps,
                "memory": os.fstat(replica.shared.fd).st_blocks * 512,
                "seconds": statistics.median(seconds[SKIPPED:]),
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
        counts["out_bytes"] += copier.out_bytes(fragment)
        return copy_out(fragment, *arguments)

    def count_in(fragment: int) -> None:
        counts["in"] += 1
        counts["in_bytes"] += sum(pair.view.nbytes for pair in copier._in[fragment])
        apply(fragment)

    setattr(replica, copy, count_out)
    replica.apply = count_in
    return counts


if __name__ == "__main__":
    sys.exit(main())
