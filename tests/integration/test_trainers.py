"""The trainers of other libraries, as examples/04-trainers has them, in a job whose learner is killed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from safetensors.torch import load_file

from diloco_testing.local.run_process import CLI, LocalRun

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
    # Of a peer, if the job is more than H steps further when it is back.
    found = "optimizers (are those of|continue with) the (local checkpoint|state of us/0)"
    assert re.search(found, log), log[-2000:]
    assert again["globalStep"] >= 12
    assert {line["tokens"] for line in lines} == {16 * 64}
    if run.program != "train_accelerate.py":  # has no loss to report
        losses = [line["loss"] for line in lines if line["loss"] is not None]
        assert losses[-1] < losses[0] - 0.5

    weights = load_file(run.dir / "model/model.safetensors")
    assert weights
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    if run.program == "train_lightning.py":
        loads_in_lightning(weights)
    else:
        loads_in_transformers(run.dir, weights)


def loads_in_lightning(weights: dict[str, torch.Tensor]) -> None:
    """The module of the example takes the model, and predicts the bytes of the text with it."""
    program, items = example_modules("train_lightning", "data")
    windows = items.windows()
    batch = torch.utils.data.default_collate([windows[item] for item in range(16)])
    model = program.ByteModel()
    before = model.training_step(batch, 0).item()
    model.load_state_dict(weights)
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert model.training_step(batch, 0).item() < before - 0.5


def example_modules(*names: str) -> list[ModuleType]:
    """Modules of the example, which leave nothing behind."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)


def loads_in_transformers(run_dir: Path, weights: dict[str, torch.Tensor]) -> None:
    """What `diloco export` writes for other tools is the model of the job, in bfloat16 and several files."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    base, folder = run_dir.parent / "base", run_dir.parent / "exported"
    config.save_pretrained(base)
    options = ("--dtype", "bfloat16", "--shard-size", "100Ki", "--files-from", base)
    command = [*CLI, "export", "--dir", run_dir, "--to", folder, *options]
    subprocess.run([str(word) for word in command], check=True, timeout=200)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == torch.bfloat16

    own = GPT2LMHeadModel(config).eval()
    own.load_state_dict(weights)
    ids = torch.frombuffer(bytearray(b"import os\nfrom pathlib import Path\n"), dtype=torch.uint8)
    with torch.no_grad():
        logits = own(input_ids=ids[None].long()).logits
        exported = loaded(input_ids=ids[None].long()).logits
        assert torch.equal(exported, own.to(torch.bfloat16)(input_ids=ids[None].long()).logits)
    # bfloat16 has 8 bits; the predictions stay those of the job's model.
    assert float((exported.float() - logits).abs().max()) < 0.1 * float(logits.abs().max())
