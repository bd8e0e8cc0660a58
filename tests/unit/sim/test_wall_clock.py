"""No decision depends on the clock of the day: a world in which it jumps is the same world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_sim.clock import Process
from diloco_sim.description import sample
from diloco_sim.faults import Plan
from diloco_sim.world import World

pytestmark = pytest.mark.slow  # whole worlds

DAY = 86400.0


class Merges:
    """A checker that objects to nothing: it keeps what was merged when."""

    observes = (dict,)

    def __init__(self) -> None:
        self.seen: list[tuple[float, dict[str, Any]]] = []

    def observe(self, event: dict[str, Any], now: float) -> None:
        if event["event"] in ("merge", "join", "leave", "refuse", "eject"):
            self.seen.append((now, event))

    def finish(self, now: float) -> None:
        pass


def world(plan: str) -> list[tuple[float, dict[str, Any]]]:
    found = sample(0, steps=40, faults=False)
    merges = Merges()
    outcome = World(replace(found, plan=Plan.parse(plan)), checkers=[merges]).run()
    assert outcome.ok, outcome.violation
    return merges.seen


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
