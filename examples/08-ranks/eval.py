"""Scores a model file: `python eval.py model.safetensors` prints its loss."""

import json
import sys

import torch
from safetensors.torch import load_file
from train import Model, loss_on, windows


@torch.no_grad()
def main() -> None:
    """Print the loss on 256 windows of validation, of the whole model in one process."""
    model = Model().eval()
    model.load_state_dict(load_file(sys.argv[-1]))
    print(json.dumps({"loss": loss_on(model, windows(validation=True)[:256]).item()}))


if __name__ == "__main__":
    main()
