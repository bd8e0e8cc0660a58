"""A learner in this process, its link process, and a scripted syncer: shared by their tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diloco.spec import Checkpoint, RunSpec
from diloco_testing.syncers.scripted import ScriptedSyncer
from diloco_worker import Learner
from diloco_worker.learner import _connected


def make_spec(**changes: object) -> RunSpec:
    fields = {
        "job": "j", "steps": 100, "fragments": 2, "interval": 2, "overlap": 1, "learners": {"eu": 2, "us": 1},
        "buffers": "Initial",
        "learner_checkpoint": Checkpoint(every_steps=1000, keep=2), **changes,
    }  # fmt: skip
    return RunSpec(**fields)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model[2].bias.requires_grad_(False)
    return model


def job_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """A function that sets the environment of a learner."""

    def set_env(spec: RunSpec, port: int, *, name: str = "eu/0", faults: str = "") -> Path:
        _connected.clear()  # the learners of a test stand for processes of their own
        (tmp_path / "spec.json").write_text(spec.to_json())
        state = tmp_path / name.replace("/", "-")
        values = {
            "JOB": spec.job, "LEARNER": name, "SYNCER": f"127.0.0.1:{port}", "SPEC": str(tmp_path / "spec.json"),
            "CONFIG": '{"batch": 4}', "STATE": str(state), "FAULTS": faults,
        }  # fmt: skip
        for key, value in values.items():
            monkeypatch.setenv(f"DILOCO_{key}", value)
        return state

    return set_env


def train(
    learner: Learner, model: nn.Module, optimizer: torch.optim.Optimizer, *, tokens: int = 10
) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    learner.step(tokens=tokens, loss=loss)


def step_until(condition, learner, model, optimizer, *, timeout_seconds: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        train(learner, model, optimizer)
        time.sleep(0.01)


def flat(syncer: ScriptedSyncer, fragment: int, model: nn.Module) -> np.ndarray:
    """The parameters of a fragment, as they are in the model."""
    named = dict(model.named_parameters())
    out = np.zeros(syncer.layout.fragments[fragment].elements, np.float32)
    for slot in syncer.layout.fragments[fragment].slots:
        values = named[slot.tensor.name].detach().float().numpy().reshape(-1)
        out[slot.offset : slot.offset + values.size] = values
    return out


def link_pid(learner: Learner) -> int:
    """Process id of the learner's link."""
    return learner._trainer._link.pid


def applied(learner: Learner, fragment: int) -> int:
    """Newest inbox generation that the learner's model holds."""
    return learner._trainer._core.applied[fragment]


def holds(syncer: ScriptedSyncer, fragment: int, model: nn.Module, wanted: np.ndarray) -> bool:
    return np.array_equal(flat(syncer, fragment, model), wanted)


def connected(
    syncer, enter, *, spec=None, seed=0, optimizer=torch.optim.SGD, name="eu/0", faults=""
):
    enter(spec or syncer.spec, syncer.port, name=name, faults=faults)
    model = make_model(seed)
    opt = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return Learner.connect(model, opt, connect_timeout_seconds=90), model, opt
