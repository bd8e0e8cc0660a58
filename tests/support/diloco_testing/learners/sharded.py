"""
A learner whose ranks hold a part or a replica of a small model, in the way that the first argument names.

Prints as a JSON object what `tests/integration/test_sharded_learner.py` compares: per step the versions that the
model holds, and hashes of what this rank holds at the beginning and at the end. Rank 0 writes its whole final model to
a file. With "late" as third argument, its ranks copy by devices that are late; with "left out" or "twice", rank 1
leaves out the tenth call of `learner.step`, or makes it twice. With "mistaken", every rank loads weights of its own
after `Learner.connect`, and writes its own copy of what it holds to the model after each step; with "mistaken rank",
rank 1 alone does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from diloco_testing.learners.slow_device import SlowDevice
from diloco_worker import Learner
from diloco_worker.trainer import rank_replica

ROWS = 24
"""Divides by each number of data-parallel ranks: they average the means of their rows."""
RATE = 0.1
TOKENS = 10
WRONG_STEP = 10


class Experts(nn.Module):
    """Matrices, each for a share of every row; a rank may hold some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.first = 0

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Sum over the experts that this rank holds."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        mine = shares[:, self.first : self.first + len(weight)]
        return torch.einsum("ni,eio,ne->no", x, weight, mine)


class Mixture(nn.Module):
    """Experts, and the gate that divides rows among them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the experts add to x."""
        return x + self.experts(x, self.gate(x).softmax(-1))


def make_model(how: str = "") -> nn.Sequential:
    """The same in all ranks and learners; no dimension of the last layer divides by 2."""
    torch.manual_seed(1)
    if "experts" in how:
        return nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), Mixture(), nn.Tanh(), nn.Linear(16, 5), nn.LayerNorm(5)
        )
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5), nn.LayerNorm(5)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 6, generator=generator)
    return x, torch.randn(ROWS, 5, generator=generator)


def distribute_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Each rank of the mesh gets its experts, and the rows of all ranks, as torchtitan's ExpertParallel does."""

    def partition(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))

    def gather(module: nn.Module, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        return tuple(all_gather_tensor_autograd(rows, 0, device_mesh) for rows in inputs)

    def scatter(module: nn.Module, output: torch.Tensor, device_mesh: DeviceMesh) -> torch.Tensor:
        return reduce_scatter_tensor_autograd(output, "sum", 0, device_mesh)

    distribute_module(experts, mesh, partition, gather, scatter)
    experts.first = mesh.get_local_rank() * len(experts.weight.to_local())


def wrapped(model: nn.Sequential, how: str, size: int) -> tuple[nn.Module, int, int]:
    """The model, this rank's place among the data-parallel ones, and their number."""
    if how == "alone":
        return model, 0, 1
    rank = distributed.get_rank()
    if how == "other" and rank == 1:
        return model[:4], rank, size
    if how == "own experts" and rank == 1:
        nn.init.normal_(model[2].experts.weight)
    if how == "experts":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replica", "expert"))
        distribute_experts(model[2].experts, mesh["expert"])
        fully_shard(model[2].experts, mesh=mesh["replica"])
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        return model, rank, size
    if how == "ddp":
        return DistributedDataParallel(model), rank, size
    if how in ("plain", "other", "own experts"):  # gradients are averaged by hand
        return model, rank, size
    if how == "other mesh" and rank == 1:
        mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    elif how in ("fsdp", "absent", "other mesh"):
        mesh = init_device_mesh("cpu", (size,))
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, both["tensor"], plan)
        mesh, size = both["data"], size // 2
        rank = both.get_local_rank("data")
    for index in (0, 2, 4):
        fully_shard(model[index], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, rank, size


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, part: int, parts: int):
    """One step on this rank's rows."""
    x, y = (rows.chunk(parts)[part] for rows in batch(step))
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    return loss


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def local_parts(model: nn.Module) -> list[torch.Tensor]:
    """What this rank holds."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]


def digest(tensors) -> str:
    """SHA-256 of the values."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(np.ascontiguousarray(tensor.detach().numpy()).tobytes())
    return found.hexdigest()


class LateDevice:
    """Lets this rank copy by a device that is late, although it trains on the CPU."""

    def __init__(self, rank: int) -> None:
        self.device, self.chance = SlowDevice(rank), random.Random(rank)
        rank_replica.replica_of = lambda *arguments: rank_replica.RankReplica(
            *arguments, device=self.device
        )

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """For `learner.step`. The next step of the training changes the parameters at once."""
        with self.device.no_waiting, self.device.unguarded():
            yield
            self.device.finish_training()
        self.device.pass_time(self.chance.choice((0, 20, 100, 400)))


def calls(step: int, rank: int) -> int:
    """How often this rank calls `learner.step` after its optimizer step of this number."""
    if rank == 0 or step != WRONG_STEP:
        return 1
    return 0 if "left out" in sys.argv[3:] else 2 if "twice" in sys.argv[3:] else 1


class Master:
    """Weights of a program's own, as in fp32 beside a model in bf16: copies of what this rank holds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})
        self.own = [part.detach().clone() for part in local_parts(model)]

    def step(self) -> None:
        """Train them, and write them to the model."""
        parts = zip(self.own, local_parts(self.model), self.model.parameters(), strict=True)
        with torch.no_grad():
            for own, part, parameter in parts:
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                part.copy_(own.add_(local, alpha=-RATE))


def is_mistaken(rank: int) -> bool:
    """Whether this rank has weights of its own."""
    return "mistaken" in sys.argv[3:] or ("mistaken rank" in sys.argv[3:] and rank == 1)


def main() -> None:
    """Train until the learner is done."""
    how, out = sys.argv[1], Path(sys.argv[2])
    rank, size = 0, 1
    if how != "alone":
        distributed.init_process_group("gloo")
        rank, size = distributed.get_rank(), distributed.get_world_size()
    model, part, parts = wrapped(make_model(how), how, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    if how == "absent" and rank == 1:
        time.sleep(3600)
    patience = {"connect_timeout_seconds": 5.0} if how == "absent" else {}
    beside = LateDevice(rank).step if "late" in sys.argv[3:] else contextlib.nullcontext
    learner = Learner.connect(model, optimizer, **patience)
    began = digest(local_parts(model))
    master = Master(model) if is_mistaken(rank) else None
    log: list[object] = []
    step = 0
    while not learner.done:
        loss = train(model, optimizer, learner.local_step + 1, part, parts)
        if how == "plain":
            for parameter in model.parameters():
                distributed.all_reduce(parameter.grad)
                parameter.grad /= parts
        if how == "experts":  # they have the rows of two ranks, of which each has the mean
            model[2].experts.weight.grad /= 2
        optimizer.step()
        if master is not None:
            master.step()
        step += 1
        for _ in range(calls(step, rank)):
            with beside():
                learner.step(tokens=TOKENS, loss=loss)
        log.append(
            [learner.local_step, [v and v[1] for v in learner._trainer._core.ledger.versions]]
        )
        time.sleep(0.01)
    whole = {name.removeprefix("module."): full(p) for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(whole, out)
    found = {
        "rank": rank, "log": log, "began": began, "held": digest(local_parts(model)),
        "whole": digest(whole.values()),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    if how != "alone":
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
