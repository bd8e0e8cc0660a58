"""The guard changes no merge of honest learners: nothing is clipped, and no weight is limited."""

from __future__ import annotations

import pytest

from diloco_sim import report
from diloco_sim.description import sample
from diloco_sim.world import World
from diloco_syncer.core.guard import GUARDED_MEMBERS
from diloco_testing.sim.worlds import Recorder

pytestmark = pytest.mark.slow  # whole worlds

SEEDS = (2, 4, 5, 6, 8, 10)
"""Three to five learners of different speeds, up to 1.4 times the tokens per step of another."""


@pytest.mark.parametrize("seed", SEEDS)
def test_no_merge_of_a_world_without_faults_is_changed_by_the_guard(seed):
    merges = Recorder("merge")
    outcome = World(sample(seed, faults=False), checkers=[merges]).run()
    assert outcome.ok, report.text_of(outcome)
    guarded = [
        line
        for line in merges.lines
        if len(line["members"]) >= GUARDED_MEMBERS and "buffers" not in line
    ]
    assert len(guarded) >= 20
    for line in guarded:
        assert line["guard"] > 0
        for member in line["members"]:
            assert member["clipped"] == 0
            assert 0 < member["ofMedian"] < 0.5 * line["guard"]
            assert member["weight"] == member["tokens"] ** 2 / member["steps"]
