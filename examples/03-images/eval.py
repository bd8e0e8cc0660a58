"""Score a model file: `python eval.py model.safetensors` prints one JSON object with loss and accuracy."""

import json
import sys

from safetensors.torch import load_file
from train import build, score


def main() -> None:
    """Print the score on the fonts of validation."""
    model = build()
    model.load_state_dict(load_file(sys.argv[-1]))
    print(json.dumps(score(model)))


if __name__ == "__main__":
    main()
