"""The trainers of other libraries, as examples/04-trainers has them, in a job whose learner is killed."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from diloco_testing.local.run_process import LocalRun

EXAMPLE = Path(__file__).parents[2] / "examples/04-trainers"
LIBRARIES = {
    "train_huggingface.py": "transformers",
    "train_lightning.py": "lightning",
    "train_accelerate.py": "accelerate",
    "train_trl.py": "trl",
}
STEPS = 120

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # of the libraries
]  # fmt: skip


@pytest.fixture(
    params=[
        "train_huggingface.py",
        pytest.param("train_lightning.py", marks=pytest.mark.slow_tier),
        pytest.param("train_accelerate.py", marks=pytest.mark.slow_tier),
        pytest.param("train_trl.py", marks=pytest.mark.slow_tier),
    ]
)
def run(request, tmp_path, monkeypatch):
    """The example's job with this program, stopped afterwards."""
    if importlib.util.find_spec(LIBRARIES[request.param]) is None:
        pytest.skip(f"{LIBRARIES[request.param]} is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["spec"]["steps"] = STEPS
    job["spec"]["sync"]["quorum"] = 2  # the job waits for the killed learner
    job["spec"]["learner"] = {
        "command": ["python", request.param],
        "checkpoint": {"everySteps": 8, "keep": 2},
    }
    started = LocalRun(folder, job)
    started.program = request.param
    yield started
    started.stop()


def test_a_killed_learner_of_a_trainer_resumes_and_the_job_ends(run):
    run.until(lambda: run.stepped("eu/0") >= 20 and run.step() >= 12, 300, expected="20 steps")
    run.kill_learner("eu/0")
    assert run.wait(400) == 0, run.tail()
    assert (run.status()["state"], run.status()["progress"]) == ("Complete", f"{STEPS}/{STEPS}")
    assert run.incarnations("eu/0") == 2

    lines = run.lines("learners/eu-0/steps.jsonl")
    lives = sorted({line["incarnation"] for line in lines})
    again = next(line for line in lines if line["incarnation"] == lives[-1])
    log = (run.dir / "logs/eu-0.log").read_text()
    assert re.search("optimizers (are those of|continue with) the local checkpoint", log), log[
        -2000:
    ]
    assert again["globalStep"] >= 12
    assert {line["tokens"] for line in lines} == {16 * 64}
    if run.program != "train_accelerate.py":  # has no loss to report
        losses = [line["loss"] for line in lines if line["loss"] is not None]
        assert losses[-1] < losses[0] - 0.5

    weights = load_file(run.dir / "model/model.safetensors")
    assert weights
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    if run.program != "train_lightning.py":
        loads_in_transformers(run.dir / "model", weights)


def loads_in_transformers(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    ).save_pretrained(folder)  # fmt: skip
    loaded = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
