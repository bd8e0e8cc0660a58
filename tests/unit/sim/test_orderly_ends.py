"""What a simulated process finds when it starts again: a learner on its own disk, a syncer that got SIGTERM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_sim.checkers.observations import Resumed
from diloco_sim.world import World
from diloco_testing.sim.worlds import small

pytestmark = pytest.mark.slow  # whole worlds


@pytest.mark.parametrize(
    ("kind", "resumed"),
    [("lost", False), ("old", True), ("foreign", False), ("damaged", False)],
)
def test_a_learner_uses_only_a_local_checkpoint_of_its_run_that_can_be_loaded(kind, resumed):
    world = World(replace(small(f"20..21 checkpoint-{kind} eu/0"), checkpoint_every=4))
    outcome = world.run()
    assert outcome.ok, outcome.violation
    assert world.learners["eu/0"].core.resumed is resumed


class Starts:
    """Global steps of the starts of a syncer, and of its orderly ends."""

    observes = (dict, Resumed)

    def __init__(self) -> None:
        self.started: list[int] = []
        self.stopped: list[int] = []

    def observe(self, event: dict[str, Any] | Resumed, now: float) -> None:
        if isinstance(event, Resumed):
            self.started.append(event.step)
        elif event["event"] == "stop":
            self.stopped.append(event["step"])

    def finish(self, now: float) -> None:
        pass


def test_a_syncer_that_ends_in_an_orderly_way_loses_no_merge():
    starts, description = Starts(), small("15..17 leave syncer")
    rarely = replace(description.spec.syncer_checkpoint, every_steps=1000)
    spec = replace(description.spec, syncer_checkpoint=rarely)
    outcome = World(replace(description, spec=spec), checkers=[starts]).run()
    assert outcome.ok, outcome.violation
    assert starts.started == [0, *starts.stopped]
    assert starts.stopped[0] > 5


def test_a_crash_while_the_last_snapshot_is_written_is_an_ordinary_crash():
    outcome = World(
        small("15..25 disk-hang syncer\n 15..17 leave syncer\n 16..18 crash syncer")
    ).run()
    assert outcome.ok, outcome.violation
