"""The guard changes no merge of honest learners: nothing is clipped, and no weight is limited."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_sim import report
from diloco_sim.description import sample
from diloco_sim.world import World
from diloco_syncer.core.guard import GUARDED_MEMBERS

pytestmark = pytest.mark.slow  # whole worlds

SEEDS = (2, 4, 5, 6, 8, 10)
"""Three to five learners of different speeds, up to 1.4 times the tokens per step of another."""


class Merges:
    """The merge lines of a world."""

    observes = (dict,)

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def observe(self, event: dict[str, Any], now: float) -> None:
        if event["event"] == "merge":
            self.lines.append(event)

    def finish(self, now: float) -> None:
        pass


@pytest.mark.parametrize("seed", SEEDS)
def test_no_merge_of_a_world_without_faults_is_changed_by_the_guard(seed):
    merges = Merges()
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
