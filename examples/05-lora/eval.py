"""Scores a model file: `python eval.py model.safetensors` prints the loss of base and adapter together."""

import json
import sys

import torch
from safetensors.torch import load_file
from train import adapted, text


@torch.no_grad()
def main() -> None:
    """Print the mean loss in nats per byte on the windows of validation."""
    model = adapted().eval()
    # The file has the trained parameters; the frozen ones are those of the base.
    missing, unexpected = model.load_state_dict(load_file(sys.argv[-1]), strict=False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unexpected or not trained.isdisjoint(missing):
        raise SystemExit(f"unexpected {unexpected}, missing {trained & set(missing)}")
    windows = text(validation=True)[:256]
    print(json.dumps({"loss": model(input_ids=windows, labels=windows).loss.item()}))


if __name__ == "__main__":
    main()
