"""
What a learner takes from training on a GPU: `python benchmarks/bench_device.py [--quick] [--ranks R]`.

Real processes: the syncer, one learner, its link; with --ranks, the learner has R processes with
DistributedDataParallel, each with a GPU of its own; fragments are merged all the time. The learner trains the built-in
GPT in windows that alternate: one calls `learner.step()`, the other does not. Only at the ends of a window the program
waits for the device, so the ratio of tokens/s is what the copies cost, and the time of a call is what the host loses.
Goals: the call takes at most 1 % of a step at 1 B parameters or more, tokens/s are at most 1 % apart, and the loss of a
small model in a job is that on the CPU.

Without a CUDA device there is nothing to measure: it states that and ends; with --quick it runs a tiny
model on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from _job import learner_environment, memory_bytes, syncer
from _timing import judge, table, write_results
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.spec import RunSpec
from diloco_worker import Learner
from diloco_worker.recipes import data, gpt, optim

NO_DEVICE = (
    "bench_device: no CUDA device: torch.cuda.is_available() is False. Run it on a machine with a GPU; with --quick, "
    "it runs on the CPU, which shows only that the benchmark works."
)
LARGE = {
    "layers": 20, "width": 2048, "heads": 16, "context": 1024, "batch": 8, "dtype": "bfloat16", "device": "cuda",
    "optimizer": "AdamW", "learningRate": 1e-4,
}  # fmt: skip
"""1.0 B parameters."""
SMALL = {"layers": 2, "width": 64, "heads": 2, "batch": 8, "threads": 1, "learningRate": 3e-3}
TINY = {**SMALL, "layers": 1, "width": 32, "context": 32, "batch": 2, "optimizer": "AdamW"}
SECONDS = 1200.0
"""The most that one learner may take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one learner does."""

    config: dict[str, Any]
    windows: int
    """Of each kind."""
    steps: int
    """Of a window."""
    fragments: int = 24
    ranks: int = 1


def main() -> int:
    """Measure, write results/device.md, exit 1 if a goal is missed; or be the learner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model; writes nothing")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the learner (1)")
    parser.add_argument("--learner", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        print(json.dumps(run_learner(Plan(**options.learner))))
        return 0
    cuda, ranks = torch.cuda.is_available(), options.ranks
    if cuda and torch.cuda.device_count() < ranks:
        parser.error(f"--ranks {ranks}: {torch.cuda.device_count()} CUDA devices were found")
    if not cuda:
        print(NO_DEVICE, flush=True)
        if not options.quick:
            return 0  # `make bench`: no goal is missed
    device = "cuda" if cuda else "cpu"
    if options.quick:
        large = Plan(
            config={**TINY, "device": device}, windows=2, steps=6, fragments=4, ranks=ranks
        )
        loss_steps = 20
    else:
        large, loss_steps = Plan(config=LARGE, windows=6, steps=30, ranks=ranks), 600
    found = measure(large)
    losses = {}
    for where in dict.fromkeys(("cpu", device)):
        config = {**(TINY if options.quick else SMALL), "device": where}
        small = Plan(config=config, windows=1, steps=loss_steps, fragments=4, ranks=ranks)
        losses[where] = measure(small)["loss"]
    apart = 100 * abs(losses[device] - losses["cpu"]) / losses["cpu"]
    body = report(found, losses, device)
    if options.quick:
        print(body)
        return 0
    topic = "device" if ranks == 1 else f"device_{ranks}_ranks"
    write_results(topic, "What a learner takes from training on a GPU", body, packages=("torch",))
    goals = {
        "learner.step(), % of a step": (found["callPercent"], 1.0),
        "tokens/s, % slower than without": (100 * (1 - found["ratio"]), 1.0),
        "loss of the small model, % from that on the CPU": (apart, 3.0),
    }
    return judge(goals, at_most=frozenset(goals))


def report(found: dict[str, Any], losses: dict[str, float], device: str) -> str:
    """Tables of what was measured."""
    rows = [
        ["parameters", f"{found['parameters'] / 1e9:.3f} B"],
        ["device", found["device"]],
        ["ranks", found["ranks"]],
        ["step, ms (median of the windows)", 1e3 * found["stepSeconds"]],
        ["learner.step(), ms (median)", 1e3 * found["callSeconds"]],
        ["learner.step(), % of a step", found["callPercent"]],
        ["longest learner.step(), ms", 1e3 * found["longestCall"]],
        ["tokens/s without", found["tokensWithout"]],
        ["tokens/s with", found["tokensWith"]],
        ["with / without, median of pairs", f"{found['ratio']:.4f}"],
        ["results applied", found["applied"]],
        ["device memory of the copies, MB, of rank 0", found["deviceBytes"] / 1e6],
        ["memory of the process, MB (peak), of rank 0", found["hostBytes"] / 1e6],
    ]
    small = [[where, f"{loss:.4f}"] for where, loss in losses.items()]
    return (
        f"{table(['', 'on ' + device], rows)}\n\nA small model, in a job of one learner, mean of the last tenth of "
        f"its steps:\n\n{table(['device', 'loss'], small)}"
    )


def measure(plan: Plan) -> dict[str, Any]:
    """Run one learner beside a syncer."""
    spec = RunSpec(
        job="bench", steps=10**6, learners={"r": 1}, fragments=plan.fragments, interval=plan.fragments
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-device-") as folder:
        with syncer(spec, Path(folder)) as running:
            known = learner_environment(spec, "r/0", running.endpoint, running.spec_file)
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = taken.getsockname()[1]
            known |= {
                "WORLD_SIZE": str(plan.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            command = [sys.executable, __file__, "--learner", json.dumps(dataclasses.asdict(plan))]
            processes = [
                subprocess.Popen(
                    command, env={**os.environ, **known, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
                )
                for rank in range(plan.ranks)
            ]  # fmt: skip
            try:
                outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
            finally:
                for process in processes:
                    process.kill()
        for rank, process in enumerate(processes):
            if process.returncode:
                text = f"rank {rank} ended with {process.returncode}: {outputs[rank][-2000:]}"
                raise RuntimeError(text)
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


# ---------------------------------------------------------------- the learner


class Training:
    """The model and its steps."""

    def __init__(self, plan: Plan) -> None:
        self.config = gpt.config_reader.read(gpt.Config, plan.config)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.rank = int(os.environ["RANK"])
        self.device = gpt.device_of(self.config)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.rank)
            self.device = torch.device("cuda", self.rank)
        model = gpt.GPT(self.config, seed=0).to(self.device)
        self.optimizers = optim.build(
            model, model.hidden(), optimizer=self.config.optimizer,
            learning_rate=self.config.learning_rate, weight_decay=self.config.weight_decay,
        )  # fmt: skip
        self.model: nn.Module = model
        if plan.ranks > 1:
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self.model = DistributedDataParallel(model)
        self.corpus = gpt.load_data(self.config)
        self.tokens = self.config.batch * self.config.context * plan.ranks
        self._step = 0

    def step(self) -> torch.Tensor:
        """One step; the loss stays on the device."""
        self._step += 1
        windows = data.batch(
            self.corpus.train, seed=0, learner=f"r/{self.rank}", step=self._step, batch=self.config.batch,
            context=self.config.context,
        )  # fmt: skip
        loss = gpt.loss_of(self.model, windows, self.config, self.device)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def wait(self) -> None:
        """For the device: at the ends of a window alone."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory(self) -> int:
        """Bytes on the device; 0 of a CPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def run_learner(plan: Plan) -> dict[str, Any]:
    """Train in alternating windows, and return what was seen."""
    training = Training(plan)
    before = training.memory()
    every_rank = True if plan.ranks > 1 else None
    learner = Learner.connect(training.model, training.optimizers, every_rank=every_rank)
    device_bytes = training.memory() - before
    calls: list[float] = []
    losses: list[torch.Tensor] = []
    rates: dict[bool, list[float]] = {True: [], False: []}
    window(training, learner, plan.steps, [], losses)  # kernels are compiled and memory is touched
    for _ in range(plan.windows):
        for joined in (False, True):
            seconds = window(training, learner if joined else None, plan.steps, calls, losses)
            rates[joined].append(training.tokens * plan.steps / seconds)
    applied = list(learner._trainer._core.applied)  # type: ignore[attr-defined]
    if plan.ranks > 1:
        distributed.barrier()
    learner.close()
    step_seconds = training.tokens / statistics.median(rates[True])
    tail = losses[-max(1, len(losses) // 10) :]
    pairs = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
    cuda = training.device.type == "cuda"
    return {
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "device": torch.cuda.get_device_name(training.device) if cuda else "CPU",
        "ranks": plan.ranks,
        "stepSeconds": step_seconds,
        "callSeconds": statistics.median(calls),
        "longestCall": max(calls),
        "callPercent": 100 * statistics.median(calls) / step_seconds,
        "tokensWith": statistics.median(rates[True]),
        "tokensWithout": statistics.median(rates[False]),
        "ratio": statistics.median(pairs),
        "applied": sum(applied) - len(applied),
        "loss": statistics.mean(float(loss) for loss in tail),
        "deviceBytes": device_bytes,
        "hostBytes": memory_bytes(os.getpid()),
    }


def window(
    training: Training, learner: Learner | None, steps: int, calls: list[float], losses: list[torch.Tensor]
) -> float:  # fmt: skip
    """So many steps; their seconds."""
    training.wait()
    began = time.perf_counter()
    for _ in range(steps):
        loss = training.step()
        losses.append(loss)
        if learner is not None:
            called = time.perf_counter()
            learner.step(tokens=training.tokens, loss=loss)
            calls.append(time.perf_counter() - called)
    training.wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
