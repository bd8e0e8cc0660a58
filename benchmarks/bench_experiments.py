"""
Steps per second of an experiment's cell against plain training of one model:
`python benchmarks/bench_experiments.py [--quick]`.

All times are processor time of this process, with one thread. Plain training is the loop of the recipe. Its
baseline runs before and after each variant.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _timing import Run, paired, spread, table, write_results

from diloco.spec import RunSpec
from diloco_experiment import models
from diloco_experiment.cells import run
from diloco_experiment.gradients import gradients
from diloco_experiment.scenarios import Scenario
from diloco_experiment.tasks import Checks, Method, Task, task_of
from diloco_worker.recipes import gpt

SIZES: dict[str, dict[str, Any]] = {
    "1 layer of 32, 2 × 32 bytes": {
        "layers": 1, "width": 32, "heads": 2, "context": 32, "batch": 2,
    },
    "2 layers of 64, 8 × 64 bytes": {
        "layers": 2, "width": 64, "heads": 2, "context": 64, "batch": 8,
    },
    "4 layers of 128, 16 × 128 bytes (the example)": {
        "layers": 4, "width": 128, "heads": 4, "context": 128, "batch": 16,
    },
}  # fmt: skip
LEARNERS = 4
ROUNDS = 2


def task(config: dict[str, Any], steps: int, method: Method, checks: Checks) -> Task:
    """Four learners of one config."""
    fragments = min(24, 6 * config["layers"] + 2)
    spec = RunSpec(
        job="bench", steps=steps, seed=1, recipe="gpt", learners={"r": LEARNERS},
        fragments=fragments, interval=fragments, overlap=2,
    )  # fmt: skip
    names = [(f"r/{index}", {**config, "validationTokens": 1024}) for index in range(LEARNERS)]
    return task_of(method, spec, names, Scenario(), evaluate_every=steps, checks=checks)


def plain(config: dict[str, Any], steps: int) -> float:
    """Seconds per step of one model."""
    began = time.process_time()
    gpt.train(models.config_of(config), seed=1, steps=steps)
    return (time.process_time() - began) / steps


def cell(of: Task, batched: bool) -> float:
    """Seconds per step of a learner."""
    models.BATCHED_TOKENS, models.BATCHED_LEARNERS = (1 << 30, 1) if batched else (0, 1)
    began = time.process_time()
    result = run(of)
    if result.detail:
        raise RuntimeError(result.detail)
    return (time.process_time() - began) / result.local_steps


def variants(config: dict[str, Any], steps: int) -> dict[str, Callable[[], float]]:
    """Name → seconds per step of a learner."""
    make = partial(task, config, steps)
    return {
        "Decoupled": partial(cell, make(Method.DECOUPLED, Checks.LIGHT), False),
        "Decoupled, batched": partial(cell, make(Method.DECOUPLED, Checks.LIGHT), True),
        "Decoupled, all checks": partial(cell, make(Method.DECOUPLED, Checks.ALL), False),
        "DiLoCo": partial(cell, make(Method.DILOCO, Checks.LIGHT), False),
        "Synchronous": partial(cell, make(Method.SYNCHRONOUS, Checks.LIGHT), False),
    }


def measured(steps_of: Callable[[int], int], rounds: int) -> str:
    """The table."""
    rows = []
    run(
        task({**next(iter(SIZES.values()))}, 40, Method.DECOUPLED, Checks.ALL)
    )  # loads every kernel
    for number, (name, config) in enumerate(SIZES.items()):
        steps = steps_of(number)
        runs: dict[str, Run] = dict(variants(config, steps))
        base = partial(plain, config, steps)
        found = paired(runs, base, rounds=rounds, warmup=0)
        for variant, times in found.items():
            alone = statistics.median(times.base_seconds)
            print(name, variant, f"{times.ratio:.2f}", flush=True)
            rows.append(
                [
                    name, variant, f"{1 / alone:.1f}", f"{1 / times.median_seconds:.1f}",
                    f"{times.ratio:.2f}", spread(times.ratios),
                ]
            )  # fmt: skip
    head = [
        "model, batch of a learner", "cell of four learners", "plain training, steps/s",
        "cell, learner steps/s", "cell / plain", "lowest … highest",
    ]  # fmt: skip
    return table(head, rows)


def in_one_call() -> str:
    """Gradients of several models in one call against one by one."""
    rows = []
    for layers, width, context, batch in ((1, 32, 32, 2), (1, 32, 32, 4), (2, 64, 64, 8)):
        config = models.config_of(
            {"layers": layers, "width": width, "heads": 2, "context": context, "batch": batch}
        )
        for count in (2, 4, 8):
            of = [gpt.GPT(config, seed=0) for _ in range(count)]
            windows = [np.full((batch, context + 1), 65) for _ in range(count)]
            calls = max(1, 8000 // (batch * context * count))
            together = partial(timed, calls, lambda: gradients(of, windows, config))  # noqa: B023
            alone = partial(
                timed, calls,
                lambda: [gradients([m], [w], config) for m, w in zip(of, windows, strict=True)],  # noqa: B023
            )  # fmt: skip
            (found,) = paired({"": together}, alone, rounds=ROUNDS).values()
            size = f"{layers} × {width}, {batch * context} tokens"
            rows.append([size, count, f"{found.ratio:.2f}", spread(found.ratios)])
    return table(["model, tokens of a step", "learners", "speed", "lowest … highest"], rows)


def timed(calls: int, work: Callable[[], object]) -> float:
    """Seconds of processor time of so many calls."""
    began = time.process_time()
    for _ in range(calls):
        work()
    return time.process_time() - began


def main() -> int:
    """Measure and write the results file."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true", help="seconds; writes nothing")
    given = flags.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_bytes(bytes(32 + (i * i) % 90 for i in range(200_000)))
        for config in SIZES.values():
            config["data"] = str(text)
        if given.quick:
            print(measured(lambda number: (40, 10, 1)[number], 1))
            return 0
        body = measured(lambda number: (100, 20, 3)[number], ROUNDS)
        body += (
            "\n\n## Gradients of several learners in one call, against one by one\n\n"
            + in_one_call()
        )
    write_results(
        "experiments", "A cell of an experiment against plain training",
        "Processor time of one thread; a learner step is one step of one of the four learners, with its "
        "share of the merges, the bytes on the simulated wire, the syncer and one evaluation. `batched`: the "
        f"gradients of all learners in one call. {ROUNDS} rounds. "
        f"{os.cpu_count()} cores run as many cells at a time.\n\n"
        + body,
        packages=("torch", "numpy", "numba"),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
