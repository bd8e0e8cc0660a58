"""
The processes of a learner of several ranks, and what one process without sharding would train.

The reference makes the steps that the learner reports on the same data, merges what the syncer merged, and applies
each result at the step at which the learner did.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from diloco.model.fragments import Tensor, cut
from diloco_syncer.core.outer import OuterOptimizer
from diloco_testing.learners import sharded
from diloco_testing.syncers.process import RealSyncer

SUPPORT = Path(__file__).parents[2]
SECONDS = 500.0
TOLERANCE = 2e-5
"""Ranks add gradients in another order than one process does: rounding of fp32, over all steps."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Ranks:
    """The processes of one learner, as torchrun would start them; a context manager."""

    def __init__(
        self, folder: Path, syncer: RealSyncer, how: str, size: int, *, name="eu/0", more=(),
        variables: Mapping[int, Mapping[str, str]] | None = None,
        started: Callable[[int], Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self.out = folder / f"{name.replace('/', '-')}.pt"
        spec = folder / "learner-spec.json"
        spec.write_text(syncer.spec.to_json())
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
            "DILOCO_JOB": "j", "DILOCO_LEARNER": name, "DILOCO_SYNCER": syncer.endpoint, "DILOCO_SPEC": str(spec),
            "DILOCO_STATE": str(folder / name), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        program = ["-m", "diloco_testing.learners.sharded", how, str(self.out), *more]
        self.processes = [
            subprocess.Popen(
                [*started(rank), *program] if started else [sys.executable, *program],
                env={
                    **environment, "RANK": str(rank), "LOCAL_RANK": str(rank), **(variables or {}).get(rank, {}),
                },
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def results(self, *, each: int = 1) -> list[dict]:
        """What each rank prints at its end; `each` of them per process."""
        outputs = [process.communicate(timeout=SECONDS) for process in self.processes]
        codes = [process.returncode for process in self.processes]
        assert codes == [0] * len(codes), [error for _, error in outputs]
        lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
        assert len(lines) == each * len(outputs), outputs
        return [json.loads(line) for line in lines]

    def ended(self) -> list[tuple[int, str]]:
        """Exit code and standard error of each rank."""
        outputs = [process.communicate(timeout=SECONDS) for process in self.processes]
        return [
            (p.returncode, error) for p, (_, error) in zip(self.processes, outputs, strict=True)
        ]


def layout_of(model: torch.nn.Module, fragments: int):
    tensors = [
        Tensor(name=name, shape=tuple(p.shape), dtype="float32")
        for name, p in model.named_parameters()
    ]
    return cut(tensors, num_fragments=fragments)


class Reference:
    """One process with the data of all ranks."""

    def __init__(self, syncer: RealSyncer, log: list, how: str = "") -> None:
        self.model = sharded.make_model(how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=sharded.RATE)
        self.parameters = dict(self.model.named_parameters())
        layout = layout_of(self.model, syncer.spec.fragments)
        self.names = [[slot.tensor.name for slot in f.slots] for f in layout.fragments]
        self.outer = OuterOptimizer(
            learning_rate=syncer.spec.outer_learning_rate, momentum=syncer.spec.outer_momentum,
            nesterov=syncer.spec.outer_nesterov,
        )  # fmt: skip
        self.theta = {n: p.detach().clone() for n, p in self.parameters.items()}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.theta.items()}
        self.versions = [{0: self.part(f)} for f in range(len(self.names))]
        self.merges = [self.merge_of(line) for line in syncer.events("merge")]
        self.copies: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        held = [0] * len(self.names)
        for step, versions in log:
            sharded.train(self.model, self.optimizer, step, 0, 1)
            self.optimizer.step()
            self.merge(step)
            for fragment, version in enumerate(versions):
                if version is not None and version != held[fragment]:
                    held[fragment] = version
                    for name, values in self.versions[fragment][version].items():
                        self.parameters[name].data.copy_(values)

    @staticmethod
    def merge_of(line: dict) -> tuple[int, int, int, int]:
        (member,) = line["members"]
        assert member["base"] is not None
        return line["step"], line["fragment"], member["step"], member["base"]

    def part(self, fragment: int) -> dict[str, torch.Tensor]:
        return {name: self.theta[name].clone() for name in self.names[fragment]}

    def merge(self, step: int) -> None:
        """Every merge that needs no later host copy, in the order of the syncer."""
        for _, fragment, copied, _ in self.merges:
            if copied == step:
                self.copies[step, fragment] = {
                    name: self.parameters[name].detach().clone() for name in self.names[fragment]
                }
        rate, mu, a, b = (float(f) for f in self.outer.factors)
        while self.merges and (self.merges[0][2], self.merges[0][1]) in self.copies:
            version, fragment, copied, base = self.merges.pop(0)
            for name, values in self.copies[copied, fragment].items():
                delta = self.versions[fragment][base][name] - values
                self.momentum[name] = mu * self.momentum[name] + delta
                self.theta[name] -= rate * (a * delta + b * self.momentum[name])
            self.versions[fragment][version] = self.part(fragment)


def largest_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).detach().abs().max()) for name in wanted)
