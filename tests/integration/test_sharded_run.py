"""`diloco run` with learners of one process and of two ranks in one job, one of which loses a rank."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from diloco_testing.learners import sharded
from diloco_testing.local.run_process import manifest

STEPS = 160
PROGRAM = """
import json, os, sys

ranks = json.loads(os.environ["DILOCO_CONFIG"])["ranks"]
program = ["-m", "diloco_testing.learners.sharded"]
if ranks == 1:
    os.execv(sys.executable, [sys.executable, *program, "alone", "model.pt"])
torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
os.execv(sys.executable, [sys.executable, *torchrun, *program, "fsdp", "model.pt"])
"""


@pytest.fixture
def run(tmp_path, run_ranks):
    """The job."""
    (tmp_path / "train.py").write_text(PROGRAM)
    job = manifest("mixed", steps=STEPS)
    job["spec"] |= {
        "learner": {"command": ["python", "train.py"]},
        "sync": {"fragments": 8, "interval": 8, "quorum": 2},
        "regions": [
            {"name": "one", "learners": 1, "config": {"ranks": 1}},
            {"name": "two", "learners": 1, "config": {"ranks": 2}},
        ],
    }
    del job["spec"]["evaluation"]
    return run_ranks(tmp_path, job)


@pytest.mark.slow
@pytest.mark.slow_tier
@pytest.mark.timeout(900)
def test_a_learner_of_two_ranks_trains_with_one_of_one_process_and_survives_a_killed_rank(run):
    run.until(lambda: run.stepped("two/0") >= 20 and run.step() >= 12, 400, expected="20 steps")
    os.kill(run.rank_pid("two/0", 1), signal.SIGKILL)
    assert run.wait(500) == 0, run.tail()
    assert run.status()["state"] == "Complete"
    assert run.incarnations("two/0") == 2
    assert run.incarnations("one/0") == 1
    merges = [line for line in run.lines("events.jsonl") if line["event"] == "merge"]
    members = [member["learner"] for line in merges for member in line["members"]]
    assert min(members.count("one/0"), members.count("two/0")) > 40
    theta = load_file(run.dir / "model/model.safetensors")
    start = dict(sharded.make_model().named_parameters())
    assert theta.keys() == start.keys()
    assert all(bool(torch.isfinite(values).all()) for values in theta.values())
