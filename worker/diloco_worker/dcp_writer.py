"""
Writes the tensors of a safetensors file as a checkpoint of torch.distributed.checkpoint (`diloco export --dcp`).

    python -m diloco_worker.dcp_writer --model model.safetensors --to DIR
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from diloco.errors import EXIT_USAGE


def write(model: Path, to: Path) -> None:
    """
    Write every tensor under its name; DIR/.metadata is the last file.

    Raises:
        OSError: a file cannot be read or written.
        SafetensorError: `model` is not a safetensors file.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a single process
        save(load_file(model), storage_writer=FileSystemWriter(to), no_dist=True)


def main() -> None:
    """Write the files, or end with a sentence."""
    parser = argparse.ArgumentParser(prog="diloco_worker.dcp_writer", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    try:
        write(given.model, given.to)
    except (OSError, SafetensorError) as error:
        print(f"{given.to}: {error}; the export is not complete", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
