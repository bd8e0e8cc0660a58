"""
The built-in recipe: a byte-level GPT and the loop that trains it, in one file.

    python -m diloco_worker.recipes.gpt

Under `diloco run` it is a learner of a job; without DILOCO_SYNCER it trains by itself. Read `train`
first: only the lines with `learner` in them are about DiLoCo. The keys of `recipe.config` are the
fields of `Config` in camelCase.

Shape letters: B = windows of a batch, T = bytes of context, H = heads, D = width / heads, C =
width, V = 256 bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as in torch's documentation
from numpy.typing import NDArray
from torch import Tensor, nn

from diloco.errors import EXIT_REFUSED, ConfigError
from diloco.runtime import logs, malloc
from diloco_worker import Learner, settings
from diloco_worker.recipes import config as config_reader
from diloco_worker.recipes import data, optim

log = logging.getLogger("diloco.gpt")

VOCABULARY = 256

_AT_LEAST_ONE = "layers", "width", "heads", "context", "batch", "validation_tokens", "threads"
_RANGES: config_reader.Ranges = {
    **{name: (lambda v: v >= 1, "at least 1") for name in _AT_LEAST_ONE},
    "validation_fraction": (lambda v: 0 < v < 1, "between 0 and 1"),
    "optimizer": (lambda v: v in optim.OPTIMIZERS, " or ".join(optim.OPTIMIZERS)),
    "learning_rate": (lambda v: 0 < v < math.inf, "above 0"),
    "momentum": (lambda v: 0 <= v < 1, "at least 0 and less than 1"),
    "weight_decay": (lambda v: 0 <= v < math.inf, "0 or more"),
    "gradient_clip": (lambda v: v > 0, "above 0"),
    "warmup_steps": (lambda v: v >= 0, "0 or more"),
    "slowdown": (lambda v: 1 <= v < math.inf, "at least 1"),
    "dtype": (lambda v: v in ("float32", "bfloat16"), "float32 or bfloat16"),
    "device": (lambda v: v in ("auto", "cpu", "cuda"), "auto, cpu or cuda"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The fields of `recipe.config`; a region's `config` overrides them."""

    layers: int = 4
    width: int = 128
    """Size of the residual stream; a multiple of 2 * heads."""
    heads: int = 4
    context: int = 128
    """Bytes of context."""
    batch: int = 16
    """Windows per step of a learner."""
    data: str = data.STDLIB
    """`stdlib`, or the path of a folder or file with text."""
    validation_fraction: float = 0.05
    validation_tokens: int = 32768
    """Bytes per evaluation."""
    optimizer: str = optim.MUON
    learning_rate: float = 1.2e-2
    """At the end of the warm-up; best for the example's model with either optimizer."""
    momentum: float = optim.MOMENTUM
    """Of Muon; AdamW has β 0.9, 0.95."""
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    """Largest norm of the whole gradient."""
    warmup_steps: int | None = None
    """Global steps from zero to the full learning rate; None: a twentieth of T, at most 100."""
    slowdown: float = 1.0
    """Factor on the duration of every step, to simulate a slow learner."""
    dtype: str = "float32"
    """Of the matrix products; parameters are always float32."""
    threads: int | None = None
    """CPU threads of torch; None: OMP_NUM_THREADS, or torch's default."""
    device: str = "auto"
    """auto (cuda if there is one) | cpu | cuda."""

    def __post_init__(self) -> None:
        """Check ranges, all at once."""
        problems = config_reader.out_of_range(self, _RANGES)
        if self.heads >= 1 and self.width % (2 * self.heads) != 0:
            problems.append(f"config.width: {self.width} is not a multiple of {2 * self.heads}")
        if problems:
            raise ConfigError("\n".join(problems))


