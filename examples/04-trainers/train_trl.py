"""The same model as that of train_huggingface.py, trained by TRL's trainer for supervised fine-tuning."""

from data import CONTEXT, windows
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from diloco_worker import identity
from diloco_worker.integrations.huggingface import DiLoCoCallback


def main() -> None:
    """Train."""
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir="/tmp/04-trainers",
        max_steps=600,  # alone; in a job, its syncer decides
        max_length=CONTEXT,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_strategy="no",  # the learner has its own checkpoints
        seed=identity().seed(),
        data_seed=identity().local_step,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    # The windows are tokens already; TRL needs a tokenizer for padding.
    vocabulary = {f"<{value}>": value for value in range(256)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")),
        pad_token="<0>",
        eos_token="<10>",
    )
    trainer = SFTTrainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Dataset.from_list(
            [{"input_ids": item["input_ids"].tolist()} for item in windows()]
        ),
        processing_class=tokenizer,
        callbacks=[DiLoCoCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
