"""
Makes the folder `base`, which stands for a model that you downloaded: a small GPT-2 that knows Python's source.

Every learner loads it, and no learner changes it. STEPS=0 in the environment leaves its weights at random.
"""

import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT, BATCH = 64, 16
BASE = Path(__file__).with_name("base")


def windows(files: list[Path]) -> torch.Tensor:
    """The bytes of these files in windows of CONTEXT."""
    text = b"".join(file.read_bytes() for file in files)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def main() -> None:
    """Train alone, and save the model as transformers does."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = windows(sorted(Path(os.__file__).parent.glob("*.py")))
    for _ in range(int(os.environ.get("STEPS", "300"))):
        batch = data[torch.randint(len(data), (BATCH,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(BASE)
    print(f"saved {BASE}")


if __name__ == "__main__":
    main()