class GPT(nn.Module):
    """
    A decoder-only transformer over bytes: pre-norm, rotary positions, normalized queries and keys,
    ReLU² MLP.

    Norms have no gain and no layer has a bias, so every parameter is a matrix: 6 per layer, the
    embedding and the head. The same seed gives the same parameters, bit for bit, on any machine.
    """

    def __init__(self, config: Config, *, seed: int) -> None:
        super().__init__()
        self.context = config.context
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise(seed)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Logits of the next byte, shape (B, T, V); T is at most the context."""
        x_BTC = norm(self.embedding(bytes_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(norm(x_BTC))  # type: ignore[no-any-return]

    def hidden(self) -> list[nn.Parameter]:
        """The matrices that Muon may train: all but embedding and head."""
        return list(self.blocks.parameters())

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """
        Uniform with standard deviation 1/√fan_in; 1 for the embedding, small for the head, zero for
        the layers that write to the residual stream.

        Not normal: normal samples use libm, whose last bit differs between machines.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            deviation = 1 / math.sqrt(parameter.size(1))
            if name.startswith("embedding"):
                deviation = 1.0
            elif name.startswith("head"):
                deviation *= 0.1
            elif name.endswith(("out.weight", "down.weight")):
                deviation = 0.0
            uniform = torch.rand(parameter.shape, generator=generator)
            parameter.copy_(uniform.sub_(0.5).mul_(math.sqrt(12) * deviation))


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Same shape in and out."""
        x_BTC = x_BTC + self.attention(norm(x_BTC))
        return x_BTC + self.mlp(norm(x_BTC))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """
    Causal self-attention with rotary positions; queries and keys are normalized, which bounds the
    logits.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = width // self.heads // 2
        angle_TD = torch.arange(config.context)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        # Not persistent: they follow from the config, so they are not part of the merged model.
        self.register_buffer("cos_TD", angle_TD.cos(), persistent=False)
        self.register_buffer("sin_TD", angle_TD.sin(), persistent=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Same shape in and out."""
        B, T, C = x_BTC.shape
        q, k, v = (
            layer(x_BTC).view(B, T, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y_BHTD = F.scaled_dot_product_attention(
            norm(self._rotate(q)), norm(self._rotate(k)), v, is_causal=True
        )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))  # type: ignore[no-any-return]

    def _rotate(self, x_BHTD: Tensor) -> Tensor:
        """
        Rotary positions (arXiv:2104.09864): rotate each pair of coordinates by an angle that grows
        with the position.
        """
        T = x_BHTD.size(2)
        cos, sin = self.cos_TD[:T].to(x_BHTD.dtype), self.sin_TD[:T].to(x_BHTD.dtype)  # type: ignore[index]
        a, b = x_BHTD.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class MLP(nn.Module):
    """Four times as wide inside, with a squared ReLU (arXiv:2109.08668)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Same shape in and out."""
        return self.down(F.relu(self.up(x_BTC)).square())  # type: ignore[no-any-return]


def norm(x: Tensor) -> Tensor:
    """Scale the last dimension to a root mean square of 1."""
    return F.rms_norm(x, (x.size(-1),))


def loss_of(
    model: nn.Module, windows: NDArray[np.int64], config: Config, device: torch.device
) -> Tensor:
    """Mean cross-entropy in nats per byte of windows of shape (B, T + 1)."""
    return cross_entropy(model, torch.from_numpy(windows).to(device, non_blocking=True), config)


def cross_entropy(model: Callable[[Tensor], Tensor], windows_BT: Tensor, config: Config) -> Tensor:
    """The same of windows on their device."""
    with torch.autocast(windows_BT.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
        logits_BTV = model(windows_BT[:, :-1])
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), windows_BT[:, 1:].flatten())


def learning_rate(config: Config, *, step: int, steps: int) -> float:
    """
    Linear warm-up, then a cosine to zero at global step `steps`.

    Not the local step: a learner that rejoins is at the same position of the schedule as the others
    (docs/algorithm.md, "Inner optimizer and schedule").
    """
    warmup = min(100, steps // 20) if config.warmup_steps is None else config.warmup_steps
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class Scorer:
    """
    Computes the validation loss of weights, always on the same bytes; used by the evaluator.

    Raises:
        ConfigError: the config is not valid for this recipe, or its data is missing.
    """

    def __init__(self, raw_config: Mapping[str, Any], *, seed: int) -> None:
        self.config = config_reader.read(Config, raw_config)
        self.device = device_of(self.config)
        self._model = GPT(self.config, seed=seed).to(self.device)
        self._windows = data.validation_windows(
            load_data(self.config).validation,
            tokens=self.config.validation_tokens,
            context=self.config.context,
        )

    def initial(self) -> dict[str, NDArray[Any]]:
        """Θ^(0), as the first learner of a new job uploads it."""
        return weights_of(self._model)

    def __call__(self, weights: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        """{"loss": nats per byte, "bitsPerByte": the same in bits}."""
        try:
            self._model.load_state_dict(
                {name: torch.from_numpy(array) for name, array in weights.items()}
            )
        except RuntimeError as error:
            raise ConfigError(
                f"the job's model does not match its recipe config: {error}"
            ) from None
        loss = validation_loss(self._model, self._windows, self.config, self.device)
        return {"loss": loss, "bitsPerByte": loss / math.log(2)}


def weights_of(model: nn.Module) -> dict[str, NDArray[Any]]:
    """A copy of the state dict."""
    return {name: tensor.cpu().numpy().copy() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def validation_loss(
    model: nn.Module, windows: NDArray[np.int64], config: Config, device: torch.device
) -> float:
    """Mean loss of all windows, computed in batches."""
    total = 0.0
    for start in range(0, len(windows), 32):
        part = windows[start : start + 32]
        total += loss_of(model, part, config, device).item() * len(part)
    return total / len(windows)


def load_data(config: Config) -> data.Corpus:
    """The training and validation text of a config."""
    return data.load(
        config.data, context=config.context, validation_fraction=config.validation_fraction
    )


def device_of(config: Config) -> torch.device:
    """
    The device of a config.

    Raises:
        ConfigError: the config requires cuda, and torch does not find it.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("config.device: cuda, but torch finds no CUDA device; set auto or cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def train(config: Config, *, seed: int, steps: int) -> GPT:
    """Train until the job is done (without a job: for `steps` steps); return the local model."""
    device = device_of(config)
    corpus = load_data(config)
    model = GPT(config, seed=seed).to(device)
    optimizers = optim.build(
        model,
        model.hidden(),
        optimizer=config.optimizer,
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    # Where processes wait for a core, a rest of that length as well would slow a learner further than was requested.
    clock = time.thread_time if device.type == "cpu" else time.monotonic
    with Learner.connect(model, optimizers, standalone_steps=steps) as learner:
        while not learner.done:
            started = clock()
            windows = data.batch(
                corpus.train,
                seed=seed,
                learner=learner.name,
                step=learner.local_step,
                batch=config.batch,
                context=config.context,
            )
            loss = loss_of(model, windows, config, device)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip)
            rate = learning_rate(
                config, step=learner.step_index, steps=learner.total_steps or steps
            )
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad()
            if learner.local_step % 50 == 0:
                log.info("step %d: loss %.4f", learner.local_step, loss.item())
            time.sleep((config.slowdown - 1) * (clock() - started))
            learner.step(tokens=config.batch * config.context, loss=loss.detach())
    return model


def main() -> None:
    """Train what the job, or the command line, describes."""
    flags = argparse.ArgumentParser(
        prog="python -m diloco_worker.recipes.gpt",
        description="Train the built-in GPT. In a job, the manifest configures it; "
        "the flags are for a run without a job.",
    )
    flags.add_argument(
        "--config", default="{}", type=json.loads, metavar="JSON", help="keys of recipe.config"
    )
    flags.add_argument("--steps", default=500, type=int)
    flags.add_argument("--seed", default=0, type=int)
    given = flags.parse_args()
    try:
        job = settings.from_env()
        if job is not None and job.world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE: {job.world_size}, expected 1: the built-in recipe trains in one "
                "process; set spec.learner.podsPerLearner to 1, or your own program in "
                "spec.learner.command"
            )
        logs.configure_logging(json=job is not None and job.json_logs, name="learner")
        malloc.tune_malloc()
        spec = job.read_spec() if job else None
        config = config_reader.read(Config, job.config if job else given.config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if spec is not None:
            train(config, seed=spec.seed, steps=spec.steps)
            return
        model = train(config, seed=given.seed, steps=given.steps)
        print(json.dumps(Scorer(given.config, seed=given.seed)(weights_of(model))))
    except ConfigError as error:
        # A restart cannot help, so the supervisor must not try.
        print(str(error).replace("\n", "; "), file=sys.stderr)
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
