"""
Trains a LoRA adapter on a frozen base: the text of Python's help, for a model that knows Python's source.

Only the adapter is sent, merged and stored. Nothing in this file concerns that: the parameters of the base require no
gradient.
"""

import pydoc_data.topics
from pathlib import Path

import torch
from base import BASE, BATCH, CONTEXT, windows
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from diloco_worker import Learner, identity

ADAPTER = Path(__file__).with_name("adapter")
STEPS = 300


def adapted() -> PeftModel:
    """The base with a new adapter."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True,  # GPT-2 stores its matrices transposed
    )
    return get_peft_model(GPT2LMHeadModel.from_pretrained(BASE), config)


def text(*, validation: bool) -> torch.Tensor:
    """Python's help, of which every tenth window is for validation."""
    found = windows([Path(pydoc_data.topics.__file__)])
    is_validation = torch.arange(len(found)) % 10 == 0
    return found[is_validation if validation else ~is_validation]


def main() -> None:
    """Train."""
    own = identity()
    own.seed_everything()  # another dropout and order of the data in each learner and incarnation
    model = adapted()
    if own.index_in_region == 0:
        model.peft_config["default"].save_pretrained(ADAPTER)  # for diloco export --adapter
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    data = own.shard(text(validation=False))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)

    learner = Learner.connect(model, optimizer, standalone_steps=STEPS)
    batches = iter(loader)
    while not learner.done:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            continue
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=BATCH * CONTEXT, loss=loss)
        if learner.local_step % 50 == 0:
            print(f"step {learner.local_step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
