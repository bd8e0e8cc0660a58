"""
A mixture of experts under DiLoCo: each layer sends a token to the best two of four experts.

The loss that keeps the experts equally busy is computed on the learner's own batch: no learner waits for the numbers
of another. Alone (`python train.py`) it trains for 300 steps (with STEPS=50 in the environment: for 50).
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from diloco_worker import Learner, identity

STEPS = int(os.environ.get("STEPS", "300"))
BATCH, CONTEXT, WIDTH, LAYERS = 16, 64, 64, 2
EXPERTS, CHOSEN = 4, 2
BALANCE = 0.01
"""Weight of the balancing loss."""


class Experts(nn.Module):
    """A feed-forward layer of which each token uses CHOSEN experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * (2 * WIDTH) ** -0.5)
        self.balance = torch.zeros(())
        """Of the last batch: EXPERTS * sum of share of tokens * mean probability; 1 if all are equally busy."""
        self.share = torch.full((EXPERTS,), 1 / EXPERTS)
        """Of the last batch, each expert's share of the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (tokens, WIDTH)."""
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        self.share = F.one_hot(chosen, EXPERTS).sum(1).float().mean(0).detach() / CHOSEN
        self.balance = EXPERTS * (self.share * probabilities.mean(0)).sum()
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.gelu(x[tokens] @ self.up[expert]) @ self.down[expert]
            y = y.index_add(0, tokens, weights[tokens, place, None] * hidden)
        return y


class Layer(nn.Module):
    """Attention and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.experts = Experts()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Shape (batch, context, WIDTH)."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return x + self.experts(self.norms[1](x).flatten(0, 1)).view_as(x)


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

    def balance(self) -> torch.Tensor:
        """Mean balancing loss of the layers, on the last batch."""
        return torch.stack([layer.experts.balance for layer in self.layers]).mean()

    def busiest(self) -> float:
        """The largest share of an expert in the last batch; 1 / EXPERTS if all are equally busy."""
        return max(layer.experts.share.max().item() for layer in self.layers)


def windows(*, validation: bool) -> torch.Tensor:
    """The source of the standard library, as bytes; every 20th file is for validation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 20 == 0) is validation)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    size = CONTEXT + 1
    return data[: len(data) // size * size].view(-1, size)


def loss_on(model: Model, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    """Train."""
    own = identity()
    own.seed_everything()
    data = own.shard(windows(validation=False))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    learner = Learner.connect(model, optimizer, standalone_steps=STEPS)
    while not learner.done:
        rows = torch.randint(len(data), (BATCH,)).tolist()
        loss = loss_on(model, torch.stack([data[row] for row in rows]))
        optimizer.zero_grad()
        (loss + BALANCE * model.balance()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        learner.step(tokens=BATCH * CONTEXT, loss=loss)
        if learner.local_step % 50 == 0:
            text = f"loss {loss.item():.3f}, busiest expert {model.busiest():.0%}"
            print(f"step {learner.local_step}: {text}", flush=True)


if __name__ == "__main__":
    main()
