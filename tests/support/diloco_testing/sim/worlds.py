"""Small simulated worlds for tests that break a core, and what their journal has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diloco_sim.checkers.checker import Violation
from diloco_sim.description import Description, sample
from diloco_sim.faults import Plan
from diloco_sim.world import World


def small(plan: str = "", **changes: Any) -> Description:
    """Three learners of one speed and two fragments; a step takes a second."""
    found = sample(0, steps=40, faults=False)
    spec = replace(found.spec, fragments=2, interval=2, overlap=1, quorum=2, merge="Average",
                   outer_momentum=0.5, wire_up="FP32", wire_down="FP32", grace_max_steps=0.0)  # fmt: skip
    return replace(
        found, learners=3, spec=spec, sizes=(40, 50, 60), step_seconds=(1.0, 1.1, 1.2),
        plan=Plan.parse(plan), checkpoint_every=None, latency=0.01, **{"data": None, "moments": 0, **changes},
    )  # fmt: skip


class Recorder:
    """A checker that finds nothing: it keeps the lines of these events, each with its time."""

    observes = (dict,)

    def __init__(self, *events: str) -> None:
        self.events = events
        self.seen: list[tuple[float, dict[str, Any]]] = []

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Without the times."""
        return [line for _, line in self.seen]

    def observe(self, event: dict[str, Any], now: float) -> None:
        """Keep a line."""
        if event["event"] in self.events:
            self.seen.append((now, event))

    def finish(self, now: float) -> None:
        """At the end of the world."""


def violation(description: Description) -> Violation:
    """What a world finds that must find something."""
    found = World(description).run().violation
    assert found is not None
    return found


def every_step(description: Description) -> Description:
    """With a snapshot after each merge."""
    kept = replace(description.spec.syncer_checkpoint, every_steps=1, keep=3)
    return replace(description, spec=replace(description.spec, syncer_checkpoint=kept))
