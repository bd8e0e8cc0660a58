"""A Llama of torchtitan, sharded by FSDP2 over the ranks that torchrun starts, trained by its Trainer."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import titan_on_cpu
import torch
from datasets import Dataset
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from diloco_worker.integrations.torchtitan import DiLoCoTrainer

VOCABULARY = 2048  # of torchtitan's debug model; bytes need 256


class Bytes(BaseTokenizer):
    """Text as its bytes."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """One token for each byte."""
        return list(text.encode())

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        """The text."""
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """As the model has it."""
        return VOCABULARY


def sources(path: str) -> Dataset:
    """The standard library: torchtitan gives each rank of each learner its part."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return Dataset.from_list([{"text": file.read_text(errors="replace")} for file in files])


def config() -> Trainer.Config:
    """As for torchtitan alone."""
    DATASETS["sources"] = DatasetConfig(
        path="", loader=sources, sample_processor=lambda sample: sample["text"]
    )
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    made = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=Bytes.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="sources"),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20, decay_type="cosine"),
        training=TrainingConfig(
            steps=600,  # alone; in a job, its syncer decides
            local_batch_size=8,
            seq_len=64,
        ),
        metrics=MetricsProcessor.Config(log_freq=10),
        dump_folder="/tmp/04-trainers/torchtitan",
    )
    return made if torch.cuda.is_available() else titan_on_cpu.for_cpu(made)


def main() -> None:
    """Train."""
    init_logger()
    trainer = DiLoCoTrainer(config())
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
