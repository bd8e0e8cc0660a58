"""Every line that a syncer writes to events.jsonl is a record that readers know, with all of its fields."""

import pytest

from diloco.journal import records
from diloco_sim.description import sample
from diloco_sim.world import World
from diloco_testing.properties import seeds

ALWAYS = {"epoch", "event", "time"}


def fields_of(kind: str) -> set[str]:
    return {key for _, key, *_ in records._table(records.KINDS[kind])}


@pytest.mark.parametrize("seed", seeds(3, range(700, 712)))
def test_every_line_of_a_world_is_a_known_record_without_unknown_fields(seed, monkeypatch):
    lines, observe = [], World.observe

    def keep(world, event):
        if isinstance(event, dict):
            lines.append(event)
        observe(world, event)

    monkeypatch.setattr(World, "observe", keep)
    assert World(sample(seed, steps=60)).run().ok
    assert lines
    for line in lines:
        assert line["event"] in records.KINDS, line
        assert set(line) - ALWAYS <= fields_of(line["event"]), line["event"]
