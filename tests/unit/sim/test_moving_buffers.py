"""Worlds whose last fragment holds buffers: the replay compares their averages, and finds what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from diloco_sim import report
from diloco_sim.description import sample
from diloco_sim.world import World
from diloco_syncer.core.outer import OuterOptimizer
from diloco_syncer.merging import arithmetic
from diloco_testing.sim.worlds import Recorder, small, violation

BUFFERS = (3, 200, 40)
"""The first holds integers."""


def test_buffers_are_merged_in_turn_over_kills_and_restarts():
    merges = Recorder("merge")
    plan = "8..9 crash syncer\n 14..16 crash eu/1"
    outcome = World(small(plan, buffers=BUFFERS), checkers=[merges]).run()
    assert outcome.ok, report.text_of(outcome)
    of_buffers = [line for line in merges.lines if line.get("buffers")]
    assert len(of_buffers) >= 15
    assert {line["fragment"] for line in of_buffers} == {1}
    assert all("buffers" not in line for line in merges.lines if line["fragment"] == 0)


def test_a_quarter_of_the_worlds_have_buffers():
    with_buffers = [seed for seed in range(200) if sample(seed).buffers]
    assert 25 <= len(with_buffers) <= 75
    assert all(sample(seed).layout.fragments[-1].buffers for seed in with_buffers)


def test_the_replay_finds_an_outer_optimizer_of_buffers(monkeypatch: pytest.MonkeyPatch):
    outer = OuterOptimizer(learning_rate=0.7, momentum=0.0, nesterov=False)
    monkeypatch.setattr(arithmetic, "REPLACE", outer)
    assert violation(small(buffers=BUFFERS)).checker == "replay"


def test_the_replay_finds_integers_that_are_averaged(monkeypatch: pytest.MonkeyPatch):
    def average(norms: Any, weights: Any, **others: Any) -> Any:
        return blend(norms, np.ones(len(weights)), **others)

    blend = arithmetic.blend
    monkeypatch.setattr(arithmetic, "blend", average)
    assert violation(small(buffers=BUFFERS)).checker == "replay"
