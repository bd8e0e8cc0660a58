"""What a simulated learner trains is behind an interface: when its methods are called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_sim.description import Description
from diloco_sim.memory import F32, ToyModel
from diloco_sim.world import World
from diloco_testing.sim.worlds import small

SHORT, LONG = "12..13 crash us/0+trainer", "12..25 crash us/0+trainer"


class Traced(ToyModel):
    """A toy that records its calls."""

    def __init__(self, calls: list[str], of: Description) -> None:
        super().__init__(of.layout, start=1, target=2)
        self.calls = calls
        self.begun: F32 | None = None
        calls.append("start")

    def begin(self, *, local_step: int, global_step: int) -> None:
        self.calls.append(f"begin {local_step} {global_step}")
        self.begun = self._flat.copy()

    def step(self) -> float:
        assert self.begun is not None
        assert (self.begun == self._flat).all(), "the values changed within a step"
        self.calls.append("step")
        return super().step()

    def load(self, saved: F32) -> None:
        self.calls.append("load")
        super().load(saved)

    def load_optimizers(self, saved: F32) -> None:
        self.calls.append("load optimizers")


def calls(description: Description) -> dict[str, list[str]]:
    """Of each learner."""
    found: dict[str, list[str]] = {name: [] for name in description.names}
    world = World(description, new_model=lambda name: Traced(found[name], description))
    assert world.run().ok
    return found


def test_each_step_begins_with_the_position_and_ends_without_a_change_of_the_values():
    for own in calls(small()).values():
        assert own[0] == "start"
        begins, steps = own[1::2], own[2::2]
        assert set(steps) == {"step"}
        assert [int(b.split()[1]) for b in begins] == list(range(len(begins)))
        of_schedule = [int(b.split()[2]) for b in begins]
        assert of_schedule == sorted(of_schedule)
        assert of_schedule[-1] >= 38


@pytest.mark.parametrize(
    ("plan", "every", "loads"),
    [(SHORT, 5, ["load"]), (LONG, 5, ["load optimizers"]), (SHORT, None, []), (LONG, None, [])],
)
def test_a_restarted_learner_loads_what_is_of_use_of_its_checkpoint(plan, every, loads):
    own = calls(replace(small(plan), checkpoint_every=every))["us/0"]
    assert own.count("start") == 2
    assert [call for call in own if call.startswith("load")] == loads


class Diverging(ToyModel):
    def step(self) -> float:
        return float("nan")


def test_a_loss_that_is_not_finite_reaches_the_core_as_such():
    description = small()
    world = World(
        description, new_model=lambda name: Diverging(description.layout, start=1, target=2)
    )
    world.run()
    learner = world.learners["us/0"]
    assert learner.core.state().loss is None
    assert learner.core.state().problem
