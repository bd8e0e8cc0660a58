"""
A small transformer on text with a tokenizer of its own (prepare.py).

Alone (`python train.py`) it trains for 300 steps (with STEPS=50 in the environment: for 50).
"""

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import nn

from diloco_worker import Learner, identity

DATA = Path(__file__).with_name("data")
STEPS = int(os.environ.get("STEPS", "300"))
BATCH, CONTEXT, WIDTH, LAYERS = 16, 64, 96, 2


class Model(nn.Module):
    """Predicts the next token; embedding and output layer share their weights."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, context, vocabulary)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.embedding(x) + self.positions[: x.shape[1]]
        return self.layers(y, mask, is_causal=True) @ self.embedding.weight.T


def build() -> Model:
    """The model for the vocabulary of the tokenizer."""
    return Model(Tokenizer.from_file(str(DATA / "tokenizer.json")).get_vocab_size())


def windows(part: str) -> torch.Tensor:
    """The tokens of `train` or `validation`, in windows."""
    tokens = torch.from_numpy(np.load(DATA / f"{part}.npy").astype(np.int64))
    size = CONTEXT + 1
    return tokens[: len(tokens) // size * size].view(-1, size)


def loss_on(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    """Train."""
    own = identity()
    own.seed_everything()
    data = own.shard(windows("train"))
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    learner = Learner.connect(model, optimizer, standalone_steps=STEPS)
    schedule = learner.scheduler(
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, learner.total_steps, pct_start=0.1)
    )
    while not learner.done:
        rows = torch.randint(len(data), (BATCH,)).tolist()
        loss = loss_on(model, torch.stack([data[row] for row in rows]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        learner.step(tokens=BATCH * CONTEXT, loss=loss)
        if learner.local_step % 50 == 0:
            print(f"step {learner.local_step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
