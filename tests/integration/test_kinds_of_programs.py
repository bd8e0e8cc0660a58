"""Models and optimizers of many kinds: a result arrives, and a restart continues with the same values."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, spectral_norm

from diloco_testing.learners.linked import applied, make_spec
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker import Learner

Optimizers = Sequence[torch.optim.Optimizer]
Step = Callable[[], torch.Tensor]
Made = tuple[nn.Module, Optimizers, Step]


def plain(model: nn.Module, optimizers: Optimizers, loss: Step) -> Made:
    """A loop with a backward pass, and a step of each optimizer."""

    def step() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss()
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        return value

    return model, optimizers, step


def of(model: nn.Module, optimizer: Any = torch.optim.AdamW, **options: Any) -> Made:
    """A model of 8 numbers, with one optimizer."""
    dtype = next(model.parameters()).dtype
    made = optimizer(model.parameters(), lr=0.01, **options)
    return plain(model, [made], lambda: model(torch.ones(4, 8, dtype=dtype)).square().mean())


def two_layers(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, **options), nn.ReLU(), nn.Linear(16, 8, **options))


def adversarial() -> Made:
    critic = nn.Sequential(
        spectral_norm(nn.Linear(8, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 1))
    )
    model = nn.ModuleDict({"generator": two_layers(), "critic": critic})
    optimizers = [
        torch.optim.Adam(model["generator"].parameters(), betas=(0.5, 0.9)),
        torch.optim.RMSprop(critic.parameters(), lr=1e-3),
    ]

    def step() -> torch.Tensor:
        made = model["generator"](torch.randn(4, 8))
        loss = critic(made.detach()).mean() - critic(torch.randn(4, 8)).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(made).mean()).backward()
        optimizers[0].step()
        return loss

    return model, optimizers, step


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x[:, None].expand(-1, 3, -1))[0])


def sparse() -> Made:
    model = nn.ModuleList([nn.Embedding(50, 8, sparse=True), nn.Linear(8, 1)])
    optimizers = [
        torch.optim.SparseAdam(model[0].parameters()),
        torch.optim.Adam(model[1].parameters()),
    ]
    return plain(
        model, optimizers, lambda: model[1](model[0](torch.randint(50, (4,)))).square().mean()
    )


def bag() -> Made:
    model = nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 1))
    optimizer = torch.optim.Adagrad(model.parameters())
    return plain(model, [optimizer], lambda: model(torch.randint(50, (4, 3))).square().mean())


def tied() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return of(model)


def odd_shapes() -> Made:
    model = two_layers()
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.unused = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam(model.parameters())
    return plain(
        model, [optimizer], lambda: (model.scale * model(torch.ones(2, 8))).square().mean()
    )


def in_backward() -> Made:
    """Each parameter has an optimizer of its own, which steps when its gradient is there."""
    model = two_layers()
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def step_of(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_of)

    def step() -> torch.Tensor:
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    return model, [*optimizers.values()], step


def muon() -> Made:
    model = two_layers()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    return plain(model, optimizers, lambda: model(torch.ones(4, 8)).square().mean())


def rates() -> Made:
    model = two_layers()
    groups = [
        {"params": model[0].parameters(), "lr": torch.tensor(0.02)},
        {"params": model[2].parameters(), "lr": 0.01, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, foreach=False, capturable=False)
    return plain(model, [optimizer], lambda: model(torch.ones(4, 8)).square().mean())


def closures() -> Made:
    model = two_layers()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    return model, [optimizer], lambda: optimizer.step(closure)


def by_hand() -> Made:
    model = two_layers()

    def step() -> torch.Tensor:
        loss = model(torch.ones(4, 8)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        return loss

    return model, [], step


def frozen_later() -> Made:
    """The first layer is trained in two steps only."""
    model, optimizers, plain_step = of(two_layers())
    steps = iter(range(10**6))

    def step() -> torch.Tensor:
        if next(steps) == 2:
            model[0].requires_grad_(False)
        return plain_step()

    return model, optimizers, step


def complex_buffer() -> Made:
    model = two_layers()
    model.register_buffer("phases", torch.tensor([1 + 2j, 3 - 1j]))
    return of(model)


def images() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    return plain(model, [optimizer], lambda: model(torch.randn(2, 3, 6, 6)).square().mean())


def recomputed() -> Made:
    block = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
    return of(nn.Sequential(checkpoint_wrapper(block), nn.Linear(8, 4)))


KINDS: dict[str, Callable[[], Made]] = {
    "GAN": adversarial,
    "LSTM": lambda: of(Recurrent()),
    "SparseAdam": sparse,
    "EmbeddingBag": bag,
    "tied": tied,
    "odd shapes": odd_shapes,
    "in backward": in_backward,
    "Muon": muon,
    "groups": rates,
    "LBFGS": closures,
    "no optimizer": by_hand,
    "frozen later": frozen_later,
    "complex buffer": complex_buffer,
    "channels_last": images,
    "checkpoint_wrapper": recomputed,
    "weight_norm": lambda: of(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    ),
    "DataParallel": lambda: of(nn.DataParallel(two_layers())),
    "float64": lambda: of(two_layers(dtype=torch.float64)),
    "bfloat16": lambda: of(two_layers(dtype=torch.bfloat16)),
    "float16": lambda: of(two_layers(dtype=torch.float16), torch.optim.SGD, momentum=0.9),
}


def same(found: Any, expected: Any) -> bool:
    """Whether two states are equal to the bit."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same(found[k], v) for k, v in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_arrives_and_a_restart_continues_with_parameters_and_state_of_optimizers(
    enter, kind
):
    with ScriptedSyncer(make_spec()) as syncer:
        syncer.step, syncer.welcome = 10, {"run": "a"}
        enter(syncer.spec, syncer.port)
        torch.manual_seed(0)
        model, optimizers, step = KINDS[kind]()
        with Learner.connect(model, optimizers, connect_timeout_seconds=90) as learner:
            for _ in range(3):
                learner.step(tokens=4, loss=step())
            syncer.commit(0, syncer.theta[0] / 2, round_=1)
            deadline = time.monotonic() + 90
            while applied(learner, 0) < 2:
                assert time.monotonic() < deadline, "the result did not arrive in time"
                learner.step(tokens=4, loss=step())
            for _ in range(2):
                learner.step(tokens=4, loss=step())
            os.kill(os.getpid(), signal.SIGTERM)
            assert learner.done
        before = [model.state_dict(), *(o.state_dict() for o in optimizers)]
        syncer.welcome = {"run": "a", "use_checkpoint": True}
        torch.manual_seed(5)
        model, optimizers, step = KINDS[kind]()
        assert not same(model.state_dict(), before[0])
        with Learner.connect(model, optimizers, connect_timeout_seconds=90) as again:
            assert again.resumed
            after = [model.state_dict(), *(o.state_dict() for o in optimizers)]
            assert same(after, before)
            again.step(tokens=4, loss=step())
            assert all(bool(p.isfinite().all()) for p in model.parameters())
