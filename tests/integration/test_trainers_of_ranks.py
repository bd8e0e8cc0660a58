"""The Trainer of transformers with DistributedDataParallel over two ranks of torchrun, one of which is killed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

from diloco_testing.local.run_process import TORCHRUN, LocalRun, manifest

STEPS = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slow_tier,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # of the library
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]


@pytest.fixture
def run(tmp_path, run_ranks):
    """A job with a learner of two ranks and one of one rank."""
    (tmp_path / "start.py").write_text(TORCHRUN)
    (tmp_path / "seen").mkdir()
    program = ["-m", "diloco_testing.learners.huggingface_rank", str(tmp_path / "seen")]
    job = manifest("trainer-of-ranks", steps=STEPS)
    job["spec"] |= {
        "learner": {
            "command": ["python", "start.py", *program],
            "checkpoint": {"everySteps": 4, "keep": 2},
        },
        "sync": {
            "fragments": 4,
            "interval": 4,
            "quorum": 2,
        },  # the job waits for the killed learner
        "regions": [
            {"name": "eu", "learners": 1, "config": {"ranks": 2}},
            {"name": "us", "learners": 1, "config": {"ranks": 1}},
        ],
    }
    del job["spec"]["evaluation"]
    return run_ranks(tmp_path, job)


def seen(run: LocalRun, life: int, rank: int) -> list[dict]:
    """What a rank of eu/0 wrote about each of its steps."""
    text = (run.dir.parent / "seen" / f"eu-0-{life}-{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def test_two_ranks_of_a_trainer_stay_equal_and_continue_after_one_is_killed(run):
    run.until(lambda: run.stepped("eu/0") >= 20 and run.step() >= 12, 500, expected="20 steps")
    os.kill(run.rank_pid("eu/0", 1), signal.SIGKILL)
    assert run.wait(600) == 0, run.tail()
    assert (run.status()["state"], run.status()["progress"]) == ("Complete", f"{STEPS}/{STEPS}")
    assert (run.incarnations("eu/0"), run.incarnations("us/0")) == (2, 1)

    lines = run.lines("learners/eu-0/steps.jsonl")
    assert {line["tokens"] for line in lines} == {2 * 4 * 16}, "those of both ranks"
    assert {line["tokens"] for line in run.lines("learners/us-0/steps.jsonl")} == {4 * 16}
    log = (run.dir / "logs/eu-0.log").read_text()
    assert re.search("optimizers (are those of|continue with) the local checkpoint", log), log[
        -2000:
    ]
    assert "has accepted no data" not in log, "no checkpoint waited for a report that was replaced"
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    assert losses[0] > math.log(16) - 0.5 > losses[-1] + 0.5

    lives = [[seen(run, life, rank) for rank in range(2)] for life in range(2)]
    for first, second in lives:
        both = min(len(first), len(second))  # a killed rank may be one step behind
        assert both >= 10
        assert {line["wrapped"] for line in first} == {"DistributedDataParallel"}
        same = ("step", "model", "versions")
        for line, same_step in zip(first[:both], second[:both], strict=True):
            assert [line[key] for key in same] == [same_step[key] for key in same]
        assert len({tuple(line["versions"]) for line in first}) > 5, "merges were applied"
        read = [{item for line in rank for item in line["items"]} for rank in (first, second)]
        assert read[0].isdisjoint(read[1])
        assert len(read[0]) >= 4 * len(first), "no item twice"
    (before, _), (first, second) = lives
    assert len(first) == len(second), "both end at the same step"
    assert 4 <= first[0]["step"] <= before[-1]["step"] + 1, "it continues with its local step"

    weights = load_file(run.dir / "model/model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
