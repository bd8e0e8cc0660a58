"""Two writers that each restore their own value: the operator does not write for ever."""

from datetime import timedelta

import pytest

from diloco_operator.decide.decisions import Decisions
from diloco_operator.repairs import AT_ONCE, Repairs, other_writer
from diloco_testing.kubernetes.reconciled_cluster import NOW

CHILD = ("ConfigMap", "a-spec")


def after(seconds):
    return NOW + timedelta(seconds=seconds)


def test_repairs_in_a_row_wait_longer_and_longer_and_at_most_an_hour():
    repairs, now, waits = Repairs(), 0.0, []
    for _ in range(AT_ONCE + 9):
        start = now
        while repairs.must_wait(CHILD, after(now)):
            now += 1.0
        waits.append(now - start)
        repairs.record(CHILD, after(now))
    assert waits == [0.0] * AT_ONCE + [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_repairs_that_are_not_of_one_row_never_wait():
    repairs = Repairs()
    for number in range(50):
        assert not repairs.must_wait(CHILD, after(601 * number))
        assert not repairs.record(CHILD, after(601 * number))


def test_each_child_has_its_own_row_and_a_change_of_the_manifest_ends_it():
    repairs = Repairs()
    assert [repairs.record(CHILD, NOW) for _ in range(AT_ONCE)] == [False] * (AT_ONCE - 1) + [True]
    assert repairs.must_wait(CHILD, NOW)
    assert not repairs.must_wait(("ConfigMap", "other"), NOW)
    repairs.forget(CHILD)
    assert not repairs.must_wait(CHILD, NOW)


def test_a_clock_that_is_set_back_makes_no_repair_wait():
    repairs = Repairs()
    for _ in range(AT_ONCE):
        repairs.record(CHILD, after(10**6))
    assert not repairs.must_wait(CHILD, NOW)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (
            [
                {"manager": "kyverno", "time": "2026-01-02T00:00:00Z"},
                {"manager": "kubectl", "time": "2026-01-01T00:00:00Z"},
                {"manager": "diloco-operator", "time": "2026-01-03T00:00:00Z"},
                {"manager": "kubelet", "time": "2026-01-04T00:00:00Z", "subresource": "status"},
            ],
            "field manager kyverno",
        ),
        ([{"manager": "diloco-operator-eu"}], "its field manager is not known"),
        ([], "its field manager is not known"),
    ],
)
def test_the_other_writer_is_the_field_manager_of_the_last_change(entries, named):
    assert other_writer({"metadata": {"managedFields": entries}}, "diloco-operator") == named


def contest(world):
    """One reconcile after another writer changed the child; whether the operator restored it."""
    world.api.edit("configmaps", "a-spec", lambda item: item["data"].update(x="of another"))
    world.run()
    return world.api.get("configmaps", "a-spec")["data"]["x"] == "1"


def recreate(world):
    """One reconcile after another writer deleted the child; whether the operator made it again."""
    if world.api.get("configmaps", "a-spec") is not None:
        world.api.delete("configmaps", "a-spec")
    world.run()
    return world.api.get("configmaps", "a-spec") is not None


def restore_copy(world):
    """One reconcile after another writer restored a copy of its own, with the hash of that time."""

    def change(item):
        item["data"].update(x="of another")
        item["metadata"]["annotations"]["diloco.dev/applied"] = "old"

    world.api.edit("configmaps", "a-spec", change)
    world.run()
    return world.api.get("configmaps", "a-spec")["data"]["x"] == "1"


@pytest.mark.parametrize("undo", [recreate, restore_copy])
def test_a_child_that_another_writer_deletes_or_restores_is_repaired_less_and_less_often(
    world, undo
):
    world.decide = lambda observation: Decisions(apply=(world.child(),))
    world.run()
    assert [undo(world) for _ in range(AT_ONCE + 3)] == [True] * AT_ONCE + [False] * 3
    (event,) = world.api.all("events")
    assert (event["type"], event["reason"]) == ("Warning", "Contested")
    assert ("ConfigMap a-spec (deleted each time)" in event["message"]) == (undo is recreate)
    world.now += timedelta(seconds=60)
    assert [undo(world), undo(world)] == [True, False]


def test_a_child_that_another_writer_always_changes_back_is_repaired_less_and_less_often(world):
    world.decide = lambda observation: Decisions(apply=(world.child(), world.child("a-2")))
    world.run()
    assert [contest(world) for _ in range(AT_ONCE + 5)] == [True] * AT_ONCE + [False] * 5
    (event,) = world.api.all("events")
    assert (event["type"], event["reason"]) == ("Warning", "Contested")
    assert "ConfigMap a-spec" in event["message"]
    world.now += timedelta(seconds=60)
    assert [contest(world), contest(world)] == [True, False]
    assert len(world.api.all("events")) == 2
    world.decide = lambda observation: Decisions(apply=(world.child(applied="2"),))
    assert contest(world), "the manifest has changed"
