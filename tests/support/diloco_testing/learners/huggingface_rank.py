"""
A program with the Trainer of transformers, started by torchrun or alone, for a job that loses one of its ranks.

Argument: a folder. After each step, every rank writes there what it holds and which items it has read:
`LEARNER-RESTARTS-RANK.jsonl`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from diloco_testing.learners.sharded import digest
from diloco_worker import identity
from diloco_worker.integrations.huggingface import DiLoCoCallback

CONTEXT, BATCH, WORDS = 16, 4, 16
ITEMS = 20_000
"""More than all steps of a learner read, so that no item is read twice in one life."""
PAUSE_SECONDS = 0.03
"""After each step: a learner that waits for another that starts again leaves it the cores."""


def make_model() -> transformers.GPT2LMHeadModel:
    """With random weights, other ones in each process: what makes replicas equal is the Trainer's and ours."""
    size = {"vocab_size": WORDS, "n_positions": CONTEXT, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**size, bos_token_id=None, eos_token_id=None)
    )


class Record(transformers.TrainerCallback):  # type: ignore[misc]
    """
    Writes a line for each step, which has been counted and may have applied a merge.

    Args:
        file: to append to.
        ours: given to the Trainer before this one.
    """

    def __init__(self, file: Path, ours: DiLoCoCallback) -> None:
        self._file, self._ours = file, ours
        self._items: list[int] = []
        self.trainer: transformers.Trainer | None = None

    def collate(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch, whose items are remembered."""
        self._items += [item["number"] for item in items]
        ids = torch.stack([item["ids"] for item in items])
        return {"input_ids": ids, "labels": ids}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step has ended."""
        items, self._items = self._items, []
        learner = self._ours.learner
        if learner is None or self.trainer is None:
            raise AssertionError("a step before the callback has joined")
        line = {
            "step": learner.local_step, "items": items, "model": digest(kwargs["model"].parameters()),
            "versions": [v and v[1] for v in learner._trainer._core.ledger.versions],
            "wrapped": type(self.trainer.model_wrapped).__name__,
        }  # fmt: skip
        with self._file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    """Train until the job is complete."""
    own = identity()
    words = (torch.arange(CONTEXT)[None] + torch.arange(WORDS)[:, None]) % WORDS
    items = own.shard([{"ids": words[n % WORDS], "number": n} for n in range(ITEMS)])
    name = f"{own.name.replace('/', '-')}-{os.environ['DILOCO_RESTARTS']}-{os.environ.get('RANK', '0')}"
    ours = DiLoCoCallback()
    record = Record(Path(sys.argv[1]) / f"{name}.jsonl", ours)
    arguments = transformers.TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=BATCH, learning_rate=1e-2, warmup_steps=5,
        lr_scheduler_type="cosine", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, remove_unused_columns=False, seed=own.seed(), data_seed=own.local_step,
    )  # fmt: skip
    trainer = transformers.Trainer(
        make_model(), arguments, train_dataset=items, data_collator=record.collate, callbacks=[ours, record]
    )  # fmt: skip
    record.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
