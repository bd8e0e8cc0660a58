"""A LightningModule, trained by Lightning's Trainer."""

import lightning
import torch
import torch.nn.functional as F  # noqa: N812
from data import windows
from torch import nn
from torch.utils.data import DataLoader

from diloco_worker import identity
from diloco_worker.integrations.lightning import DiLoCoCallback

STEPS = 600


class ByteModel(lightning.LightningModule):
    """Predicts the next byte with a recurrent network."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Mean cross-entropy in nats per byte."""
        x = batch["input_ids"]
        logits = self.head(self.memory(self.embedding(x[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW, with a learning rate that falls to 0 at the job's last step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main() -> None:
    """Train."""
    identity().seed_everything()
    trainer = lightning.Trainer(
        max_steps=STEPS,  # alone; in a job, its syncer decides
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,  # the learner has its own checkpoints
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DiLoCoCallback(tokens=lambda batch: batch["input_ids"].numel())],
    )
    trainer.fit(ByteModel(), DataLoader(windows(), batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
