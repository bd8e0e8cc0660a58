"""The pods of failed learners stay after their job failed, without resources, until it is resumed or deleted."""

import pytest

from diloco_operator.decide import kept_pods
from diloco_testing.kubernetes.operated_job import (
    is_idle,
    manifest,
    refuse,
    training,
    trains_in,
)

ALL_NEEDED = {"sync": {"quorum": 4}}
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}


def failed(*refused: str, labels=None, **spec):
    """A job that failed because these pods were refused; the status shows it, and nothing else happened."""
    body = manifest(**{**ALL_NEEDED, **spec})
    body["metadata"]["labels"] = labels or {}
    world = training(body)
    for name in refused:
        refuse(world.pod(name))
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRefused")
    return world


def kept(world):
    """Names of the pods that are left, which all are kept ones."""
    roles = {pod["metadata"]["labels"]["diloco.dev/role"] for pod in world.pods.values()}
    assert roles <= {kept_pods.ROLE}
    return sorted(world.pods)


def test_the_failed_pods_of_a_failed_job_stay_and_the_others_go():
    world = failed("a-us-1")
    world.settle()
    assert kept(world) == ["a-us-1"]
    assert not any(world.replicas().values())


def test_a_kept_pod_has_ended_and_belongs_to_the_job():
    """So it holds no resources and no quota, and goes with the job."""
    world = failed("a-us-1")
    world.settle()
    pod = world.pod("a-us-1")
    assert pod["spec"]["activeDeadlineSeconds"] == 1
    assert pod["status"]["phase"] == "Failed"
    assert "hidden size 4" in str(pod["status"]["containerStatuses"])
    [owner] = pod["metadata"]["ownerReferences"]
    assert owner["uid"] == "uid-of-a"


def test_a_stateful_set_is_scaled_only_when_it_has_released_its_failed_pods():
    """Its controller would delete them, from a list that may be older than their labels."""
    world = failed("a-us-1")
    world.reconcile(1)
    assert world.replicas() == {"a-eu": 0, "a-us": 2, "a-syncer": 0}
    world.reconcile(1)
    assert world.replicas()["a-us"] == 2
    world.run_controllers()
    world.reconcile(1)
    assert world.replicas()["a-us"] == 0


def test_a_controller_that_releases_nothing_holds_no_pod_of_the_job():
    world = failed("a-us-1")
    first = world.reconcile(1)
    assert first.patch
    assert first.requeue_seconds <= kept_pods.RELEASE_SECONDS
    world.reconcile(kept_pods.RELEASE_SECONDS)
    assert world.replicas()["a-us"] == 0


def test_a_server_that_refuses_to_change_the_pods_does_not_keep_the_job_running():
    world = failed("a-us-1")
    world.patch = lambda body: None
    world.reconcile(1)
    assert world.replicas()["a-us"] == 2
    world.reconcile(kept_pods.RELEASE_SECONDS)
    assert world.replicas()["a-us"] == 0
    assert not world.decide().patch


def test_a_kept_pod_whose_containers_do_not_end_is_deleted():
    """Such as on a lost node: it would hold its accelerators."""
    world = failed("a-us-1")
    world.settle()
    world.pod("a-us-1")["status"]["phase"] = "Running"
    assert 0 < world.decide().requeue_seconds <= kept_pods.END_SECONDS
    world.reconcile(kept_pods.END_SECONDS)
    assert kept(world) == []


@pytest.mark.parametrize("policy", ["None", "All"])
def test_only_the_default_policy_changes_pods(policy):
    world = failed("a-us-1", runPolicy={"cleanupPolicy": policy})
    assert not world.reconcile(1).patch


def test_a_resumed_job_replaces_the_kept_pods():
    world = failed("a-us-1")
    world.settle()
    world.change(runPolicy={"suspend": True})
    world.settle()
    assert world.reason("Suspended")[0] == "True"
    assert kept(world) == []
    world.change(runPolicy={"suspend": False})
    world.settle()
    assert world.pod("a-us-1")["metadata"]["labels"]["diloco.dev/role"] == "learner"


def test_kept_pods_are_no_learners():
    world = failed("a-us-1")
    world.settle()
    assert world.status["learners"]["ready"] == 0
    assert is_idle(world.reconcile(10_000))


def test_all_pods_of_a_failed_learner_stay_together():
    learner = {"command": ["python3", "train.py"], "podsPerLearner": 2}
    world = failed("a-us-3", learner=learner)
    world.settle()
    assert kept(world) == ["a-us-2", "a-us-3"]


def test_no_more_than_so_many_pods_are_kept():
    regions = [{"name": "eu", "learners": kept_pods.MAX_KEPT + 5}]
    names = [f"a-eu-{index}" for index in range(kept_pods.MAX_KEPT + 5)]
    world = failed(*names, regions=regions, sync={"quorum": 1})
    world.settle()
    assert len(kept(world)) == kept_pods.MAX_KEPT


def test_pods_that_kueue_admitted_are_not_kept():
    """It holds them with a finalizer."""
    world = failed("a-us-1-1", labels=QUEUE)
    assert not world.reconcile(1).patch
    world.run_controllers()
    assert kept(world) == []


def test_a_region_that_follows_the_syncers_region_keeps_its_failed_pods_too():
    world = trains_in("us")
    refuse(world.pod("a-us-1"))
    world.reconcile()
    world.answers(failure=None)
    world.change(runPolicy={"activeDeadlineSeconds": 5})
    world.reconcile(5)
    assert world.reason("Failed")[0] == "True"
    world.settle()
    assert kept(world) == ["a-us-1"]


def test_a_kept_pod_whose_job_was_orphaned_and_applied_again_is_deleted():
    """No other controller would delete it, and the new learner waits for its name."""
    world = failed("a-us-1")
    world.settle()
    orphan = world.pod("a-us-1")
    orphan["metadata"]["ownerReferences"] = []
    again = training(manifest())
    again.pods["a-us-1"] = orphan
    assert ("Pod", "a-us-1") in {(ref.kind, ref.name) for ref in again.reconcile(1).delete}


@pytest.mark.parametrize(
    "metadata",
    [
        {"ownerReferences": [{"uid": "uid-of-another", "kind": "DiLoCoJob", "name": "a"}]},
        {
            "ownerReferences": [],
            "labels": {"diloco.dev/role": kept_pods.ROLE, "diloco.dev/job": "b"},
        },
    ],
)
def test_a_kept_pod_of_another_job_is_left_alone(metadata):
    world = failed("a-us-1")
    world.settle()
    other = world.pod("a-us-1")
    other["metadata"].update(metadata)
    again = training(manifest())
    again.pods["a-us-1"] = other
    assert "a-us-1" not in {ref.name for ref in again.reconcile(1).delete}


def test_a_pod_of_a_failed_learner_that_has_no_node_is_not_kept():
    """No kubelet would end it."""
    learner = {"command": ["python3", "train.py"], "podsPerLearner": 2}
    world = failed("a-us-3", learner=learner)
    world.pod("a-us-2")["status"] = {"phase": "Pending"}
    world.settle()
    assert kept(world) == ["a-us-3"]


def test_a_pod_of_a_failed_learner_whose_kubelet_still_starts_it_is_kept():
    learner = {"command": ["python3", "train.py"], "podsPerLearner": 2}
    world = failed("a-us-3", learner=learner)
    pod = world.pod("a-us-2")
    pod["status"] = {"phase": "Pending"}
    pod["spec"] = {**pod["spec"], "nodeName": "node-1"}
    world.settle()
    assert kept(world) == ["a-us-2", "a-us-3"]
