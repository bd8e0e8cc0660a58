"""`diloco doctor` with real programs, healthy and broken."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_cli.template_files import write_template
from diloco_job.manifest_file import parse_job
from diloco_local.doctor import Diagnosis, examine
from diloco_testing.local.run_process import CLI

pytestmark = pytest.mark.slow

LOOP = """
import torch
from torch import nn
from diloco_worker import Learner

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
learner = Learner.connect(model, optimizer)
"""
STEP = """
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    learner.step(tokens=2, loss=loss)
"""


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    """Examines a program as the only learner of a job; `spec` changes the manifest."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(program: str, *, seconds: float = 120, learners: int = 1, **spec: Any) -> Diagnosis:
        (tmp_path / "train.py").write_text(program)
        body = {
            "steps": 100, "sync": {"fragments": 2, "interval": 2, "overlap": 1},
            "learner": {"command": ["python", "train.py"]}, "regions": [{"name": "eu", "learners": learners}],
        }  # fmt: skip
        body |= spec
        job = {"apiVersion": "diloco.dev/v1alpha1", "kind": "DiLoCoJob"}
        text = yaml.safe_dump({**job, "metadata": {"name": "j"}, "spec": body})
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return examine(path, parse_job(text), tmp_path / "runs/j", seconds=seconds)

    return run


def problems(found: Diagnosis) -> list[str]:
    return [finding.text for finding in found.findings if finding.problem]


def test_the_template_has_no_problem_and_nothing_is_left_of_the_examination(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_template(tmp_path / "mine")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    done = subprocess.run(
        [*CLI, "doctor", "mine/job.yaml", "-o", "json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    assert data["healthy"] is True
    assert [e["learner"] for e in data["examinations"]] == ["eu/0", "us/0"]
    for examination in data["examinations"]:
        assert [step["tokens"] for step in examination["record"]["steps"]] == [32, 32, 32]
        assert examination["record"]["peak_bytes"] > 100 << 20
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "scratch"}
    assert not list((tmp_path / "scratch").glob("diloco*"))


def test_a_program_that_fails_before_it_connects_is_shown_with_its_error(doctor):
    (text,) = problems(doctor("import nothing_of_this_name"))
    assert "ended with exit code 1 before it connected (ModuleNotFoundError: No module" in text


def test_a_program_that_never_connects_is_stopped(doctor):
    (text,) = problems(doctor("import time\nprint('loading', flush=True)\ntime.sleep(999)", seconds=2))  # fmt: skip
    assert "did not call Learner.connect within 2." in text
    assert "s (loading); call it" in text


def test_a_loop_that_ends_early_and_one_that_ends_late_are_distinguished(doctor):
    (text,) = problems(doctor(f"{LOOP}\nfor _ in range(2):{STEP}"))
    assert "ended with exit code 0 after 2 of 3 steps, while learner.done was false" in text
    (text,) = problems(doctor(f"{LOOP}\nfor _ in range(9):{STEP}"))
    assert "called again although learner.done was true, at least 4 times" in text


def test_a_program_that_does_not_train_is_shown_by_its_steps(doctor):
    found = doctor(
        f"{LOOP}\nwhile not learner.done:{STEP}    learner.step(tokens=0, loss=float('nan'))\n",
    )
    texts = problems(found)
    assert len(texts) == 3, texts
    assert "tokens=0 in step 2" in texts[0]
    assert "NaN or Inf in step 2" in texts[1]
    assert "no optimizer step preceded learner.step() in step 2" in texts[2]


def test_a_model_that_the_job_would_refuse_is_refused_with_its_reason(doctor):
    found = doctor(LOOP, sync={"fragments": 6, "interval": 6})
    (text,) = problems(found)
    assert "ended with exit code 78 before it connected (diloco: " in text
    assert "6" in text


def test_learners_that_do_not_use_their_identity_are_compared(doctor):
    program = LOOP.replace("nn.Linear(4, 1))", "nn.Dropout(0.5), nn.Linear(4, 1))")
    program += (
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))"
    )
    found = doctor(f"{program}\nwhile not learner.done:{STEP}    schedule.step()\n", learners=2)
    texts = problems(found)
    assert len(texts) == 3, texts
    assert "both got the same batches in all 3 steps" in texts[0]
    assert "both models drew the same random numbers (dropout)" in texts[1]
    assert "the learning rate was 0.1, 0.05, 0.0333333 from global step 0 on" in texts[2]
    assert [e.record.begin for e in found.examinations] == [0, 47]


def test_buffers_frozen_parameters_names_and_memory_are_measured(doctor, tmp_path):
    program = f"""
import torch
from torch import nn, distributed
from diloco_worker import Learner

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 512).requires_grad_(False)
        self.head = nn.Linear(512, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("usage", torch.zeros(4))

    def forward(self, x):
        self.usage.add_(1)
        return self.head(self.base(x)) * self.scale

distributed.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model = Model()
model.head = nn.parallel.DistributedDataParallel(model.head)
optimizer = torch.optim.Adam(model.head.parameters())
learner = Learner.connect(model, optimizer)
while not learner.done:{STEP}
"""
    found = doctor(
        program,
        learner={"command": ["python", "train.py"], "resources": {"limits": {"memory": "64Mi"}}},
    )
    texts = problems(found)
    assert len(texts) == 2, texts
    assert (
        "1 of 3 trained parameters are in no optimizer that Learner.connect was given: scale;"
        in texts[0]
    )
    assert "resources.limits.memory is 64.0 MiB: raise it" in texts[1]
    changed, note = [finding.text for finding in found.findings if not finding.problem]
    assert "buffer usage changed while training" in changed
    assert "name what must move with the model in spec.sync.movingBuffers" in changed
    assert note.startswith("10.0 KiB of frozen parameters are not sent")  # (4 + 1) x 512 x 4 bytes
    record = found.examinations[0].record
    assert record.checkpoint_bytes == 3 * 513 * 4 + 8 + 4  # head, two moments, their steps; scale


def test_the_command_prints_what_to_fix_and_exits_with_1(tmp_path):
    (tmp_path / "train.py").write_text("print('hello')")
    write_template(tmp_path / "mine")
    (tmp_path / "mine/train.py").write_text("print('hello')")
    done = subprocess.run(
        [*CLI, "doctor", "mine/job.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("eu/0: 0 steps in ")
    assert lines[2].startswith(
        "problem: eu/0, us/0: the program did not call Learner.connect before"
    )
    assert lines[-1] == "mine/job.yaml: 1 to fix"


def test_a_job_that_needs_a_cluster_is_refused(tmp_path):
    done = subprocess.run(
        [*CLI, "doctor", Path(__file__).parents[2] / "examples/02-own-loop/job.yaml",
         "--set", "spec.learner.podsPerLearner=2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot be examined:\nspec.learner.podsPerLearner: 2" in done.stderr
