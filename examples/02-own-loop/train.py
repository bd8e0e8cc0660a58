"""
An ordinary PyTorch script: a small recurrent network learns to write Python, byte by byte.

By itself (`python train.py`) it trains for 600 steps (with STEPS=50 in the environment: for 50).
Under `diloco run job.yaml` several copies of it train a common model. (1) to (3) mark the lines that
make this possible.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from diloco_worker import Learner

STEPS = int(os.environ.get("STEPS", "600"))
BATCH, CONTEXT = 32, 64


class ByteGRU(nn.Module):
    """Predicts the next byte; input embedding and output layer share their weights."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte, shape (batch, context, 256)."""
        return self.head(self.memory(self.embedding(x))[0])


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text: the standard library, every 20th file for validation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    validation = b"".join(file.read_bytes() for file in files[::20])
    train = b"".join(file.read_bytes() for i, file in enumerate(files) if i % 20)
    return as_tensor(train), as_tensor(validation)


def as_tensor(data: bytes) -> torch.Tensor:
    """The bytes as an int64 tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def loss_on(model: nn.Module, text: torch.Tensor, seed: int) -> torch.Tensor:
    """Mean cross-entropy (nats per byte) of a random batch that the seed determines."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    text, _ = read_text()
    model = ByteGRU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    learner = Learner.connect(model, optimizer, standalone_steps=STEPS)  # (1)
    while not learner.done:  # (2) was: for step in range(STEPS)
        progress = learner.step_index / learner.total_steps
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - progress)
        loss = loss_on(model, text, seed=learner.index * 10**9 + learner.local_step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        learner.step(tokens=BATCH * CONTEXT, loss=loss)  # (3)
        if learner.local_step % 50 == 0:
            print(f"step {learner.local_step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
