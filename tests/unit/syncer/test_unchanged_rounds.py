"""A loop that passes no tokens: rounds close without a change, and people must see it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from diloco.spec import RunSpec
from diloco_syncer.core import events as ev
from diloco_syncer.core.engine import Engine
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


class WholeFragments(VirtualJob):
    """A learner that sends whole fragments: what the wire has rounded differs from Θ."""

    def _merging(self, begin: ev.BeginMerge) -> None:
        round_ = next(r for r in self.engine.scheduler.in_flight if r.step == begin.round)
        for name, contribution in round_.contributions.items():
            round_.contributions[name] = replace(contribution, base=None)
        super()._merging(begin)


@pytest.mark.parametrize(
    ("kind", "tokens", "length", "line"),
    [
        (VirtualJob, 10, 1.0, {}),
        (VirtualJob, 10, 0.0, {"unchanged": True}),  # a program that trains a copy
        (WholeFragments, 10, 1.0, {"unchanged": True}),
        (VirtualJob, 0, 1.0, {"unchanged": True}),
    ],
)
def test_a_job_whose_parameters_never_changed_states_it_at_its_end_and_after_a_restart(
    kind, tokens, length, line
):
    spec = RunSpec(job="t", steps=20, fragments=4, interval=4, learners={"eu": 1})
    job = kind(spec, {"eu/0": 1.0})
    job.lengths["eu/0"] = length
    job.learners["eu/0"].tokens_per_step = tokens
    job.join("eu/0")
    job.run(300)
    assert job.engine.complete
    [end] = [found for found in map(json.loads, job.lines) if found["event"] == "complete"]
    assert {key: end[key] for key in ("unchanged",) if key in end} == line
    restarted = Engine.resume(spec, epoch=2, state=job.engine.to_json(), exported=True)
    assert restarted.scheduler.parameters_changed is not bool(line)


def test_a_snapshot_of_an_earlier_release_states_nothing_about_a_change():
    spec = RunSpec(job="t", steps=20, fragments=4, interval=4, learners={"eu": 1})
    state = Engine(spec=spec, epoch=1, initialised=True).to_json()
    del state["parametersChanged"]
    assert Engine.resume(spec, epoch=2, state=state).scheduler.parameters_changed
