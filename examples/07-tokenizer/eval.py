"""Scores a model file: `python eval.py model.safetensors` prints its loss, and continues a line of Python."""

import json
import sys

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train import CONTEXT, DATA, build, loss_on, windows


@torch.no_grad()
def main() -> None:
    """Print the loss on windows of validation, and the most likely continuation of a prompt."""
    model = build().eval()
    model.load_state_dict(load_file(sys.argv[-1]))
    loss = loss_on(model, windows("validation")[:256]).item()
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    tokens = tokenizer.encode("def __init__(self").ids
    while len(tokens) < CONTEXT // 2:
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    print(json.dumps({"loss": loss, "sample": tokenizer.decode(tokens)}))


if __name__ == "__main__":
    main()
