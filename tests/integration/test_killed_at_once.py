"""All processes of a run are killed at once, again and again, and the run continues from its newest snapshot."""

from __future__ import annotations

import random
import sys
import time

import pytest
import yaml

from diloco.journal import reader
from diloco.journal.audit import audit_parts
from diloco_testing.local.run_process import LocalRun, manifest

pytestmark = [pytest.mark.slow, pytest.mark.slow_tier, pytest.mark.timeout(1800)]

PROGRAM = """
import time
import torch
from diloco_worker import Learner

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
learner = Learner.connect(model, optimizer)
for block in learner.blocks(1200, size=12):
    for first in range(block.range.start, block.range.stop, 4):
        time.sleep(0.05)
        optimizer.zero_grad()
        loss = model(torch.full((4, 8), first / 1200)).square().mean()
        loss.backward()
        optimizer.step()
        learner.step(tokens=4, loss=loss)
        if learner.done:
            break
"""

KILLS, SCALED_AT, STEPS = 20, 10, 400
MOST_SECONDS = 12.0
"""From a start until the kill: some moments are before the first step, most are after it."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that completed after 20 kills; from the tenth on, us has two learners."""
    folder = tmp_path_factory.mktemp("killed")
    program = folder / "train.py"
    program.write_text(PROGRAM)
    job = manifest("killed", learners=2, steps=STEPS)
    job["spec"]["learner"] = {
        "command": [sys.executable, str(program)], "checkpoint": {"everySteps": 10},
    }  # fmt: skip
    job["spec"]["sync"] = {"fragments": 2, "interval": 4}
    job["spec"]["syncer"] = {"checkpoint": {"everySteps": 5, "keep": 3}}
    del job["spec"]["evaluation"]
    moments = random.Random(20)
    started = LocalRun(folder, job)
    try:
        for kill in range(KILLS):
            time.sleep(moments.uniform(0.0, MOST_SECONDS))  # the moment is the fault
            assert started.process.poll() is None, started.tail()
            started.stop()
            if kill == SCALED_AT:
                job["spec"]["regions"][1]["learners"] = 2
                started.job.write_text(yaml.safe_dump(job))
            started.start()
        assert started.wait(600) == 0, started.tail()
        yield started
    finally:
        started.stop()


def test_each_start_has_the_newest_snapshot_that_was_complete(run):
    newest, starts = 0, []
    for line in run.lines("events.jsonl"):
        if line["event"] == "snapshot" and line["ok"]:
            newest = line["step"]
        elif line["event"] == "start":
            # A snapshot may be complete before its line is: both were killed.
            assert line["step"] >= newest
            starts.append(line["step"])
            newest = line["step"]
    assert starts == sorted(starts)
    assert len(starts) > KILLS / 2  # some moments are before the syncer has started


def test_the_audit_finds_each_report_merged_once_and_each_block_trained_on_once(run):
    found = audit_parts(reader.lines(run.dir / "events.jsonl"))
    assert found.ok, found.violations
    assert run.step() == STEPS
    trained = [line for line in run.lines("events.jsonl") if line["event"] == "trained"]
    assert {line["learner"] for line in trained} == {"eu/0", "us/0", "us/1"}
