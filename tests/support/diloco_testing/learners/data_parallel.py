"""
One process of a trainer of another library that trains data-parallel with gloo, with a learner without a syncer.

Argument: the module of the callback in `diloco_worker.integrations`. Prints as JSON what the learner was given. RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as by torchrun.
"""

from __future__ import annotations

import importlib
import json
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
    """What the learner was given in each of so many processes."""
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


def train_huggingface(callback: Any, folder: str) -> None:
    """A Trainer that reads rows of CONTEXT tokens."""
    import transformers

    size = {"vocab_size": 16, "n_positions": CONTEXT, "n_embd": 8, "n_layer": 1, "n_head": 1}
    ids = torch.arange(CONTEXT)
    transformers.Trainer(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)),
        transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=ROWS, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for _ in range(8 * ROWS)],
        callbacks=[callback],
    ).train()  # fmt: skip


def train_lightning(callback: Any, folder: str) -> None:
    """A Trainer of a linear model."""
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


def main() -> None:
    """Train until the learner is done."""
    library = sys.argv[1]
    made = importlib.import_module(f"diloco_worker.integrations.{library}")
    job = Rejoined(steps=STEPS)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        job.join(patch)
        if library == "huggingface":
            train_huggingface(made.DiLoCoCallback(), folder)
        else:
            train_lightning(made.DiLoCoCallback(tokens=lambda batch: len(batch[0])), folder)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    print(json.dumps({"tokens": job.tokens, "everyRank": job.every_rank, "ranks": ranks}))


if __name__ == "__main__":
    main()
