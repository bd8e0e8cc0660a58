"""The recipes of examples/ that need more than this package, as their READMEs start them, with fewer steps."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco_testing.local.run_process import CLI

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # of the libraries
]  # fmt: skip

EXAMPLES = Path(__file__).parents[2] / "examples"


def need(*libraries: str) -> None:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


def run(*command: object, **environment: str) -> str:
    """Standard output of a command that must succeed; a run that hangs is killed with its supervisor."""
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(argument) for argument in command], env={**os.environ, **quiet, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str, to: Path) -> Path:
    """A copy of an example, which may write beside its files."""
    shutil.copytree(EXAMPLES / name, to, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def job(folder: Path, *changes: str) -> Path:
    """The run directory of an example's job that is complete, and whose merges are correct."""
    sets = [part for change in changes for part in ("--set", change)]
    to = folder.parent / "run"
    run(*CLI, "run", folder / "job.yaml", "--dir", to, *sets)
    assert "Passed" in run(*CLI, "audit", "--dir", to)
    return to


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "eval.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow_tier
def test_an_adapter_that_two_learners_trained_is_exported_alone_and_merged(tmp_path):
    need("transformers", "peft")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = example("05-lora", tmp_path / "lora")
    run(sys.executable, folder / "base.py", STEPS="60")
    run_dir = job(folder, "spec.steps=60", "spec.sync.quorum=2", "spec.evaluation.everySteps=60")
    scores = losses(run_dir)
    assert scores[-1] < scores[0] - 0.1
    tensors = load_file(run_dir / "model/model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == 45056, "only the adapter"
    snapshot = max((run_dir / "snapshots").glob("*"), key=lambda path: path.name)
    stored = sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file())
    assert stored < 200_000 < (folder / "base/model.safetensors").stat().st_size

    options = ("--dir", run_dir, "--adapter", folder / "adapter")
    run(*CLI, "export", "--to", tmp_path / "peft", *options)
    run(*CLI, "export", "--to", tmp_path / "merged", *options, "--merge-into", folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    for name, value in tensors.items():
        assert torch.equal(loaded.state_dict()[name], value), name
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(32, 96)[None]
    torch.testing.assert_close(
        merged(input_ids=ids).logits, loaded(input_ids=ids).logits, rtol=1e-4, atol=1e-5
    )
    own = json.loads(run(sys.executable, folder / "eval.py", run_dir / "model/model.safetensors"))
    assert own["loss"] == pytest.approx(scores[-1], rel=1e-4)
