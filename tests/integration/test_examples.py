"""The examples as their READMEs start them, with fewer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_testing.local.run_process import CLI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OWN_LOOP = Path(__file__).parents[2] / "examples/02-own-loop"


def run(*command: object, **environment: str) -> str:
    """Standard output of a command that must succeed; a run that hangs is killed with its supervisor."""
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(argument) for argument in command], env={**os.environ, **quiet, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
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
    run(*CLI, "run", OWN_LOOP / "job.yaml", "--dir", tmp_path / "run", *sets)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["progress"]) == ("Complete", "24/24")
    scores = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert scores[-1]["step"] == 24
    assert scores[-1]["loss"] < scores[0]["loss"]
    model = tmp_path / "run/model/model.safetensors"
    own = json.loads(run(sys.executable, OWN_LOOP / "eval.py", model))
    assert own["loss"] == pytest.approx(scores[-1]["loss"], rel=1e-4)
