"""No decision depends on the clock of the day: a world in which it jumps is the same world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_sim.clock import Process
from diloco_sim.description import sample
from diloco_sim.faults import Plan
from diloco_sim.world import World
from diloco_testing.sim.worlds import Recorder

pytestmark = pytest.mark.slow  # whole worlds

DAY = 86400.0


def world(plan: str) -> list[tuple[float, dict[str, Any]]]:
    found = sample(0, steps=40, faults=False)
    recorder = Recorder("merge", "join", "leave", "refuse", "eject")
    outcome = World(replace(found, plan=Plan.parse(plan)), checkers=[recorder]).run()
    assert outcome.ok, outcome.violation
    return recorder.seen


def test_jumps_of_the_clock_of_the_day_by_days_change_no_decision(monkeypatch):
    jumped, set_wall = [], Process.set_wall

    def counting(process: Process, seconds: float) -> None:
        jumped.append(process.name)
        set_wall(process, seconds)

    monkeypatch.setattr(Process, "set_wall", counting)
    names = sample(0, steps=40, faults=False).names
    jumps = [f"5..5 wall-jump syncer {DAY}", f"17..17 wall-jump syncer {-3 * DAY}"]
    jumps += [f"{6 + i}..{6 + i} wall-jump {name} {-DAY}" for i, name in enumerate(names)]
    undisturbed = world("")
    assert sum(event["event"] == "merge" for _, event in undisturbed) >= 10
    assert world("\n".join(jumps)) == undisturbed
    assert {"syncer", *names} <= set(jumped)
