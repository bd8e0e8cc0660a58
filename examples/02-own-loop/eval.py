"""Score a model file: `python eval.py model.safetensors` prints one JSON object with its loss."""

import json
import math
import sys

import torch
from safetensors.torch import load_file
from train import ByteGRU, loss_on, read_text


@torch.no_grad()
def main() -> None:
    """Print the mean loss over 20 fixed batches of validation text."""
    _, text = read_text()
    model = ByteGRU()
    model.load_state_dict(load_file(sys.argv[-1]))
    loss = sum(loss_on(model, text, seed).item() for seed in range(20)) / 20
    print(json.dumps({"loss": loss, "perplexity": math.exp(loss)}))


if __name__ == "__main__":
    main()
