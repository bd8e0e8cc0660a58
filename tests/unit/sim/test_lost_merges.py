"""Starts that lose merges enlarge Θ by large outer steps only, and only if they lose some."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_sim.description import sample
from diloco_sim.lost_merges import LostMerges


@pytest.mark.parametrize(
    ("learning_rate", "lossy_starts", "may_halt"),
    [(1.0, 3, False), (1.0, 4, True), (0.4, 10, False)],
    ids=["three starts", "four starts", "small outer steps"],
)
def test_a_job_may_halt_after_many_starts_that_lost_merges_to_large_outer_steps(
    learning_rate: float, lossy_starts: int, may_halt: bool
):
    spec = replace(sample(0).spec, outer_learning_rate=learning_rate, outer_momentum=0.9)
    lost = LostMerges(spec)
    lost.started(0)
    for _ in range(lossy_starts):
        lost.merged(7)
        lost.started(0)
    assert lost.may_halt is may_halt


def test_starts_that_lose_nothing_explain_no_growth():
    lost = LostMerges(replace(sample(0).spec, outer_learning_rate=1.0, outer_momentum=0.9))
    for step in range(20):
        lost.started(step)
        lost.merged(step + 1)
        lost.started(step + 1)
    assert not lost.may_halt
