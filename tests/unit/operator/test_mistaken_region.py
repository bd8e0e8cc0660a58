"""
A region.name that is in no region of a job, and is set back: jobs that ended stay ended, with their evidence.

`helm upgrade --set region.name=eu2`, a slip of the keyboard, and minutes later the right name again.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from diloco_testing.kubernetes.operated_job import SCOPE, refuse, trains_in

EU = replace(SCOPE, region="eu")


@contextmanager
def mistaken(world, name="eu2"):
    """The operator runs with another name for some minutes."""
    world.scope = replace(SCOPE, region=name)
    for _ in range(3):
        world.reconcile(60)
        world.run_controllers()
    yield
    world.scope = EU
    for _ in range(4):
        world.reconcile(60)
        world.run_controllers()


def failed(**spec):
    """Of the syncer's cluster, because of a learner whose pods were kept."""
    world = trains_in("eu", sync={"quorum": 4}, **spec)
    refuse(world.pod("a-eu-1"))
    world.settle()
    world.reconcile(600)
    world.run_controllers()
    world.settle()
    assert world.reason("Failed") == ("True", "LearnerRefused")
    return world


def complete(**storage):
    """Of the syncer's cluster, with cleanupPolicy All: nothing is left, unless the volume is retained."""
    world = trains_in("eu", runPolicy={"cleanupPolicy": "All"})
    world.change(syncer={**world.job["spec"]["syncer"], "storage": {"size": "1Gi", **storage}})
    world.settle()
    world.answers("Complete", step=2000)
    world.settle()
    world.syncer = None
    for _ in range(4):
        world.reconcile(120)
        world.run_controllers()
    assert world.reason("Complete") == ("True", "StepsDone")
    assert not world.replicas()
    return world


def ended(world):
    """What must not change."""
    status = world.status
    times = {name: status.get(name) for name in ("startTime", "completionTime", "step")}
    conditions = {
        name: (*world.reason(name), world.condition(name)["lastTransitionTime"])
        for name in ("Complete", "Failed")
    }
    return times, conditions, status["syncer"].get("volumeUid")


def test_a_failed_job_stays_failed_and_keeps_its_failed_pods():
    world = failed()
    before, children = ended(world), dict(world.children)
    assert [*world.pods] == ["a-eu-1"]
    with mistaken(world):
        assert world.reason("Accepted") == ("False", "RegionChanged")
        assert [*world.pods] == ["a-eu-1"]
        assert world.children == children
    assert ended(world) == before
    assert [*world.pods] == ["a-eu-1"]
    assert not any(world.replicas().values())
    assert world.reason("Accepted") == ("True", "Valid")


def test_a_failed_job_of_which_only_the_kept_pods_are_left_keeps_them():
    world = failed()
    world.children.clear()
    before = ended(world)
    with mistaken(world):
        assert world.reason("Accepted") == ("False", "RegionNotInSpec")
        assert (
            "if region.name was changed by mistake, set it back"
            in world.condition("Accepted")["message"]
        )
        assert [*world.pods] == ["a-eu-1"]
        assert world.status["state"] == "Failed"
    assert ended(world) == before
    assert [*world.pods] == ["a-eu-1"]


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
def test_a_complete_job_stays_complete_and_starts_nothing(policy):
    world = complete(whenDeleted=policy)
    assert {kind for kind, _ in world.children} <= {"PersistentVolumeClaim"}
    before = ended(world)
    with mistaken(world):
        assert world.reason("Accepted") == ("False", "RegionNotInSpec")
        assert ended(world) == before
        assert world.status["state"] == "Complete"
    assert ended(world) == before
    assert not world.replicas()
    assert not world.pods


def test_a_running_job_is_left_as_it_is():
    world = trains_in("eu")
    children, pods, volume = dict(world.children), sorted(world.pods), ended(world)[2]
    assert volume
    with mistaken(world):
        assert world.reason("Accepted") == ("False", "RegionChanged")
        assert (world.children, sorted(world.pods)) == (children, pods)
    assert (world.children, sorted(world.pods)) == (children, pods)
    assert ended(world)[2] == volume
    assert world.status["state"] == "Training"


def test_the_time_to_live_of_a_complete_job_does_not_start_over():
    world = complete()
    world.change(runPolicy={"cleanupPolicy": "All", "ttlSecondsAfterFinished": 3600})
    with mistaken(world):
        assert not world.removed
    world.reconcile(3600 - 13 * 60)
    assert world.removed
