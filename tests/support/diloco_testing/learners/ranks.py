"""
A learner of several processes, written as docs/learners.md's "A learner of several pods" shows it.

Prints the number of its steps and a hash of its final model as a JSON object.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time

import torch
from torch import distributed, nn

from diloco_testing.learners.linked import make_model
from diloco_worker import Learner

BATCH = 4


def main() -> None:
    """Train until rank 0 is done."""
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if rank > 0:  # rank 0 decides when to end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    learner = Learner.connect(model, optimizer) if rank == 0 else None
    share(model)
    steps = 0
    while not is_done(learner):
        torch.manual_seed(steps * size + rank)
        loss = model(torch.randn(BATCH, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, size)
        optimizer.step()
        if learner is not None:
            learner.step(tokens=BATCH * size, loss=loss)
        share(model)
        steps += 1
        time.sleep(0.01)
    distributed.destroy_process_group()
    print(json.dumps({"rank": rank, "steps": steps, "model": digest(model)}), flush=True)


def share(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    for tensor in model.state_dict().values():
        distributed.broadcast(tensor, src=0)


def is_done(learner: Learner | None) -> bool:
    """Whether rank 0 is done, in every rank."""
    done = torch.tensor(learner is not None and learner.done, dtype=torch.uint8)
    distributed.broadcast(done, src=0)
    return bool(done)


def average_gradients(model: nn.Module, size: int) -> None:
    """Do what DistributedDataParallel does in backward()."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad)
            parameter.grad /= size


def digest(model: nn.Module) -> str:
    """SHA-256 of all tensors of the model."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
