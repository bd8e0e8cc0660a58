"""
Trains a model: alone with `python train.py`, as a learner of a job with `diloco run job.yaml`.

Replace `Model`, `dataset` and `loss_on` with your own. (1) to (5) make the loop one of a learner.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diloco_worker import Learner, identity

STEPS = 200  # alone; in a job: spec.steps of job.yaml
BATCH = 32
LEARNERS_PER_REGION = 1  # at least regions[].learners of job.yaml: the data has a part for each


class Model(nn.Module):
    """Decides which of two spirals a point of the plane belongs to."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
        )

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Logits of the spirals, shape (batch, 2)."""
        return self.layers(points)


def dataset(*, validation: bool = False) -> TensorDataset:
    """Points on two spirals, and the number of the spiral; those of validation are others."""
    generator = torch.Generator().manual_seed(int(validation))
    spirals = torch.randint(2, (4096,), generator=generator)
    radius = torch.rand(4096, generator=generator)
    angle = 7 * radius + torch.pi * spirals
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return TensorDataset(points + 0.02 * torch.randn(points.shape, generator=generator), spirals)


def loss_on(model: nn.Module, points: torch.Tensor, spirals: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a batch."""
    return F.cross_entropy(model(points), spirals)


def endless(loader: DataLoader[list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def main() -> None:
    """Train."""
    own = identity()
    own.seed_everything()  # (1) dropout and order of the data, different in each learner
    data = own.shard(dataset(), max_learners_per_region=LEARNERS_PER_REGION)  # (2)
    batches = endless(DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    learner = Learner.connect(model, optimizer, standalone_steps=STEPS)  # (3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, learner.total_steps or STEPS)
    schedule = learner.scheduler(schedule)  # follows the job's step, also after a restart
    while not learner.done:  # (4)
        loss = loss_on(model, *next(batches))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        learner.step(tokens=BATCH, loss=loss)  # (5) tokens: any unit of work, here points
        if learner.local_step % 50 == 0:
            print(f"step {learner.local_step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
