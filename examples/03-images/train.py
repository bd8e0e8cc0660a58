"""
A small network learns to read letters and digits of fonts: residual with BatchNorm, or with MODEL=vit a transformer.

By itself (`python train.py`) it trains for 300 steps (with STEPS=50 in the environment: for 50). Under
`diloco run job.yaml` several copies of it train a common model. Nothing in this file concerns the
running statistics of BatchNorm: the job averages them like parameters.
"""

import os
import string
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from diloco_worker import Learner

STEPS = int(os.environ.get("STEPS", "300"))
BATCH, SIZE = 64, 20
SIGNS = string.ascii_uppercase + string.digits
VALIDATION = ("DejaVuSans-Oblique", "DejaVuSerif-Bold", "STIXGeneralBol", "cmss10")
"""Fonts that no learner trains on."""
TRAIN = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSansMono"),
    *("DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif", "DejaVuSerif-BoldItalic"),
    *("DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBolIta", "STIXGeneralItalic"),
    *("cmb10", "cmr10", "cmtt10", "cmti10"),
)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        stride = outer // inner
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, outer, height / stride, width / stride)."""
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Logits of SIGNS for pictures of shape (batch, 1, SIZE, SIZE)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width), Block(width, 2 * width), Block(2 * width, 4 * width)
        )
        self.head = nn.Linear(4 * width, len(SIGNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 36)."""
        y = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(y.mean((2, 3)))


class ViT(nn.Module):
    """As ResNet; a transformer over 5 x 5 patches, which two convolutions make (arXiv 2106.14881)."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(1, width // 2, 3, 2, 1), nn.GELU(), nn.Conv2d(width // 2, width, 3, 2, 1)
        )
        self.positions = nn.Parameter(0.02 * torch.randn((SIZE // 4) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, len(SIGNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 36)."""
        y = self.layers(self.patches(x).flatten(2).mT + self.positions)
        return self.head(y.mean(1))


MODEL = os.environ.get("MODEL", "resnet")
RATE = {"resnet": 4e-3, "vit": 1e-3}[MODEL]


def build() -> nn.Module:
    """The network that MODEL names."""
    return ViT() if MODEL == "vit" else ResNet()


def pictures(fonts: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of every sign in these fonts of matplotlib, in four sizes, and the signs as numbers."""
    folder = Path(mpl.get_data_path()) / "fonts/ttf"
    found, signs = [], []
    for name in fonts:
        for size in (13, 15, 17, 19):
            font = ImageFont.truetype(str(folder / f"{name}.ttf"), size)
            for number, sign in enumerate(SIGNS):
                canvas = Image.new("L", (SIZE, SIZE))
                ImageDraw.Draw(canvas).text((SIZE / 2, SIZE / 2), sign, 255, font, anchor="mm")
                found.append(np.asarray(canvas, np.float32) / 255)
                signs.append(number)
    return torch.from_numpy(np.stack(found)).unsqueeze(1), torch.tensor(signs)


def batch_of(
    images: torch.Tensor, signs: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A random batch that the seed determines, moved by up to two pixels."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(images), (BATCH,), generator=generator)
    down, right = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return images[rows].roll((down, right), (2, 3)), signs[rows]


@torch.no_grad()
def score(model: nn.Module) -> dict[str, float]:
    """Loss and accuracy on the fonts of validation, with the running statistics of the model."""
    images, signs = pictures(VALIDATION)
    logits = model.eval()(images)
    accuracy = (logits.argmax(1) == signs).float().mean().item()
    return {"loss": F.cross_entropy(logits, signs).item(), "accuracy": accuracy}


def main() -> None:
    """Train, then print the accuracy of this learner's own model."""
    torch.manual_seed(0)
    images, signs = pictures(TRAIN)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    learner = Learner.connect(model, optimizer, standalone_steps=STEPS)
    while not learner.done:
        progress = learner.step_index / learner.total_steps
        optimizer.param_groups[0]["lr"] = RATE * max(0.0, 1 - progress)
        x, y = batch_of(images, signs, seed=learner.index * 10**9 + learner.local_step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=BATCH, loss=loss)
        if learner.local_step % 50 == 0:
            print(f"step {learner.local_step}: loss {loss.item():.3f}", flush=True)
    print(f"accuracy {score(model)['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
