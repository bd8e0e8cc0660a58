"""
Recovery from a peer: its time, its cost to the peer, and the loss after it.
`python benchmarks/bench_recovery.py [--quick] [--parameters N,N]`.

Cost: a real learner (training process, link, syncer) of one thread is asked for the state of its optimizers again and
again, by the real client; each request lies between two times as long without one, and the ratio is that of its steps
per second. The machine has other cores for its link, its writer of checkpoints and the client, as a host with a GPU
has. Goal: at most 2 % (docs/adr/0033).

Loss: two learners train one model, merged by average every INTERVAL steps. At step BEGIN the first restarts with the
merged parameters, and trains STEPS steps on its own data with the optimizers' state that it had, that of the other
learner, its own of AGE steps before, and a new one. Reported is the mean training loss as its difference from that
with the state that it had. Goal: the state of the peer is better than a new one, for each optimizer. AdamW and Muon of
the GPT recipe, as in bench_restart.py.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from _job import json_lines, learner_environment, syncer, wait_for
from _timing import judge, table, write_results
from bench_restart import AGE, BEGIN, HEADER, SEEDS, STEPS, WINDOWS, Training

from diloco.rpc.channels import channel
from diloco.spec import Checkpoint, RunSpec
from diloco.v1 import syncer_pb2 as pb
from diloco.v1.syncer_pb2_grpc import SyncerStub
from diloco_worker.core import events as ev
from diloco_worker.link.peer_client import PeerClient
from diloco_worker.recipes import optim

PARAMETERS = (10_000_000, 100_000_000)
ROUNDS = 9
GOAL = 0.02
INTERVAL = 20
"""Steps between two merges of the comparison of losses."""
WIDTH = 2048
SECONDS = 600.0
"""For a start, or for an answer."""
PEER = "eu/0"

PROGRAM = """
import sys, torch
from diloco_worker import Learner
layers, width, batch = map(int, sys.argv[1:])
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
learner, told = Learner.connect(model, optimizer), ""
while not learner.done:
    loss = model(torch.randn(batch, width)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    learner.step(tokens=batch, loss=loss)
    if learner.step_index and not told:
        # What a request must state, and what no file has before the first checkpoint.
        told = learner._trainer._core.run
        print("identity", told, learner._trainer._replica.layout.digest, flush=True)
learner.close()
"""


# ------------------------------------------------------------------------------ time and cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One request, and the peer's steps per second during it and in as long a time before and after."""

    seconds: float
    bytes: int
    rate: float
    rate_before: float
    rate_after: float

    @property
    def cost(self) -> float:
        """The part of the peer's steps per second that the request took."""
        return 1.0 - 2.0 * self.rate / (self.rate_before + self.rate_after)


class Peer:
    """A learner that trains alone and answers others."""

    def __init__(self, folder: Path, parameters: int, *, width: int) -> None:
        self.layers = max(1, round(parameters / (width * (width + 1))))
        self.elements = self.layers * width * (width + 1)
        self._width, self._folder = width, folder
        self.state = folder / "learner"
        self.address = f"127.0.0.1:{_free_port()}"
        self._endpoint = ""
        self._number = 0
        self._answers: queue.SimpleQueue[ev.PeerAnswered] = queue.SimpleQueue()

    @contextmanager
    def training(self) -> Iterator[Peer]:
        """The processes, once the learner has moments of value and has written a checkpoint."""
        spec = RunSpec(
            job="recovery", steps=10**6, fragments=min(8, 2 * self.layers), interval=24, overlap=2, grace_max_steps=0.0,
            learners={"eu": 2}, learner_checkpoint=Checkpoint(every_steps=10**6, keep=1),
            syncer_checkpoint=Checkpoint(every_steps=10**6, keep=1),
        )  # fmt: skip
        with syncer(spec, self._folder / "run") as serving:
            self._endpoint = serving.endpoint
            own = {
                **learner_environment(spec, PEER, serving.endpoint, serving.spec_file),
                "DILOCO_STATE": str(self.state), "DILOCO_PEER": self.address,
            }  # fmt: skip
            batch = 16
            with (self._folder / "learner.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *map(str, (self.layers, self._width, batch))],
                    env=os.environ | own, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
            try:
                wait_for(
                    lambda: process.poll() is not None or len(self._steps()) > 8, "steps", SECONDS
                )
                if process.poll() is not None:
                    text = (self._folder / "learner.log").read_text()
                    raise RuntimeError(f"the learner ended:\n{text}")
                yield self
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def measure(self, rounds: int) -> list[Recovery]:
        """So many requests, the first thrown away, each between two times of its length without one."""
        first, _, _ = self._ask()
        pause, found = max(2.0, first), []
        for _ in range(rounds):
            time.sleep(pause)
            seconds, bytes_, (begin, end) = self._ask()
            pause = max(2.0, seconds)
            time.sleep(pause)
            before, rate, after = (
                self._rate(lo, hi)
                for lo, hi in ((begin - pause, begin), (begin, end), (end, end + pause))
            )
            found.append(
                Recovery(
                    seconds=seconds, bytes=bytes_, rate=rate, rate_before=before, rate_after=after
                )
            )
        return found

    def _ask(self) -> tuple[float, int, tuple[float, float]]:
        """Seconds, bytes, and begin and end (wall clock) of a request of now."""
        directory = self._folder / "newcomer"
        directory.mkdir(exist_ok=True)
        run, digest = self._identity()
        client = PeerClient(
            job="recovery", learner="eu/1", layout=digest, elements=self.elements, directory=directory, tls=None,
            post=self._answers.put,
        )  # fmt: skip
        self._number += 1
        step = self._global_step()
        begin, start = time.time(), time.perf_counter()
        peer = ev.PeerAddress(PEER, self.address)
        client.ask(ev.AskPeer(number=self._number, peer=peer, step=step, run=run))
        answer = self._answers.get(timeout=SECONDS)
        seconds, end = time.perf_counter() - start, time.time()
        shutil.rmtree(directory)
        if answer.state is None:
            raise RuntimeError(f"the peer sent nothing: {answer.error}")
        return seconds, answer.state.bytes, (begin, end)

    def _identity(self) -> tuple[str, str]:
        """Name of the run and digest of the layout."""
        lines = (self._folder / "learner.log").read_text().splitlines()
        _, run, digest = next(line for line in lines if line.startswith("identity ")).split()
        return run, digest

    def _global_step(self) -> int:
        with channel(self._endpoint, tls=None, purpose="control") as wire:
            return int(SyncerStub(wire).GetStatus(pb.StatusRequest(), timeout=30).step)

    def _steps(self) -> list[float]:
        """When the steps ended, wall clock."""
        path = self.state / "steps.jsonl"
        lines = json_lines(path) if path.exists() else []
        return [datetime.fromisoformat(line["time"]).timestamp() for line in lines]

    def _rate(self, begin: float, end: float) -> float:
        """Steps per second between the last step before `begin` and the first after `end`."""
        wait_for(lambda: (self._steps() or [0.0])[-1] > end, "a step", SECONDS)
        steps = self._steps()
        first = max(i for i, at in enumerate(steps) if at <= begin)
        last = min(i for i, at in enumerate(steps) if at >= end)
        return (last - first) / (steps[last] - steps[first])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cost(parameters: Sequence[int], *, width: int, rounds: int) -> tuple[str, float]:
    """The table of time and cost, and the largest median cost."""
    rows, worst = [], 0.0
    for number in parameters:
        folder = Path(tempfile.mkdtemp(prefix="bench-recovery-"))
        try:
            with Peer(folder, number, width=width).training() as peer:
                found = peer.measure(rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        costs = [each.cost for each in found]
        median = statistics.median(costs)
        worst = max(worst, median)
        idle = statistics.median((each.rate_before + each.rate_after) / 2 for each in found)
        rows.append([
            f"{peer.elements / 1e6:.3g} M", f"{found[0].bytes / 1e6:.0f} MB",
            f"{statistics.median(each.seconds for each in found):.2f} s", f"{idle:.2f}",
            f"{100 * median:+.1f} %", f"{100 * min(costs):+.1f} … {100 * max(costs):+.1f} %",
        ])  # fmt: skip
    head = ("parameters", "state", "time", "steps/s without", "cost to the peer", "spread")
    return table(head, rows), worst


# ------------------------------------------------------------------------------ loss


def merge(learners: Sequence[Training]) -> None:
    """Every model becomes the average."""
    states = [learner.model.state_dict() for learner in learners]
    mean = {
        name: torch.stack([state[name] for state in states]).mean(0) if value.is_floating_point() else value
        for name, value in states[0].items()
    }  # fmt: skip
    for learner in learners:
        learner.model.load_state_dict(mean)


def together(learners: Sequence[Training], steps: int, interval: int) -> None:
    """Train all of them, merged every `interval` steps, after the last one too."""
    for _ in range(steps // interval):
        for learner in learners:
            learner.train(interval)
        merge(learners)


def losses(
    optimizer: str, *, seed: int, begin: int, age: int, steps: int, interval: int
) -> list[list[float]]:
    """Losses with its own state, that of the peer, its own older one, and a new one."""
    own, peer = (Training(optimizer, seed=seed, learner=name) for name in ("eu/0", "us/0"))
    together((own, peer), begin - age, interval)
    _, older = own.state()
    together((own, peer), age, interval)
    model, exact = own.state()
    found = []
    for state in (exact, peer.state()[1], older, own.fresh):
        own.load(model, state, step=begin)
        found.append(own.train(steps))
    return found


def loss_table(*, quick: bool) -> tuple[str, dict[str, tuple[float, float]]]:
    """The table, and for each optimizer what the states of the peer and a new one cost over all steps."""
    begin, age, steps, interval = (20, 10, 10, 10) if quick else (BEGIN, AGE, STEPS, INTERVAL)
    rows, means = [], {}
    for optimizer in optim.OPTIMIZERS:
        runs = [
            losses(optimizer, seed=seed, begin=begin, age=age, steps=steps, interval=interval)
            for seed in (SEEDS[:1] if quick else SEEDS)
        ]
        last = {}
        for place, name in ((1, "of a peer"), (2, f"its own, {age} steps older"), (3, "new")):
            worse = [
                [
                    statistics.fmean(a - b for a, b in zip(run[place][:n], run[0][:n], strict=True))
                    for n in WINDOWS
                ]
                for run in runs
            ]
            mean = [statistics.fmean(column) for column in zip(*worse, strict=True)]
            ends = [row[-1] for row in worse]
            rows.append([
                optimizer, name, *(f"{value:+.4f}" for value in mean), f"{min(ends):+.4f} … {max(ends):+.4f}",
            ])  # fmt: skip
            last[name] = mean[-1]
        means[optimizer] = (last["of a peer"], last["new"])
    return table(HEADER, rows), means


def main() -> int:
    """Measure, write results/recovery.md, exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small and short, no results, no goals"
    )
    parser.add_argument(
        "--parameters", default=",".join(map(str, PARAMETERS)), help="sizes of the model"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.set_num_threads(1)
    parameters = (300_000,) if quick else [int(each) for each in arguments.parameters.split(",")]
    costs, worst = cost(parameters, width=256 if quick else WIDTH, rounds=2 if quick else ROUNDS)
    body, means = loss_table(quick=quick)
    print(costs, body, sep="\n\n")
    if quick:
        return 0
    notes = (
        f"AdamW, H = 24, median of {ROUNDS} requests; time: from the request until the state is verified on disk, "
        "which includes the checkpoint that the peer writes for it.",
        f"GPT recipe as in [restart.md](restart.md), parameters merged at step {BEGIN}, two learners, merged every "
        f"{INTERVAL} steps; nats per byte, mean of the seeds {', '.join(map(str, SEEDS))}. Above zero: worse than with "
        "its own state of that step.",
    )
    text = f"## Time, and cost to the peer\n\n{notes[0]}\n\n{costs}\n\n## Loss after it\n\n{notes[1]}\n\n{body}"
    write_results("recovery", "Recovery from a peer", text, packages=("torch", "numpy"))
    goals = {"cost to the peer, largest median": (worst, GOAL)}
    for optimizer, (of_peer, new) in means.items():
        goals[f"{optimizer}: state of a peer, in parts of the loss of a new one"] = (of_peer / new, 1.0)  # fmt: skip
    return judge(goals, at_most=frozenset(goals))


if __name__ == "__main__":
    raise SystemExit(main())
