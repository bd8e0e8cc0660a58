"""Blocks of data in a whole job: `diloco run` with a program of its own, and a learner that is killed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from diloco.journal import reader
from diloco.journal.audit import audit_parts
from diloco_testing.local.run_process import CLI, LocalRun, manifest

PROGRAM = """
import json, os, time
import torch
from diloco_worker import Learner

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
learner = Learner.connect(model, optimizer)
items = json.loads(os.environ["DILOCO_CONFIG"]).get("items", 1200)
for block in learner.blocks(items, size=12):
    for first in range(block.range.start, block.range.stop, 4):
        time.sleep(0.1)
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), first / items)).square().mean()
        loss.backward()
        optimizer.step()
        learner.step(tokens=4, loss=loss)
        if learner.done:
            break
"""


@pytest.fixture
def job(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    runs = []

    def start(**spec):
        body = manifest("blocks", learners=2, **spec)
        body["spec"]["learner"] = {"command": [sys.executable, str(program)]}
        body["spec"]["sync"] = {"fragments": 2, "interval": 4}
        del body["spec"]["evaluation"]
        body["spec"]["regions"] = spec.get("regions", body["spec"]["regions"])
        runs.append(LocalRun(tmp_path, body))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


def events(run, kind):
    return [line for line in run.lines("events.jsonl") if line["event"] == kind]


@pytest.mark.timeout(560)
def test_blocks_of_a_killed_learner_are_leased_again_and_each_has_one_fate(job):
    run = job(steps=500)
    run.until(
        lambda: {x["learner"] for x in events(run, "trained")} == {"eu/0", "us/0"},
        240,
        expected="both learners have trained on a block",
    )
    run.kill_learner("us/0")
    run.until(lambda: events(run, "release"), 60, expected="its blocks are released")
    assert run.wait(240) == 0, run.tail()
    found = audit_parts(reader.lines(run.dir / "events.jsonl"))
    assert found.ok, found.violations
    # What was released was leased once more than it was released, if it was not the end of the job.
    released = [x for x in events(run, "release") if x["reason"] != "Complete"]
    again = {
        n for x in released for b in x["blocks"] for n in range(b["first"], b["first"] + b["count"])
    }
    trained = {row["pass"] * 100 + row["block"]: row for row in found.blocks}
    assert again
    assert again <= set(trained)
    assert {row["learner"] for row in found.blocks} == {"eu/0", "us/0"}
    # Without a gap up to what was open at the end.
    at_end = [x for x in events(run, "release") if x["reason"] == "Complete"]
    open_at_end = {
        n for x in at_end for b in x["blocks"] for n in range(b["first"], b["first"] + b["count"])
    }
    assert set(trained) | open_at_end >= set(range(max(trained) + 1))
    assert sum(bool(row["merges"]) for row in found.blocks) > len(trained) // 2
    shown = subprocess.run(
        [*CLI, "audit", "--dir", str(run.dir)],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert f"Blocks of data: {len(trained)} trained on (eu/0 " in shown.stdout


@pytest.mark.timeout(400)
def test_a_learner_with_another_dataset_is_refused_and_the_other_continues(job):
    regions = [
        {"name": "eu", "learners": 1},
        {"name": "us", "learners": 1, "config": {"items": 1199}},
    ]
    run = job(steps=500, regions=regions)
    run.until(
        lambda: [x for x in events(run, "refuse") if x["reason"] == "Config"],
        240,
        expected="a refusal",
    )
    [detail] = {x["detail"] for x in events(run, "refuse") if x["reason"] == "Config"}
    assert "give all learners the same dataset, or begin another run" in detail
    count = len(events(run, "trained"))
    run.until(lambda: len(events(run, "trained")) > count, 60, expected="the other one continues")
    assert json.dumps(run.status())
