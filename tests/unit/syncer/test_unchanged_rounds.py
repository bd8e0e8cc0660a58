"""A loop that passes no tokens: rounds close without a change, and people must see it."""

import json
from typing import Any

from diloco.spec import RunSpec
from diloco_syncer.core.scheduler import UNCHANGED_ROUNDS
from diloco_testing.syncers.virtual_job import VirtualJob


def job_of(tokens: dict[str, int]) -> VirtualJob:
    spec = RunSpec(job="t", steps=200, fragments=4, interval=4, learners={"eu": len(tokens)})
    job = VirtualJob(spec, dict.fromkeys(tokens, 1.0))
    for name, count in tokens.items():
        job.learners[name].tokens_per_step = count
        job.join(name)
    return job


def lines(job: VirtualJob) -> list[dict[str, Any]]:
    """Those of events.jsonl that name the fault."""
    return [line for line in map(json.loads, job.lines) if line["event"] == "unchanged"]


def test_rounds_without_tokens_are_reported_with_the_learners_that_have_none():
    job = job_of({"eu/0": 0, "eu/1": 0})
    job.run(100)
    assert job.engine.scheduler.merges > UNCHANGED_ROUNDS
    waiting = job.engine.waiting_for()
    assert f"the last {job.engine.scheduler.unchanged} merges changed nothing" in waiting
    assert "eu/0, eu/1 reported none" in waiting
    [line] = lines(job)
    assert line["rounds"] == UNCHANGED_ROUNDS
    assert line["learners"] == "eu/0, eu/1"


def test_it_ends_with_the_first_merge_that_changes_something():
    job = job_of({"eu/0": 0, "eu/1": 0})
    job.run(100)
    job.learners["eu/1"].tokens_per_step = 10
    job.run(150)
    assert job.engine.waiting_for() == ""
    assert job.engine.scheduler.unchanged == 0


def test_a_learner_without_tokens_beside_others_is_no_reason_to_wait():
    job = job_of({"eu/0": 0, "eu/1": 10})
    job.run(100)
    assert job.engine.waiting_for() == ""
    assert lines(job) == []
