"""Loops of simulated learners that take blocks of data, and the checker of their fates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_sim.description import Description, sample
from diloco_sim.world import World
from diloco_testing.sim import block_breaks
from diloco_testing.sim.worlds import Recorder, every_step, small, violation
from diloco_worker.core.open_blocks import Data

pytestmark = pytest.mark.slow  # whole worlds

FEW, MANY = Data(items=50, size=4, ahead=1), Data(items=40_000, size=4, ahead=1)
"""13 blocks, so that passes end often; more blocks than are ever leased."""


def with_blocks(plan: str = "", data: Data = FEW, **changes: object) -> Description:
    """The small world whose loops make two steps with a block."""
    return replace(small(plan, data=data, block_steps=2), **changes)


def test_each_pass_leases_every_block_once():
    lines = Recorder("trained")
    outcome = World(with_blocks(), checkers=[lines]).run()
    assert outcome.ok, outcome.violation
    serials = [block["block"] for line in lines.lines for block in line["blocks"]]
    assert len(serials) == len(set(serials)) > 40  # three passes of 13
    assert sorted(serials)[:39] == list(range(39))


@pytest.mark.parametrize(
    "plan",
    [
        "5..6 crash syncer\n 9..11 crash eu/0+trainer",
        "5..20 cut eu/0 syncer\n 10..11 crash syncer",
        "6..20 pause us/0+trainer\n 8..9 crash syncer power",
        "5..20 blocks-kept eu/0\n 4..20 blocks-false us/0\n 11..12 crash syncer",
        "5..20 half-open eu/0 syncer\n 7..8 leave eu/1",
    ],
)
@pytest.mark.parametrize("data", [FEW, MANY], ids=["few", "many"])
def test_each_block_has_one_fate_whatever_happens(plan, data):
    outcome = World(with_blocks(plan, data)).run()
    assert outcome.ok, outcome.violation


def test_a_learner_whose_lease_was_lost_trains_on_and_its_block_counts_for_another():
    """Cut off for longer than HOLD_SECONDS: the others train on what it had."""
    lines = Recorder("release", "lease", "trained")
    description = with_blocks("5..70 cut eu/0 syncer", steps=200)
    outcome = World(description, checkers=[lines]).run()
    assert outcome.ok, outcome.violation
    lost = next(line for line in lines.lines if line["event"] == "release")
    assert (lost["learner"], lost["reason"]) == ("eu/0", "Overdue")
    serial = lost["blocks"][0]["first"]
    counted = [
        line["learner"]
        for line in lines.lines
        if line["event"] == "trained" and serial in [block["block"] for block in line["blocks"]]
    ]
    assert len(counted) == 1
    assert counted[0] != "eu/0"


@pytest.mark.parametrize(
    ("apply", "sentence", "description"),
    [
        (block_breaks.blocks_leased_twice, "while it is open at", with_blocks("5..6 crash eu/0+trainer")),
        (block_breaks.passes_that_overlap, "block", with_blocks("5..20 pause eu/0+trainer")),
        (block_breaks.blocks_lost, "open below", every_step(with_blocks("5..6 crash eu/0+trainer"))),
        (block_breaks.blocks_forgotten, "other blocks of data", every_step(with_blocks("9..10 crash syncer"))),
        (block_breaks.blocks_counted_too_early, "its loop began it", with_blocks()),
        (block_breaks.one_learner_without_blocks, "us/0 has waited for a block", with_blocks(steps=1000)),
    ],
)  # fmt: skip
def test_a_broken_ledger_is_found(monkeypatch, apply, sentence, description):
    assert World(description).run().ok
    apply(monkeypatch)
    found = violation(description)
    assert found.checker == ("durable" if apply is block_breaks.blocks_forgotten else "blocks")
    assert sentence in found.sentence


def test_a_part_of_the_drawn_worlds_has_blocks():
    drawn = [sample(seed, steps=40) for seed in range(200)]
    with_data = [description for description in drawn if description.data is not None]
    assert 40 < len(with_data) < 80
    assert {len(str(d.blocks)) > 4 for d in with_data} == {True, False}
    kinds = {f.kind.value for d in with_data for f in d.plan}
    assert {"blocks-kept", "blocks-false"} <= kinds
