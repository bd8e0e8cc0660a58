"""
Text from a finished model: `python -m diloco_worker.sample --model DIR`.

Needs only the model/ directory of a run (model.json and model.safetensors): no syncer, no data.
"""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from diloco.errors import EXIT_USAGE, ConfigError
from diloco_worker.recipes import config as config_reader
from diloco_worker.recipes import gpt
from diloco_worker.recipes.data import SEPARATOR


def load(directory: Path) -> gpt.GPT:
    """
    Load the model of a run's model/ directory.

    Raises:
        ConfigError: the files are missing or damaged, or hold the model of another program.
    """
    try:
        meta = json.loads((directory / "model.json").read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{directory}: there is no model.json; give the model/ directory of a complete job"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / 'model.json'}: {error}") from None
    recipe = meta.get("recipe")
    if recipe != "gpt":
        trained_by = f"the recipe {recipe}" if recipe else "a program of its own"
        raise ConfigError(
            f"{directory}: this model was trained by {trained_by}; only recipe gpt can be sampled"
        )
    model = gpt.GPT(config_reader.read(gpt.Config, meta.get("config", {})), seed=0)
    try:
        model.load_state_dict(load_file(directory / "model.safetensors"))
    except Exception as error:  # safetensors, the disk and torch raise different errors
        raise ConfigError(f"{directory / 'model.safetensors'}: {error}") from None
    return model


@torch.no_grad()
def generate(
    model: gpt.GPT, prompt: bytes, *, tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    """
    Continue `prompt`, one byte at a time; the same arguments give the same bytes.

    An empty prompt means the beginning of a file. Temperature 0 selects the most likely byte.
    """
    generator = torch.Generator().manual_seed(seed)
    # In training, SEPARATOR precedes every file.
    text = list(SEPARATOR + prompt)
    for _ in range(tokens):
        logits_V = model(torch.tensor([text[-model.context :]]))[0, -1].float()
        logits_V[SEPARATOR[0]] = -torch.inf
        if temperature == 0:
            text.append(int(logits_V.argmax()))
        else:
            probabilities_V = torch.softmax(logits_V / temperature, dim=-1)
            text.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
        yield text[-1]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with code 2 if it is wrong."""
    flags = argparse.ArgumentParser(
        prog="python -m diloco_worker.sample", description="Text from a finished model."
    )
    flags.add_argument(
        "--model", required=True, type=Path, metavar="DIR", help="a run's model/ directory"
    )
    flags.add_argument(
        "--prompt", default="def ", help="text to continue; empty: the beginning of a file"
    )
    flags.add_argument("--tokens", default=400, type=_whole_number, help="number of bytes to write")
    flags.add_argument(
        "--temperature", default=0.7, type=_not_negative, help="0: always the most likely byte"
    )
    flags.add_argument("--seed", default=0, type=_whole_number)
    return flags.parse_args(arguments)


def main() -> None:
    """Write the prompt and its continuation to standard output."""
    given = parse()
    try:
        model = load(given.model)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_USAGE)
    # A byte-level model can produce invalid UTF-8.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(given.prompt)
    for value in generate(
        model,
        given.prompt.encode(),
        tokens=given.tokens,
        temperature=given.temperature,
        seed=given.seed,
    ):
        sys.stdout.write(decoder.decode(bytes([value])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")


def _whole_number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


if __name__ == "__main__":
    main()
