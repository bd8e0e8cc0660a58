"""torchtitan's Trainer, as examples/04-trainers has it: FSDP2 over the ranks of torchrun, in a job."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from diloco_testing.local.run_process import TORCHRUN

EXAMPLE = Path(__file__).parents[2] / "examples/04-trainers"
STEPS = 40

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slow_tier,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # of the library
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
    ),
]


@pytest.fixture
def run(tmp_path, run_ranks):
    """The example's job with a learner of two ranks and one of one rank."""
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "start.py").write_text(TORCHRUN)
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["spec"]["steps"] = STEPS
    job["spec"]["sync"]["quorum"] = 2  # the job waits for the killed learner
    job["spec"]["learner"] = {"command": ["python", "start.py", "train_torchtitan.py"]}
    for region, ranks in zip(job["spec"]["regions"], (2, 1), strict=True):
        region["config"] = {"ranks": ranks}
    return run_ranks(folder, job)


def test_learners_of_torchtitan_survive_a_killed_rank_and_its_model_loads_the_result(run):
    run.until(lambda: run.stepped("eu/0") >= 14 and run.step() >= 8, 400, expected="14 steps")
    os.kill(run.rank_pid("eu/0", 1), signal.SIGKILL)
    assert run.wait(450) == 0, run.tail()
    assert (run.status()["state"], run.status()["progress"]) == ("Complete", f"{STEPS}/{STEPS}")
    assert (run.incarnations("eu/0"), run.incarnations("us/0")) == (2, 1)

    lines = run.lines("learners/eu-0/steps.jsonl")
    assert {line["tokens"] for line in lines} == {2 * 8 * 64}
    assert {line["tokens"] for line in run.lines("learners/us-0/steps.jsonl")} == {8 * 64}
    last_life = [line for line in lines if line["incarnation"] == lines[-1]["incarnation"]]
    assert last_life[0]["globalStep"] >= 8
    for line in last_life:  # a warm-up of 20 steps, then a cosine over the job's steps
        step = line["globalStep"]
        if step < 19:
            assert line["learningRate"] == pytest.approx(3e-3 * (step + 1) / 20, rel=0.2)
    assert lines[-1]["learningRate"] < 1e-3
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    assert losses[-1] < losses[0] - 1
    loads_in_torchtitan(load_file(run.dir / "model/model.safetensors"))


def loads_in_torchtitan(weights: dict[str, torch.Tensor]) -> None:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import train_torchtitan
    finally:
        sys.path.remove(str(EXAMPLE))
    model = train_torchtitan.config().model_spec.model.build()
    assert not any("_checkpoint_wrapped_module" in name for name in weights)
    model.load_state_dict(weights)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)
