"""
The merge against memcpy: `python benchmarks/bench_merge.py [--quick]`.

One thread, fp32 deltas, through the real FragmentMerge: every chunk of every member is added, Σ v²
is checked, the outer step made, the result encoded and packed as downloads send it. Share = traffic
that must happen (M + 4 streams as long as the fragment: deltas, Θ and momentum in, Θ and momentum
out) per second, as a part of the traffic (2 streams) that memcpy makes per second.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from _timing import Paired, Run, judge, paired, spread, table, write_results

from diloco.codec import formats, frames
from diloco.model.fragments import Fragment, Slot, Tensor
from diloco.runtime import malloc
from diloco_syncer.core.contribution import Contribution
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.merging.buffers import Buffers
from diloco_syncer.merging.streaming import F32, FragmentMerge

OUTER = OuterOptimizer(learning_rate=0.7, momentum=0.5, nesterov=True)
TENSOR = 4 << 20
"""Elements of one tensor: 16 MiB."""
ROUNDS = 9
MUST = {"Average": 0.60, "Radial": 0.30}
SIZES = {4: 256, 8: 128}
"""Members → MiB of the fragment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything a merge needs, made before the clock runs."""

    fragment: Fragment
    theta_N: F32
    momentum_N: F32
    deltas: tuple[F32, ...]
    contributions: tuple[Contribution, ...]
    payloads: tuple[tuple[memoryview, ...], ...]


def case(num_members: int, mib: int) -> Case:
    """A fragment of 16 MiB tensors and the uploads of all members, in packed messages."""
    elements = mib << 18
    slots = tuple(
        Slot(
            tensor=Tensor(name=f"t{start:012}", shape=(TENSOR,), dtype="float32"),
            offset=start,
            average=False,
        )
        for start in range(0, elements, TENSOR)
    )
    fragment = Fragment(index=0, slots=slots)
    rng = np.random.default_rng(0)
    deltas = tuple(
        rng.standard_normal(elements, dtype=np.float32) * np.float32(1e-3)
        for _ in range(num_members)
    )
    messages = [
        [
            frames.pack(frames.Kind.CHUNK, i, delta_N[slice(*fragment.chunk(i))])
            for i in range(fragment.chunks)
        ]
        for delta_N in deltas
    ]
    return Case(
        fragment=fragment,
        theta_N=rng.standard_normal(elements, dtype=np.float32),
        momentum_N=rng.standard_normal(elements, dtype=np.float32),
        deltas=deltas,
        contributions=tuple(
            Contribution(
                learner=f"region/{m}",
                incarnation=1,
                round=1,
                attempt=1,
                local_step=1,
                steps=1 + m,
                tokens=1 + m,
                base=(1, 0),
                format=formats.FP32,
                norms=tuple(formats.slot_norms(fragment, delta_N)),
            )
            for m, delta_N in enumerate(deltas)
        ),
        payloads=tuple(tuple(frames.unpack(m).payload for m in mine) for mine in messages),
    )


def streaming(this: Case, merge: str, down: int, buffers: Buffers | None) -> Run:
    """The real merge, chunk by chunk."""

    def run() -> None:
        running = FragmentMerge(
            fragment=this.fragment,
            theta_N=this.theta_N,
            momentum_N=this.momentum_N,
            contributions=this.contributions,
            merge=merge,
            outer=OUTER,
            down=down,
            window=16,
            buffers=buffers,
        )
        for index in range(this.fragment.chunks):
            for contribution, payloads in zip(this.contributions, this.payloads, strict=True):
                running.add(contribution.learner, index, payloads[index])
        if not running.finished:
            raise RuntimeError("the merge did not finish")

    return run


def naive_torch(this: Case, merge: str) -> Run:
    """What one writes first: whole tensors, one torch expression after the other, one thread."""
    import torch

    torch.set_num_threads(1)
    deltas = [torch.from_numpy(d) for d in this.deltas]
    theta, momentum = torch.from_numpy(this.theta_N), torch.from_numpy(this.momentum_N)
    total = sum(c.weight for c in this.contributions)
    shares = [c.weight / total for c in this.contributions]

    def outer(here: slice, delta: torch.Tensor) -> None:
        buf = OUTER.momentum * momentum[here] + delta
        _ = theta[here] - OUTER.learning_rate * (delta + OUTER.momentum * buf)

    def average() -> None:
        outer(slice(None), sum(w * d for w, d in zip(shares, deltas, strict=True)))

    def radial() -> None:
        for slot in this.fragment.slots:
            here = slice(slot.offset, slot.end)
            parts = [d[here] for d in deltas]
            norms = [p.norm() for p in parts]
            u = sum(w * p / n for w, p, n in zip(shares, parts, norms, strict=True))
            outer(here, u / u.norm() * sum(w * n for w, n in zip(shares, norms, strict=True)))

    return average if merge == "Average" else radial


def variants(this: Case) -> list[dict[str, Run]]:
    """
    Every merge beside its naive form, in groups that are timed one after the other.

    In one group they would disturb each other's heap: what one frees, the kernel takes back, and
    the next pays for fresh pages. A syncer does one thing all the time.
    """
    buffers = Buffers()
    return [
        {merge: streaming(this, merge, formats.BF16, buffers) for merge in MUST},
        {
            f"{merge}, result in fp32": streaming(this, merge, formats.FP32, buffers)
            for merge in MUST
        },
        {f"{merge}, fresh buffers": streaming(this, merge, formats.BF16, None) for merge in MUST},
        {f"{merge}, naive torch": naive_torch(this, merge) for merge in MUST},
    ]


def cpu_seconds(run: Callable[[], object]) -> Run:
    """Time by the clock of the one thread: what else runs on the machine does not count."""

    def timed() -> float:
        start = time.thread_time()
        run()
        return time.thread_time() - start

    return timed


def measure(num_members: int, mib: int, rounds: int) -> tuple[list[list[object]], dict[str, float]]:
    """Rows of the table, and the share of each variant."""
    this = case(num_members, mib)
    target_N = np.ones_like(this.theta_N)
    memcpy = cpu_seconds(lambda: np.copyto(target_N, this.theta_N))
    results: dict[str, Paired] = {}
    for group in variants(this):
        timed = {name: cpu_seconds(run) for name, run in group.items()}
        results |= paired(timed, memcpy, rounds=rounds)
    factor = (num_members + 4) / 2
    rows: list[list[object]] = []
    shares = {name: factor * r.ratio for name, r in results.items()}
    for name, r in results.items():
        must = MUST.get(name)
        rows.append(
            [
                num_members,
                f"{mib} MiB",
                name,
                f"{1e3 * r.median_seconds:.0f}",
                shares[name],
                spread([factor * ratio for ratio in r.ratios]),
                f"≥ {must:.2f}" if must else "",
            ]
        )
    return rows, shares


def main() -> int:
    """Measure, write results/merge.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small and short, half the goals, no file"
    )
    quick = parser.parse_args().quick
    malloc.tune_malloc()
    rows: list[list[object]] = []
    goals: dict[str, tuple[float, float]] = {}
    for num_members, mib in SIZES.items():
        mib = 32 if quick else mib
        more, shares = measure(num_members, mib, 3 if quick else ROUNDS)
        rows += more
        for name, must in MUST.items():
            goals[f"{name}, M = {num_members}"] = (shares[name], must / 2 if quick else must)
        gc.collect()
    body = table(["M", "fragment", "merge", "ms", "share", "lowest … highest", "goal"], rows)
    if quick:
        print(body)
    else:
        note = (
            "fp32 deltas, tensors of 16 MiB, outer step with Nesterov momentum, result in bf16 "
            f"unless noted; CPU time of one thread, {ROUNDS} rounds, every run between two memcpy of a fragment. "
            "Share: (M + 4) streams per second of the merge by 2 streams per second of memcpy. "
            "Fresh buffers: the two new vectors come from the kernel instead of `Buffers`. "
            "Naive torch neither encodes the result nor checks anything."
        )
        write_results(
            "merge",
            "Merge against memcpy",
            f"{note}\n\n{body}",
            packages=("numpy", "numba", "torch"),
        )
    return judge(goals)


if __name__ == "__main__":
    raise SystemExit(main())
