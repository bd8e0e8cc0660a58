"""Scores a model file: `python eval.py model.safetensors` prints its loss and how busy its experts are."""

import json
import sys

import torch
from safetensors.torch import load_file
from train import Model, loss_on, windows


@torch.no_grad()
def main() -> None:
    """Print the loss on 256 windows of validation, and the largest share of the tokens that an expert gets."""
    model = Model().eval()
    model.load_state_dict(load_file(sys.argv[-1]))
    loss = loss_on(model, windows(validation=True)[:256]).item()
    print(json.dumps({"loss": loss, "busiestExpert": model.busiest()}))


if __name__ == "__main__":
    main()
