"""The examples as their READMEs start them, with fewer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from diloco_cli.template_files import write_template
from diloco_testing.local.run_process import CLI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OWN_LOOP = Path(__file__).parents[2] / "examples/02-own-loop"
IMAGES = Path(__file__).parents[2] / "examples/03-images"
CHANCE = 1 / 36
"""Accuracy of a guess among the signs of IMAGES."""


def run(*command: object, **environment: str) -> str:
    """Standard output of a command that must succeed; a run that hangs is killed with its supervisor."""
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(argument) for argument in command], env={**os.environ, **quiet, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_own_loop_runs_standalone():
    lines = run(sys.executable, OWN_LOOP / "train.py", STEPS="50").splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("step 50: loss ")
    assert float(lines[0].rpartition(" ")[2]) < 5.0  # an untrained model has ln 256 = 5.5


def test_the_own_loop_trains_under_diloco_and_its_eval_scores_the_model(tmp_path):
    changes = ("spec.steps=24", "spec.evaluation.everySteps=12")
    sets = [part for change in changes for part in ("--set", change)]
    output = run(*CLI, "run", OWN_LOOP / "job.yaml", "--dir", tmp_path / "run", *sets)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["progress"]) == ("Complete", "24/24")
    scores = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert scores[-1]["step"] == 24, output
    assert scores[-1]["loss"] < scores[0]["loss"]
    model = tmp_path / "run/model/model.safetensors"
    own = json.loads(run(sys.executable, OWN_LOOP / "eval.py", model))
    assert own["loss"] == pytest.approx(scores[-1]["loss"], rel=1e-4)


def test_the_template_of_a_program_trains_alone(tmp_path):
    write_template(tmp_path)
    assert float(run(sys.executable, tmp_path / "train.py").split()[-1]) < 0.6  # a guess has ln 2


@pytest.mark.slow_tier
def test_the_template_of_a_program_trains_as_two_learners(tmp_path):
    folder = tmp_path / "mine"
    write_template(folder)
    changes = ("spec.steps=60", "spec.sync.quorum=2", "spec.evaluation.everySteps=60")
    sets = [part for change in changes for part in ("--set", change)]
    run(*CLI, "run", folder / "job.yaml", "--dir", tmp_path / "run", *sets)
    scores = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert (scores[0]["step"], scores[-1]["step"]) == (0, 60)
    assert scores[-1]["loss"] < scores[0]["loss"] - 0.05
    events = (tmp_path / "run/events.jsonl").read_text().splitlines()
    merges = [event for event in map(json.loads, events) if event["event"] == "merge"]
    assert {member["learner"] for member in merges[-1]["members"]} == {"eu/0", "us/0"}


def images(folder: Path, *changes: str) -> Path:
    """The run directory of a job of IMAGES that is complete."""
    sets = [part for change in changes for part in ("--set", change)]
    run(*CLI, "run", IMAGES / "job.yaml", "--dir", folder, *sets)
    return folder


def score(model: Path) -> dict[str, float]:
    return dict(json.loads(run(sys.executable, IMAGES / "eval.py", model)))


@pytest.mark.slow_tier
def test_the_exported_statistics_are_those_of_training_and_those_of_step_0_give_a_wrong_model(
    tmp_path,
):
    changes = ("spec.steps=90", "spec.evaluation.everySteps=90", "spec.sync.quorum=2")
    folder = images(tmp_path / "run", *changes)
    model = folder / "model/model.safetensors"
    exported = score(model)
    assert exported["accuracy"] > 0.5
    evaluated = json.loads((folder / "eval.jsonl").read_text().splitlines()[-1])
    assert evaluated["step"] == 90
    assert exported["accuracy"] == pytest.approx(evaluated["accuracy"], abs=0.01)
    for learner in ("eu-0", "us-0"):
        log = (folder / f"logs/{learner}.log").read_text()
        own = float(log.rpartition("accuracy ")[2].split()[0])
        assert own == pytest.approx(exported["accuracy"], abs=0.15), learner
    assert "Passed" in run(*CLI, "audit", "--dir", folder)
    tensors = load_file(model)
    tracked = [name for name in tensors if name.endswith("num_batches_tracked")]
    assert {int(tensors[name]) for name in tracked} == {int(tensors[tracked[0]])}
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    merged = [member["step"] for e in lines if e["event"] == "merge" for member in e["members"]]
    # Of the newest member, whose own count was set back by each result, which is older.
    assert 0 < int(tensors[tracked[0]]) <= max(merged)
    for name, tensor in tensors.items():
        if name.endswith(("running_mean", "running_var")):
            assert not (tensor == tensor[0]).all(), name
            tensor.fill_(float(name.endswith("var")))  # as of step 0
    save_file(tensors, tmp_path / "before.safetensors")
    assert score(tmp_path / "before.safetensors")["accuracy"] < 4 * CHANCE


@pytest.mark.slow_tier
def test_a_job_may_keep_the_statistics_of_step_0(tmp_path):
    folder = images(tmp_path / "run", "spec.steps=12", "spec.sync.buffers=Initial")
    tensors = load_file(folder / "model/model.safetensors")
    statistics = [name for name in tensors if name.endswith(("running_mean", "running_var"))]
    assert len(statistics) == 14
    for name in statistics:
        assert (tensors[name] == float(name.endswith("var"))).all(), name
    assert int(tensors["norm.num_batches_tracked"]) == 0
