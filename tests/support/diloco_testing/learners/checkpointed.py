"""
A learner of one process or of several ranks that states the state of its optimizer and what it keeps.

Each line of a file is a JSON object: what the rank has when it connected, and after each step; whole tensors, not its
shards. Arguments: how the model is sharded, the start of the files' names, and options.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from diloco_testing.learners.sharded import full, wrapped
from diloco_worker import Learner

ROWS = 24
TOKENS = 10
SMALL_FROM = 5
"""Local step from which --small-disk=RANK lets this rank write only files of at most FILE_BYTES."""
FILE_BYTES = 8 << 20
"""More than the memory that the ranks share, which is a file as well, and less than what this rank keeps."""
WIDTH = 160
"""Of the widest layer: its matrix is divided among ranks that all hold it."""


class Position:
    """Where this rank is in its data."""

    def __init__(self, *, ballast_bytes: int = 0) -> None:
        self.read, self._ballast = 0, torch.zeros(ballast_bytes, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"read": self.read, "ballast": self._ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self.read = state["read"]


def make_model() -> nn.Sequential:
    """The same in all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5), nn.LayerNorm(5),
    )  # fmt: skip


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of each whole tensor of the optimizer's state."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            data = np.ascontiguousarray(full(value).numpy()).tobytes()
            found[f"{name.removeprefix('module.')}/{key}"] = hashlib.sha256(data).hexdigest()
    return found


def main() -> None:
    """Train until the learner is done."""
    how, out, *options = sys.argv[1:]
    rank, size = 0, 1
    if how != "alone":
        distributed.init_process_group("gloo")
        rank, size = distributed.get_rank(), distributed.get_world_size()
    model, part, parts = wrapped(make_model(), how, size)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if "--other-optimizer" in options:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    lines = open(f"{out}-{rank}.jsonl", "w")  # noqa: SIM115 - to the end
    learner = Learner.connect(model, optimizer)
    small = f"--small-disk={rank}" in options
    position = Position(ballast_bytes=2 * FILE_BYTES if small else 0)
    learner.keep(position=position)

    def show(**facts: object) -> None:
        # With collectives: all ranks call it.
        state = digests(model, optimizer)
        line = {"localStep": learner.local_step, "state": state, "read": position.read, **facts}
        print(json.dumps(line), file=lines, flush=True)

    show(resumed=learner.resumed, draw=torch.rand(()).item())
    while not learner.done:
        generator = torch.Generator().manual_seed(learner.local_step)
        x, y = (torch.randn(ROWS, n, generator=generator).chunk(parts)[part] for n in (6, 5))
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.rand(())  # the random state is one of this step
        position.read += 1 + rank
        if small and learner.local_step == SMALL_FROM:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
        learner.step(tokens=TOKENS, loss=loss)
        show(draw=torch.rand((), generator=after()).item())
        time.sleep(0.01)
    if how != "alone":
        distributed.destroy_process_group()


def after() -> torch.Generator:
    """What torch would draw next."""
    return torch.Generator().set_state(torch.get_rng_state())


if __name__ == "__main__":
    main()
