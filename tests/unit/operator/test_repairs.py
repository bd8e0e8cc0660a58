"""Two writers that each restore their own value: the operator does not write forever."""

from datetime import timedelta

import pytest

from diloco_operator.decide.decisions import Decisions, decide
from diloco_operator.repairs import AT_ONCE, Repairs, other_writer
from diloco_testing.kubernetes.reconciled_cluster import NOW, SCOPE, ReconciledCluster, reasons

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
        repairs.record(CHILD, "x", after(now))
    assert waits == [0.0] * AT_ONCE + [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_repairs_that_are_not_of_one_row_never_wait():
    repairs = Repairs()
    for number in range(50):
        assert not repairs.must_wait(CHILD, after(601 * number))
        repairs.record(CHILD, "x", after(601 * number))
        assert not list(repairs.contested(after(601 * number)))


def test_each_child_has_its_own_row_and_a_change_of_the_manifest_ends_it():
    repairs, contested = Repairs(), []
    for _ in range(AT_ONCE):
        repairs.record(CHILD, "x", NOW)
        contested.append(list(repairs.contested(NOW)))
    assert contested == [[]] * (AT_ONCE - 1) + [[(CHILD, "x")]]
    assert repairs.must_wait(CHILD, NOW)
    assert not repairs.must_wait(("ConfigMap", "other"), NOW)
    repairs.forget(CHILD)
    assert not repairs.must_wait(CHILD, NOW)


def test_a_clock_that_is_set_back_makes_no_repair_wait():
    repairs = Repairs()
    for _ in range(AT_ONCE):
        repairs.record(CHILD, "x", after(10**6))
    assert not repairs.must_wait(CHILD, NOW)


def test_a_change_of_the_manifest_ends_the_wait_of_all_children():
    """A person who changes it may have stopped the other writer; other children are repaired too."""
    repairs = Repairs()
    repairs.begin(1)
    for _ in range(AT_ONCE):
        repairs.record(CHILD, "x", NOW)
    repairs.applied(CHILD, "hash")
    repairs.begin(1)
    assert repairs.must_wait(CHILD, NOW)
    repairs.begin(2)
    assert not repairs.must_wait(CHILD, NOW)
    assert repairs.restores(CHILD, "hash"), "a writer that continues is contested again"


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


def test_a_child_is_contested_until_it_stays_for_ten_minutes():
    repairs = Repairs()
    for _ in range(AT_ONCE):
        repairs.record(CHILD, "x", NOW)
    assert repairs.must_wait(CHILD, after(50)), "the repair was undone again"
    assert list(repairs.contested(after(649)))
    assert not list(repairs.contested(after(650)))


def contested(children=()):
    """Applies these children; the status shows which of them are contested."""
    return lambda observation: Decisions(
        apply=tuple(children), status={"state": "; ".join(observation.contested)}
    )


def state(world):
    return world.api.get("dilocojobs", "a")["status"]["state"]


@pytest.mark.parametrize("undo", [recreate, restore_copy])
def test_a_child_that_another_writer_deletes_or_restores_is_repaired_less_and_less_often(
    world, undo
):
    world.decide = contested([world.child()])
    world.run()
    assert [undo(world) for _ in range(AT_ONCE + 3)] == [True] * AT_ONCE + [False] * 3
    assert state(world).startswith("ConfigMap a-spec (")
    assert ("(deleted each time)" in state(world)) == (undo is recreate)
    world.now += timedelta(seconds=60)
    assert [undo(world), undo(world)] == [True, False]
    world.api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=9))
    assert [undo(world) for _ in range(AT_ONCE + 1)] == [True] * AT_ONCE + [False]


def test_a_child_that_another_writer_always_changes_back_is_repaired_less_and_less_often(world):
    world.decide = contested([world.child(), world.child("a-2")])
    world.run()
    assert [contest(world) for _ in range(AT_ONCE + 5)] == [True] * AT_ONCE + [False] * 5
    assert state(world).startswith("ConfigMap a-spec (")
    world.now += timedelta(seconds=60)
    assert [contest(world), contest(world)] == [True, False]
    world.decide = contested([world.child(applied="2")])
    assert contest(world), "the manifest has changed"
    assert state(world) == ""


def test_the_condition_names_the_contested_child_and_its_writer_until_it_stays_as_it_is(world):
    """The Event about it expires."""
    world.decide = lambda observation: decide(observation, SCOPE, world.now)

    def accepted():
        return reasons(world.api)["Accepted"]

    def undo():
        world.api.edit("services", "a-eu", lambda item: item["spec"].update(clusterIP="1.2.3.4"))
        world.run()

    world.run()
    for _ in range(AT_ONCE - 1):
        undo()
    assert accepted()[:2] == ("True", "Valid")
    undo()
    status, reason, message = accepted()
    assert (status, reason) == ("True", "Contested")
    assert "Service a-eu (its field manager is not known)" in message
    warnings = [e["reason"] for e in world.api.all("events") if e["type"] == "Warning"]
    assert warnings == ["Contested"]
    for _ in range(5):
        undo()
        assert accepted()[1] == "Contested"
    world.now += timedelta(seconds=60)
    world.run()
    world.now += timedelta(seconds=599)
    world.run()
    assert accepted()[1] == "Contested"
    world.now += timedelta(seconds=1)
    world.run()
    assert accepted()[:2] == ("True", "Valid")


def edit(world):
    world.api.edit("services", "a-eu", lambda item: item["spec"].update(clusterIP="1.2.3.4"))


def delete(world):
    if world.api.get("services", "a-eu") is not None:
        world.api.delete("services", "a-eu")


def restore(world):
    edit(world)
    world.api.edit(
        "services",
        "a-eu",
        lambda item: item["metadata"]["annotations"].update({"diloco.dev/applied": "old"}),
    )


@pytest.mark.parametrize("undo", [edit, delete, restore])
def test_a_new_operator_knows_from_the_status_what_is_contested(world, tmp_path, undo):
    world.decide = lambda observation: decide(observation, SCOPE, world.now)
    world.run()
    for _ in range(AT_ONCE + 1):
        undo(world)
        world.run()
    assert reasons(world.api)["Accepted"][1] == "Contested"
    new = ReconciledCluster(world.api, tmp_path)
    new.decide = lambda observation: decide(observation, SCOPE, new.now)
    before = len(world.api.writes())
    for seconds in (0, 59):
        new.now = after(seconds)
        new.run()
    assert not world.api.writes()[before:]
    new.now = after(60)
    new.run()
    assert "1.2.3.4" not in str(world.api.get("services", "a-eu")), "repaired once more"
    assert reasons(world.api)["Accepted"][1] == "Contested"
    new.now = after(60 + 600)
    new.run()
    assert reasons(world.api)["Accepted"][:2] == ("True", "Valid")
    new.reconciler.close()


def test_a_new_operator_repairs_at_once_what_a_newer_manifest_states(world, tmp_path):
    world.decide = lambda observation: decide(observation, SCOPE, world.now)
    world.run()
    for _ in range(AT_ONCE + 1):
        edit(world)
        world.run()
    world.api.edit("dilocojobs", "a", lambda item: item["spec"].update(steps=9))
    new = ReconciledCluster(world.api, tmp_path)
    new.decide = lambda observation: decide(observation, SCOPE, new.now)
    new.run()
    assert "1.2.3.4" not in str(world.api.get("services", "a-eu"))
    assert reasons(world.api)["Accepted"][:2] == ("True", "Valid")
    new.reconciler.close()
