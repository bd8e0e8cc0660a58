"""Starts that lose merges enlarge Θ by large outer steps only, if they lose some, and until a round is durable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_sim.description import sample
from diloco_sim.lost_merges import LostMerges
from diloco_sim.world import World


def of_large_steps(fragments: int = 2) -> LostMerges:
    steps = {"outer_learning_rate": 1.0, "outer_momentum": 0.9}
    return LostMerges(replace(sample(0).spec, fragments=fragments, interval=8, overlap=1, **steps))


def lossy_starts(lost: LostMerges, count: int, *, step: int = 0) -> None:
    for _ in range(count):
        lost.merged(step + 7, 0)
        lost.started(step)


@pytest.mark.parametrize(
    ("learning_rate", "starts", "may_halt"),
    [(1.0, 3, False), (1.0, 4, True), (0.4, 10, False)],
    ids=["three starts", "four starts", "small outer steps"],
)
def test_a_job_may_halt_after_many_starts_that_lost_merges_to_large_outer_steps(
    learning_rate: float, starts: int, may_halt: bool
):
    spec = replace(sample(0).spec, outer_learning_rate=learning_rate, outer_momentum=0.9)
    lost = LostMerges(spec)
    lost.started(0)
    lossy_starts(lost, starts)
    assert lost.may_halt is may_halt


def test_starts_that_lose_nothing_explain_no_growth():
    lost = of_large_steps()
    for step in range(20):
        lost.started(step)
        lost.merged(step + 1, 0)
        lost.started(step + 1)
    assert not lost.may_halt


def test_a_durable_round_of_all_fragments_ends_the_growth():
    lost = of_large_steps()
    lossy_starts(lost, 9)
    lost.merged(1, 0)
    lost.durable(1)
    assert lost.may_halt, "fragment 1 was not merged since the start"
    lost.merged(2, 1)
    lost.durable(1)
    assert lost.may_halt, "no snapshot has that merge"
    lost.durable(2)
    assert not lost.may_halt
    lost.merged(3, 0)
    lossy_starts(lost, 3, step=2)
    assert not lost.may_halt, "three starts count, not those before the snapshot"


def test_fragments_that_were_merged_before_a_start_do_not_end_the_growth():
    lost = of_large_steps()
    lossy_starts(lost, 9)
    lost.merged(1, 0)
    lost.started(1)
    lost.merged(2, 1)
    lost.durable(2)
    assert lost.may_halt


def test_the_growth_returns_with_the_loss_of_the_snapshot_that_ended_it():
    lost = of_large_steps(fragments=1)
    lossy_starts(lost, 9)
    lost.merged(1, 0)
    lost.durable(1)
    lost.started(1)
    assert not lost.may_halt
    lost.started(0)  # from an older snapshot: the disk has damaged the newest
    assert lost.may_halt


def test_a_world_notes_durable_rounds_unless_its_job_has_halted():
    world = World(sample(0))
    lost = world._lost_merges = of_large_steps(fragments=1)
    lossy_starts(lost, 9)
    merge = {"event": "merge", "step": 1, "fragment": 0, "members": []}
    snapshot = {"event": "snapshot", "ok": True, "step": 1, "epoch": 1}
    world._checkers.observe = lambda event, now: None  # type: ignore[method-assign]
    world.observe(merge)
    world.halt = "growth"
    world.observe(snapshot)
    assert lost.may_halt, "the snapshot was taken before the job halted"
    world.halt = ""
    world.observe({**snapshot, "ok": False})
    assert lost.may_halt
    world.observe(snapshot)
    assert not lost.may_halt
