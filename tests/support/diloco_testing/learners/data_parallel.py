"""
One process of a trainer of another library that trains data-parallel with gloo, with a learner without a syncer.

Argument: the module of the callback in `diloco_worker.integrations`. Prints as JSON what the learner was given, the
numbers of the rows that were read, and warnings. RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as by torchrun.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco_testing.learners.ranked import free_port
from diloco_testing.learners.rejoined import Rejoined

SUPPORT = Path(__file__).parents[2]
STEPS, ROWS, CONTEXT = 3, 4, 8


def learners_of(library: str, size: int) -> list[dict[str, Any]]:
    """What the learner was given in each of so many processes, and what was read and logged there."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "diloco_testing.learners.data_parallel", library],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * size, "\n".join(error for _, error in ended)
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def train_huggingface(callback: Any, folder: str) -> list[int]:
    """A Trainer that reads rows of CONTEXT tokens, with another seed in each process; the numbers of the rows."""
    import transformers

    size = {"vocab_size": 16, "n_positions": CONTEXT, "n_embd": 8, "n_layer": 1, "n_head": 1}
    ids, read = torch.arange(CONTEXT), []

    def collate(items: list[int]) -> dict[str, torch.Tensor]:
        read.extend(items)
        rows = ids.repeat(len(items), 1)
        return {"input_ids": rows, "labels": rows}

    transformers.Trainer(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)),
        transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=ROWS, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, remove_unused_columns=False, seed=1 + int(os.environ["RANK"]),
        ),
        train_dataset=[*range(8 * ROWS)], data_collator=collate, callbacks=[callback],
    ).train()  # fmt: skip
    return read


def train_lightning(callback: Any, folder: str) -> list[int]:
    """A Trainer of a linear model, whose rows have no numbers."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    size = int(os.environ["WORLD_SIZE"])
    data = torch.utils.data.TensorDataset(torch.ones(8 * ROWS, 2))
    pl.Trainer(
        accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto", callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=ROWS))  # fmt: skip
    return []


def main() -> None:
    """Train until the learner is done."""
    library = sys.argv[1]
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("diloco_worker").addHandler(handler)
    made = importlib.import_module(f"diloco_worker.integrations.{library}")
    job = Rejoined(steps=STEPS)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        job.join(patch)
        if library == "huggingface":
            rows = train_huggingface(made.DiLoCoCallback(), folder)
        else:
            rows = train_lightning(made.DiLoCoCallback(tokens=lambda batch: len(batch[0])), folder)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    seen = {
        "tokens": job.tokens,
        "everyRank": job.every_rank,
        "ranks": ranks,
        "rows": rows,
        "warnings": warnings,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
