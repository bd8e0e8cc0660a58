"""Programs as people write them, as jobs of `diloco run`: what a person sees, and the model at the end."""

from __future__ import annotations

import re
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


TASK = """
import time

import torch
from torch import nn
from diloco_worker import Learner, identity

true_weights = torch.randn(8, 1, generator=torch.Generator().manual_seed(0))


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def batch(rows=32):
    x = torch.randn(rows, 8)
    return x, x @ true_weights


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)
"""
"""What the programs below begin with."""

SCALED = """
model = build()
identity().seed_everything()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
learner = Learner.connect(model, optimizer)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=1000 * learner.total_steps)
while not learner.done:
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, *batch()) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
    learner.step(tokens=64, loss=2 * loss.item())
    time.sleep(0.02)
"""
"""Accumulation, mixed precision, and a schedule that counts the steps of its process."""

TWO_PASSES = """
class SAM(torch.optim.Optimizer):  # as many programs have it: the parameters get other storage in each step
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        own = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * 0.05 / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


model = build()
identity().seed_everything()
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9)
learner = Learner.connect(model, optimizer)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * learner.total_steps)
scheduler = learner.scheduler(cosine)
while not learner.done:
    x, y = batch()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.first_step()
    loss_of(model, x, y).backward()
    optimizer.second_step()
    scheduler.step()
    learner.step(tokens=32, loss=loss)
    time.sleep(0.02)
"""

CLOSURES = """
model = build()
identity().seed_everything()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
learner = Learner.connect(model, optimizer)
while not learner.done:
    x, y = batch(128)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    learner.step(tokens=128, loss=optimizer.step(closure))
    time.sleep(0.02)
"""

OWN_CHECKPOINTS = """
import os
from pathlib import Path

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader


def main():
    own = identity()
    path = Path(f"checkpoint-{own.learner_rank}.pt")
    model = build()
    own.seed_everything()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    data = torch.utils.data.TensorDataset(*batch(2000))
    loader = StatefulDataLoader(own.shard(data), batch_size=16, shuffle=True, num_workers=2)
    parts = {"model": model, "optimizer": optimizer, "ema": ema, "loader": loader}
    if path.exists():
        found = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(found[name])
        print("continues with its own checkpoint", flush=True)
    learner = Learner.connect(model, optimizer)
    while not learner.done:
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
            learner.step(tokens=len(x), loss=loss)
            if learner.local_step % 10 == 0:
                torch.save({name: part.state_dict() for name, part in parts.items()}, f"{path}.tmp")
                os.replace(f"{path}.tmp", path)
            if learner.done:
                break
            time.sleep(0.02)
    print(f"average: {loss_of(ema, *batch(500)).item():.3f}", flush=True)


if __name__ == "__main__":
    main()
"""

SPAWNED = """
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(build())
    identity().seed_everything()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    learner = Learner.connect(model, optimizer)
    while not learner.done:
        optimizer.zero_grad()
        loss = loss_of(model, *batch())
        loss.backward()
        optimizer.step()
        learner.step(tokens=64, loss=loss)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"{folder}/store",), nprocs=2)
"""

BACK = "the optimizers continue with|parameters and optimizers are those of the local checkpoint"
PROGRAMS = {
    "scaled": (SCALED, r"the schedule of the learning rate \(OneCycleLR\) starts over"),
    "two passes": (TWO_PASSES, BACK),
    "closures": (CLOSURES, BACK),
    "own checkpoints": (OWN_CHECKPOINTS, "continues with its own checkpoint"),
    "spawned": (SPAWNED, BACK),
}
"""Each with what a learner logs when it comes back."""


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["scaled", *(pytest.param(n, marks=pytest.mark.slow_tier) for n in [*PROGRAMS][1:])]
)
def test_a_killed_learner_of_a_program_comes_back_and_the_job_ends_with_a_model(tmp_path, name):
    """Merges need both learners, so that the job cannot end without the one that was killed."""
    program, back = PROGRAMS[name]
    run = started(
        tmp_path, TASK + program, steps=160, sync={"fragments": 2, "interval": 8, "quorum": 2}
    )
    try:
        run.until(lambda: run.step() >= 60, 240, expected="60 steps")
        run.kill_learner("us/0")
        log = run.dir / "logs/us-0.log"
        before = len(log.read_text())
        assert run.wait(300) == 0, run.tail()
        assert (run.status()["state"], run.incarnations("us/0")) == ("Complete", 2)
        assert re.search(back, log.read_text()[before:])
        assert run.output.read_text().count("warning") == 0, run.tail()
        task: dict[str, Any] = {}
        exec(TASK, task)
        model = task["build"]()
        x, y = task["batch"](500)
        first = task["loss_of"](model, x, y).item()
        model.load_state_dict(load_file(run.dir / "model/model.safetensors"))
        assert task["loss_of"](model, x, y).item() < first / 4
    finally:
        run.stop()
