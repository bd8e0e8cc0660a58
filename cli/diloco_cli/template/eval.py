"""Scores a model: `python eval.py model.safetensors` prints a JSON object with at least its loss."""

import json
import sys

import torch
from safetensors.torch import load_file
from train import Model, dataset, loss_on


@torch.no_grad()
def main() -> None:
    """Print loss and accuracy on the data of validation."""
    points, spirals = dataset(validation=True).tensors
    model = Model().eval()
    model.load_state_dict(load_file(sys.argv[-1]))
    accuracy = (model(points).argmax(1) == spirals).float().mean()
    score = {"loss": loss_on(model, points, spirals).item(), "accuracy": accuracy.item()}
    print(json.dumps(score))


if __name__ == "__main__":
    main()
