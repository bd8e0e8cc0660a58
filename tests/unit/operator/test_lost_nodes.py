"""Pods of learners that hang in Terminating on a lost node."""

from datetime import timedelta

import pytest

from diloco_testing.kubernetes.operated_job import manifest, refuse, training

AFTER = 60
GONE = {"type": "Ready", "status": "False"}
"""As the node lifecycle controller leaves the condition of a pod that was ready."""


def losing(*conditions, name="a-eu-0", seconds=AFTER):
    """A job of which one pod hangs: its grace period ends now."""
    policy = {} if seconds is None else {"forceDeletePodsAfterSeconds": seconds}
    world = training(manifest(runPolicy=policy))
    pod = world.pods[name]
    pod["metadata"]["deletionTimestamp"] = world.now.isoformat(timespec="seconds")
    pod["status"]["conditions"] = list(conditions or [GONE])
    world.reconcile()
    return world


def forced(decisions):
    return [(ref.kind, ref.name, ref.uid) for ref in decisions.delete if ref.force]


def test_a_learners_pod_on_a_lost_node_is_deleted_by_force_after_its_time_and_replaced():
    world = losing()
    assert forced(world.reconcile(AFTER - 1)) == []
    decisions = world.decide()
    assert decisions.requeue_seconds == 1
    assert forced(world.reconcile(1)) == [("Pod", "a-eu-0", "uid-of-a-eu-0")]
    assert "a-eu-0" not in world.pods
    world.settle()
    assert world.status["state"] == "Training"


def test_a_pod_that_a_finalizer_holds_is_deleted_by_force_once():
    world = losing()
    pod = world.pods["a-eu-0"]
    pod["metadata"]["finalizers"] = ["example.com/stuck"]
    world.now += timedelta(seconds=AFTER)
    assert forced(world.decide())
    pod["metadata"]["deletionGracePeriodSeconds"] = 0
    assert forced(world.decide()) == []


@pytest.mark.parametrize("seconds", [AFTER, None])
def test_the_kept_pod_of_a_failed_learner_is_deleted_by_force_as_a_learners_pod_is(seconds):
    """The learner of a resumed job waits for its name."""
    policy = {} if seconds is None else {"forceDeletePodsAfterSeconds": seconds}
    world = training(manifest(sync={"quorum": 4}, runPolicy=policy))
    refuse(world.pod("a-us-1"))
    world.settle()
    pod = world.pods["a-us-1"]
    assert pod["metadata"]["labels"]["diloco.dev/role"] == "failed-learner"
    pod["metadata"]["deletionTimestamp"] = world.now.isoformat(timespec="seconds")
    pod["status"] = {"phase": "Running", "conditions": [GONE]}
    assert forced(world.reconcile(AFTER - 1)) == []
    due = [("Pod", "a-us-1", "uid-of-a-us-1")] if seconds else []
    assert forced(world.reconcile(1)) == due


def test_without_the_field_such_a_pod_waits_for_ever():
    world = losing(seconds=None)
    assert forced(world.reconcile(10**6)) == []


def test_no_time_at_all_is_a_time():
    world = training(manifest(runPolicy={"forceDeletePodsAfterSeconds": 0}))
    pod = world.pods["a-eu-0"]
    pod["metadata"]["deletionTimestamp"] = world.now.isoformat(timespec="seconds")
    pod["status"]["conditions"] = [GONE]
    assert forced(world.reconcile(1)) == [("Pod", "a-eu-0", "uid-of-a-eu-0")]


@pytest.mark.parametrize(
    "conditions",
    [
        [{"type": "Ready", "status": "Unknown"}],
        # It was not ready when the node was lost; the taint manager deleted it.
        [
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
        ],
    ],
)
def test_other_signs_of_a_lost_node_count_as_well(conditions):
    assert forced(losing(*conditions).reconcile(AFTER))


@pytest.mark.parametrize(
    "conditions",
    [
        # Its kubelet is there: the program does not end, or a volume cannot be unmounted.
        [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}],
        [{"type": "Ready", "status": "True"}],
        [
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
            {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
        ],
        [{"type": "PodScheduled", "status": "True"}],
    ],
)
def test_a_pod_whose_node_answers_is_left_to_its_kubelet(conditions):
    assert forced(losing(*conditions).reconcile(10**6)) == []


TAINTED = [
    {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
    {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
]
ENDED = {"name": "main", "state": {"terminated": {"exitCode": 143}}}


def test_a_pod_that_a_persons_taint_ended_is_left_to_its_kubelet_which_reported_the_end():
    """Such as one whose volume cannot be unmounted."""
    world = losing(*TAINTED)
    world.pods["a-eu-0"]["status"]["containerStatuses"] = [ENDED]
    assert forced(world.reconcile(10**6)) == []


@pytest.mark.parametrize("containers", [[], [ENDED, {"name": "other", "state": {"running": {}}}]])
def test_a_pod_on_a_lost_node_whose_end_is_not_reported_is_deleted_by_force(containers):
    world = losing(*TAINTED)
    world.pods["a-eu-0"]["status"]["containerStatuses"] = containers
    assert forced(world.reconcile(AFTER))


def test_a_pod_that_was_not_deleted_is_left_alone_though_its_node_is_lost():
    world = losing()
    del world.pods["a-eu-0"]["metadata"]["deletionTimestamp"]
    assert forced(world.reconcile(10**6)) == []


def test_the_syncers_pod_is_never_deleted_by_force():
    """Nothing but its volume keeps two syncers apart."""
    assert forced(losing(name="a-syncer-0").reconcile(10**6)) == []


def test_a_pod_of_another_owner_is_left_alone():
    world = losing()
    world.pods["a-eu-0"]["metadata"]["ownerReferences"] = [{"uid": "foreign", "controller": True}]
    assert forced(world.reconcile(10**6)) == []


def orphaned(**owner):
    """A pod hangs on a lost node, and the StatefulSet that controlled it was deleted; another has its name."""
    world = losing()
    world.pods["a-eu-0"]["metadata"]["ownerReferences"] = [
        {"uid": "uid of a former one", "kind": "StatefulSet", "name": "a-eu", "controller": True}
        | owner
    ]
    return world


def test_a_pod_whose_statefulset_was_deleted_is_deleted_by_force_as_well():
    """Its successor waits for the name."""
    world = orphaned()
    assert forced(world.reconcile(AFTER - 1)) == []
    assert forced(world.reconcile(1)) == [("Pod", "a-eu-0", "uid-of-a-eu-0")]
    world = orphaned()
    del world.children["StatefulSet", "a-eu"]
    assert forced(world.reconcile(AFTER)) == [("Pod", "a-eu-0", "uid-of-a-eu-0")]


def test_a_pod_of_another_controller_or_owner_is_not_deleted_by_force():
    assert forced(orphaned(kind="ReplicaSet").reconcile(AFTER)) == []
    world = orphaned(uid="of a person's")
    taken = world.children.pop(("StatefulSet", "a-eu"))
    owners = [{"uid": "of a person", "controller": True}]
    metadata = {**taken["metadata"], "uid": "of a person's", "ownerReferences": owners}
    world.foreign = ({**taken, "metadata": metadata},)
    assert forced(world.reconcile(AFTER)) == []


def test_a_pod_of_a_region_that_the_job_no_longer_has_here_is_left_to_its_controller():
    world = orphaned()
    world.change(regions=[{"name": "us", "learners": 2}])
    assert "a-eu-0" not in [name for _, name, _ in forced(world.reconcile(AFTER))]
