"""What the programs have in common: text as bytes, in windows that no other learner trains on."""

import os
from pathlib import Path

import torch

from diloco_worker import identity

CONTEXT = 64


def windows() -> list[dict[str, torch.Tensor]]:
    """This learner's windows of the standard library's source, as Trainer takes them."""
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    items = [
        {"input_ids": window, "labels": window}
        for window in data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    ]
    # In a cluster: shard(items, max_learners_per_region=...), see docs/learners.md.
    return identity().shard(items)
