"""
Learners of several ranks, each region's with its own sharding, batch size and speed, train one model.

`regions[].config` of job.yaml decides: whether the ranks of a learner hold the whole model (`sharding: ddp`) or a part
of it (`fsdp`), how many windows its batch has, and how much slower it is than this machine. torchrun starts the ranks,
and each of them connects. Alone (`torchrun --standalone --nproc-per-node=2 train.py`) it trains for 300 steps (with
STEPS=50 in the environment: for 50).
"""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco_worker import Learner, identity

STEPS = int(os.environ.get("STEPS", "300"))
CONTEXT, WIDTH, LAYERS = 64, 64, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The keys of `regions[].config`."""

    sharding: str = "fsdp"
    """`ddp`: each rank holds the whole model; `fsdp`: a part of it."""
    batch: int = 16
    """Windows of CONTEXT bytes per step, of all ranks together."""
    slowdown: float = 1
    """Multiplies the duration of every step, for a region with slower hardware."""

    @classmethod
    def of(cls, found: Mapping[str, Any], ranks: int) -> "Config":
        """Read them; a sentence instead of a start with settings that were not meant."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := found.keys() - set(known):
            sys.exit(f"regions[].config: unknown keys {sorted(unknown)}, expected some of {known}")
        config = cls(**found)
        if type(config.batch) is not int or type(config.slowdown) not in (int, float):
            sys.exit(f"regions[].config: {config}, expected numbers for batch and slowdown")
        if config.sharding not in ("ddp", "fsdp"):
            sys.exit(f"regions[].config: sharding is {config.sharding!r}, expected ddp or fsdp")
        if config.batch < ranks or config.batch % ranks:
            sys.exit(
                f"regions[].config: batch is {config.batch}, expected a multiple of {ranks} ranks"
            )
        if not config.slowdown >= 1:
            sys.exit(f"regions[].config: slowdown is {config.slowdown}, expected 1 or more")
        return config


class Layer(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Shape (batch, context, WIDTH)."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, context, 256)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.embedding(x) + self.positions
        for layer in self.layers:
            y = layer(y, mask)
        return self.head(y)


def sharded(model: Model, sharding: str) -> nn.Module:
    """The model over all ranks: a replica in each, or a part in each."""
    if sharding == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def windows(*, validation: bool) -> torch.Tensor:
    """The source of the standard library, as bytes; every 20th file is for validation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 20 == 0) is validation)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    size = CONTEXT + 1
    return data[: len(data) // size * size].view(-1, size)


def loss_on(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    """Train."""
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    own = identity()
    config = Config.of(own.config, ranks)
    torch.manual_seed(0)  # the ranks begin with the same model
    model = sharded(Model(), config.sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    own.seed_everything()  # from here on, another order of the data in each rank
    data = own.shard(windows(validation=False))  # the same for all ranks of a learner

    learner = Learner.connect(model, optimizer, standalone_steps=STEPS)
    if rank == 0:
        kind = type(model).__name__
        print(f"{kind} on {ranks} ranks, {config.batch} windows per step", flush=True)
    while not learner.done:
        began = time.monotonic()
        rows = torch.randint(len(data), (config.batch // ranks,)).tolist()
        loss = loss_on(model, torch.stack([data[row] for row in rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:  # the others wait for it in their next collective
            time.sleep((config.slowdown - 1) * (time.monotonic() - began))
        learner.step(tokens=config.batch * CONTEXT, loss=loss)  # tokens of all ranks
        if rank == 0 and learner.local_step % 50 == 0:
            print(f"step {learner.local_step}: loss {loss.item():.3f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
