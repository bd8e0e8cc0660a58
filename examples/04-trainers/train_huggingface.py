"""A model of transformers, with random weights, trained by its Trainer."""

from data import CONTEXT, windows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from diloco_worker import identity
from diloco_worker.integrations.huggingface import DiLoCoCallback


def main() -> None:
    """Train."""
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir="/tmp/04-trainers",
        max_steps=600,  # alone; in a job, its syncer decides
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_strategy="no",  # the learner has its own checkpoints
        seed=identity().seed(),  # dropout: another one in every incarnation and process
        data_seed=identity().local_step,  # order of the data: the same in all processes
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=windows(),
        callbacks=[DiLoCoCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
