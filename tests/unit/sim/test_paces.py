"""What one learner costs the others, with the real cores of both ends: merges of whole worlds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from diloco_sim.description import Description, sample
from diloco_sim.faults import Plan
from diloco_sim.world import World

pytestmark = pytest.mark.slow  # whole worlds

LAST = "us/3"
BEGIN, END = 40.0, 400.0
STEPS = 690
"""Most of them before END: the faults have to be over while the job trains."""
SETTLED, LATER = 120.0, 640.0
"""When the syncer has measured a distant learner for a while, and the end of what is counted then."""


class Merges:
    """A checker that objects to nothing: it counts merges, and their members."""

    observes = (dict,)

    def __init__(self, since: float, end: float) -> None:
        self.since, self.end = since, end
        self.merges = 0
        self.members: Counter[str] = Counter()

    def observe(self, event: dict[str, Any], now: float) -> None:
        if event["event"] == "merge" and self.since <= now < self.end:
            self.merges += 1
            self.members.update(member["learner"] for member in event["members"])

    def finish(self, now: float) -> None:
        pass


def eight(plan: str, steps: int) -> Description:
    """Eight learners whose steps take a second, and a merge at each step."""
    found = sample(0, steps=steps, faults=False)
    spec = replace(
        found.spec, fragments=24, interval=24, overlap=4, quorum=1, merge="Radial", guard=10.0,
        grace_max_steps=1.0, wire_up="FP32", wire_down="FP32",
    )  # fmt: skip
    return replace(
        found, learners=8, spec=spec, sizes=(10,) * 24, plan=Plan.parse(plan),
        step_seconds=tuple(1.0 + 0.003 * (i % 7) for i in range(8)), latency=0.01,
    )  # fmt: skip


def counted(plan: str, *, since: float = BEGIN, end: float = END) -> Merges:
    counts = Merges(since, end)
    outcome = World(eight(plan, round(STEPS * end / END)), checkers=[counts]).run()
    assert outcome.ok, outcome.violation
    return counts


@pytest.fixture(scope="module")
def undisturbed() -> Merges:
    return counted("")


@pytest.mark.parametrize(
    "fault",
    [
        f"mute {LAST}",
        *(
            pytest.param(fault, marks=pytest.mark.slow_tier)
            for fault in (
                f"trickle {LAST} 100", f"bulk-dead {LAST} syncer", f"cut {LAST} syncer", f"half-open {LAST} syncer",
                f"crash {LAST}", f"wrong-round {LAST}",
            )
        ),
    ],
)  # fmt: skip
def test_one_of_eight_costs_the_others_less_than_2_percent_of_their_merges(fault, undisturbed):
    found = counted(f"{BEGIN}..{END} {fault}")
    assert found.merges >= 0.98 * undisturbed.merges


def test_one_of_eight_that_stands_still_costs_the_others_less_than_2_percent(undisturbed):
    found = counted(f"{BEGIN}..{END} pause {LAST}\n{BEGIN}..{END} pause {LAST}+trainer")
    assert found.merges >= 0.98 * undisturbed.merges


def test_a_learner_with_a_round_trip_of_four_steps_is_in_95_percent_of_the_merges():
    found = counted(f"1..{LATER} latency {LAST} syncer 1.99", since=SETTLED, end=LATER)
    assert found.members[LAST] >= 0.95 * found.merges


def test_a_learner_whose_uploads_take_longer_than_the_overlap_does_not_set_the_pace(undisturbed):
    """It delivers each time, after one and a half times τ steps."""
    found = counted(f"{BEGIN}..{END} latency {LAST} syncer 3.0")
    assert found.merges >= 0.98 * undisturbed.merges


FROM, UNTIL = 40.0, 150.0
"""After the first ejections of a learner whose connections break."""


def of_three(fault: str) -> Merges:
    """The quorum needs eu/0, whose fault lasts, or a learner that is half as fast as the others."""
    found = eight(f"20..{UNTIL} {fault}", 260)
    few = replace(
        found, learners=3, spec=replace(found.spec, quorum=2, overlap=2),
        step_seconds=(1.0, 1.0, 2.2),
    )  # fmt: skip
    counts = Merges(FROM, UNTIL)
    outcome = World(few, checkers=[counts]).run()
    assert outcome.ok, outcome.violation
    return counts


@pytest.mark.parametrize("fault", ["bulk-breaks eu/0 0.001", "control-breaks eu/0 0.001"])
def test_a_member_that_is_lost_right_after_each_pull_costs_the_others_less_than_5_percent(fault):
    """Its reports make up the quorum, so each attempt is repeated after a pause until it is ejected."""
    found, absent = of_three(fault), of_three("leave eu/0")
    assert found.merges >= 0.95 * absent.merges
    assert found.members["eu/0"] == 0
