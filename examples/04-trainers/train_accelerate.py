"""A loop with Accelerate: it takes gradients of two batches for each optimizer step."""

import itertools

import torch
from accelerate import Accelerator
from data import CONTEXT, windows
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from diloco_worker import attach, identity

BATCH, ACCUMULATED = 8, 2


def main() -> None:
    """Train."""
    identity().seed_everything()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(windows(), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with attach(model, optimizer, tokens=BATCH * ACCUMULATED * CONTEXT, standalone_steps=600):
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    print("the job is complete", flush=True)


if __name__ == "__main__":
    main()
