"""A failing world becomes smaller while it still fails."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from diloco_sim.faults import Fault, Kind, Plan
from diloco_sim.shrink import ddmin, shrink


@dataclass(frozen=True)
class FakeWorld:
    seed: int
    learners: int
    steps: int
    plan: Plan


def fault(number: int, seconds: float = 8.0) -> Fault:
    return Fault(Kind.CUT, f"eu/{number}", float(number), number + seconds, "syncer")


@pytest.mark.parametrize("needed", [(), (3,), (0, 19), (4, 5, 6), tuple(range(0, 20, 3))])
def test_ddmin_finds_the_items_that_are_needed(needed):
    runs: list[tuple[int, ...]] = []

    def fails(items: tuple[int, ...]) -> bool:
        runs.append(items)
        return set(needed) <= set(items)

    assert ddmin(range(20), fails) == needed
    assert len(runs) < 250


def test_ddmin_leaves_nothing_that_can_be_left_out_also_where_failures_have_several_causes():
    source = random.Random(1)
    for _ in range(200):
        causes = [frozenset(source.sample(range(12), source.randint(1, 4))) for _ in range(3)]

        def fails(items: tuple[int, ...], causes: list[frozenset[int]] = causes) -> bool:
            return any(cause <= set(items) for cause in causes)

        found = ddmin(range(12), fails)
        assert fails(found)
        assert not any(fails(found[:i] + found[i + 1 :]) for i in range(len(found)))
        assert list(found) == sorted(found)


def test_a_world_loses_faults_learners_steps_and_time():
    def fails(world: FakeWorld) -> bool:
        cuts = {f.target: f.end - f.begin for f in world.plan}
        return (
            world.learners >= 3
            and world.steps >= 37
            and cuts.get("eu/2", 0) >= 2
            and "eu/7" in cuts
        )

    world = FakeWorld(1, 8, 200, Plan.of(*(fault(i) for i in range(20))))
    found = shrink(world, fails)
    assert (found.seed, found.learners, found.steps) == (1, 3, 37)
    assert [f.target for f in found.plan] == ["eu/2", "eu/7"]
    assert found.plan.faults[0].end - found.plan.faults[0].begin == 2.0
    assert found.plan.faults[1].end - found.plan.faults[1].begin < 0.02


def test_a_change_that_allows_another_is_found():
    """With fewer steps a fault is no longer needed."""

    def fails(world: FakeWorld) -> bool:
        return world.steps <= 50 or len(world.plan) == 2

    found = shrink(FakeWorld(1, 2, 200, Plan.of(fault(1), fault(2))), fails)
    assert (found.steps, len(found.plan), found.learners) == (1, 0, 1)


def test_the_number_of_runs_is_bounded():
    runs = 0

    def fails(world: FakeWorld) -> bool:
        nonlocal runs
        runs += 1
        return len(world.plan) >= 5

    world = FakeWorld(1, 8, 200, Plan.of(*(fault(i) for i in range(20))))
    found = shrink(world, fails, most_runs=6)
    assert runs == 6
    assert fails(found)
    assert len(found.plan) < 20


def test_not_fewer_learners_than_allowed():
    assert shrink(FakeWorld(1, 8, 10, Plan()), lambda _: True, least_learners=2).learners == 2
