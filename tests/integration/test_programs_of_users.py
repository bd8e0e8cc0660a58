"""Programs as people write them, as jobs of `diloco run`: what a person sees, and the model at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from diloco_testing.local.run_process import LocalRun, manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FUNCTIONAL = """
import torch
from diloco_worker import Learner

torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
learner = Learner.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
weights = {name: value.detach().clone() for name, value in model.named_parameters()}


def loss_of(weights, x):
    return torch.func.functional_call(model, weights, (x,)).square().mean()


while not learner.done:
    x = torch.randn(8, 4)
    grads, loss = torch.func.grad_and_value(loss_of)(weights, x)
    weights = {name: value - 0.1 * grads[name] for name, value in weights.items()}
    learner.step(tokens=8, loss=loss)
"""
"""It trains a copy of the parameters."""


def started(folder: Path, program: str, *, steps: int, **spec: Any) -> LocalRun:
    """A job of two learners with this program."""
    (folder / "train.py").write_text(program)
    learner = {"command": ["python", "train.py"], "checkpoint": {"everySteps": 20}}
    job = manifest("programs", steps=steps, learners=2, learner=learner, **spec)
    job["spec"].pop("evaluation")
    return LocalRun(folder, job)


def test_a_job_whose_learners_train_copies_ends_without_success_and_states_why(tmp_path):
    run = started(tmp_path, FUNCTIONAL, steps=24, sync={"fragments": 2, "interval": 4})
    try:
        assert run.wait(200) == 1
        last = " ".join(run.tail(1).split())
        assert last.startswith("warning: no learner changed the parameters, so the model is")
        assert "in place and not a copy of its parameters" in last
        report = (run.dir / "report.html").read_text()
        assert "no merge changed a parameter: the model of step 24 is that of step 0" in report
        assert run.status()["state"] == "Complete"
        assert set(load_file(run.dir / "model/model.safetensors")) == {"weight", "bias"}
        assert run.process.poll() == 1
        run.start()
        assert run.wait(100) == 1, "also of a complete job that is started again"
    finally:
        run.stop()
