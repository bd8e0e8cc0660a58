"""
What a restart costs in loss, by the state with which the optimizers continue.
`python benchmarks/bench_restart.py [--quick]`.

A learner that restarts later than H global steps after its local checkpoint receives the parameters
from the syncer. Here the parameters are those of step BEGIN of one run without a job, and training
continues for STEPS steps with the optimizers' state of that step, with that of a checkpoint AGE
steps older, and with a new state, on the same batches. Reported is the mean training loss of these
steps, as its difference from that of the first. No time is measured. Goal: the older state is
better than a new one for each optimizer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch
from _timing import judge, table, write_results

from diloco_worker.recipes import config as config_reader
from diloco_worker.recipes import data, gpt, optim

CONFIG = {"layers": 4, "width": 64, "heads": 4, "context": 64, "batch": 8, "threads": 1}
BEGIN, AGE, STEPS = 300, 100, 200
WINDOWS = (10, 50, STEPS)
"""The first steps of which the mean is reported."""
SEEDS = (1, 2, 3)
HEADER = (
    "optimizer", "state of the optimizers", *(f"first {n} steps" for n in WINDOWS), "spread of the last",
)  # fmt: skip

State = tuple[dict[str, Any], list[dict[str, Any]]]


class Training:
    """One training run without a job, on the data of one learner."""

    def __init__(self, optimizer: str, *, seed: int, learner: str = "eu/0") -> None:
        self.config = config_reader.read(gpt.Config, {**CONFIG, "optimizer": optimizer})
        self.seed, self.learner, self.step = seed, learner, 0
        self.corpus = gpt.load_data(self.config)
        self.model = gpt.GPT(self.config, seed=seed)
        self.optimizers = optim.build(
            self.model, self.model.hidden(), optimizer=self.config.optimizer,
            learning_rate=self.config.learning_rate, weight_decay=self.config.weight_decay,
        )  # fmt: skip
        self.fresh = self.state()[1]

    def state(self) -> State:
        """Model and optimizers."""
        return copy.deepcopy(
            (self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers])
        )

    def load(self, model: dict[str, Any], optimizers: list[dict[str, Any]], *, step: int) -> None:
        """Continue at `step`."""
        self.step = step
        self.model.load_state_dict(model)
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    def train(self, steps: int) -> list[float]:
        """The loss of each step, with the learning rate of the end of the warm-up."""
        losses = []
        for self.step in range(self.step + 1, self.step + steps + 1):  # noqa: B020 - it continues
            windows = data.batch(
                self.corpus.train, seed=self.seed, learner=self.learner, step=self.step,
                batch=self.config.batch, context=self.config.context,
            )  # fmt: skip
            loss = gpt.loss_of(self.model, windows, self.config, torch.device("cpu"))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def compare(optimizer: str, *, seed: int, begin: int, age: int, steps: int) -> list[list[float]]:
    """Losses with the exact state, the older one, and a new one."""
    run = Training(optimizer, seed=seed)
    run.train(begin - age)
    _, older = run.state()
    run.train(age)
    model, exact = run.state()
    found = []
    for state in (exact, older, run.fresh):
        run.load(model, state, step=begin)
        found.append(run.train(steps))
    return found


def main() -> int:
    """Measure, write results/restart.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, no results, no goals")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    begin, age, steps = (20, 10, 10) if quick else (BEGIN, AGE, STEPS)
    rows, goals = [], {}
    for optimizer in optim.OPTIMIZERS:
        runs = [
            compare(optimizer, seed=seed, begin=begin, age=age, steps=steps)
            for seed in (SEEDS[:1] if quick else SEEDS)
        ]
        worse: dict[str, list[list[float]]] = {}
        for place, name in ((1, f"{age} steps older"), (2, "new")):
            worse[name] = [
                [
                    statistics.fmean(a - b for a, b in zip(run[place][:n], run[0][:n], strict=True))
                    for n in WINDOWS
                ]
                for run in runs
            ]
            means = [statistics.fmean(column) for column in zip(*worse[name], strict=True)]
            last = [run[-1] for run in worse[name]]
            spread = f"{min(last):+.4f} … {max(last):+.4f}"
            rows.append([optimizer, name, *(f"{mean:+.4f}" for mean in means), spread])
            goals[f"{optimizer}, {name}"] = means[-1]
    body = table(HEADER, rows)
    print(body)
    if quick:
        return 0
    note = (
        f"GPT recipe {CONFIG}; parameters of step {begin}, nats per byte, mean of the seeds "
        f"{', '.join(map(str, SEEDS))}. Above zero: worse than with the state of that step."
    )
    write_results(
        "restart", "The loss after a restart", f"{note}\n\n{body}", packages=("torch",), timed=False
    )
    return judge(
        {
            f"{optimizer}: older state, in parts of the loss of a new one": (
                goals[f"{optimizer}, {age} steps older"] / goals[f"{optimizer}, new"], 1.0
            )
            for optimizer in optim.OPTIMIZERS
        },
        at_most=frozenset(
            f"{optimizer}: older state, in parts of the loss of a new one" for optimizer in optim.OPTIMIZERS
        ),
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
