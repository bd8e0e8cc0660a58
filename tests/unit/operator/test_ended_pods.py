"""
Pods that ended and that no controller deletes: those of a Deployment which a node evicted, shut down or rejected.

Kubernetes replaces them and keeps them until it has 12,500 of them: they show nothing about the component.
"""

import copy
from datetime import timedelta

import pytest

from diloco_testing.kubernetes.operated_job import (
    OperatedJob,
    is_idle,
    main_of,
    manifest,
    restarted,
    set_ready,
    training,
)

EVALUATOR, SYNCER = "a-evaluator-0", "a-syncer-0"


def evaluated() -> OperatedJob:
    return training(manifest(evaluation={"everySteps": 50}))


def evicted(world: OperatedJob, pod: str) -> None:
    """The node evicted the pod; its ReplicaSet made another one, which runs."""
    old = world.pods[pod]
    new = copy.deepcopy(old)
    new["metadata"] |= {"name": f"{pod}-new", "uid": f"uid-of-{pod}-new"}
    set_ready(new, True)
    world.pods[f"{pod}-new"] = new
    old["status"] |= {"phase": "Failed", "reason": "Evicted"}
    old["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "PodFailed"}]
    ended = {"exitCode": 137, "reason": "Error", "message": ""}
    main_of(old)["state"] = {"terminated": ended}


def test_an_evaluator_that_runs_is_no_trouble_though_the_pod_before_it_crashed_and_was_evicted():
    world = evaluated()
    restarted(world.pods[EVALUATOR], 3, 137, reason="OOMKilled")
    evicted(world, EVALUATOR)
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "Serving")


def test_no_events_are_read_about_a_pod_that_was_evicted_before_its_containers_were_made():
    world = evaluated()
    evicted(world, EVALUATOR)
    old = world.pods[EVALUATOR]
    del old["status"]["containerStatuses"]
    since = world.now - timedelta(hours=1)
    old["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": since.isoformat()}
    ]
    world.report_event(old, "Evicted", "The node was low on resource: ephemeral-storage")
    world.reconcile(30)
    assert world.asked == []


def test_a_syncer_that_starts_is_described_by_its_pod_and_not_by_the_one_before():
    world = evaluated()
    evicted(world, SYNCER)
    set_ready(world.pods[f"{SYNCER}-new"], False)
    world.pods[f"{SYNCER}-new"]["status"]["phase"] = "Pending"
    world.count_pods()
    world.becomes_unreachable()
    world.reconcile(30)
    assert world.condition("SyncerReady")["message"].endswith(
        f"pod {SYNCER}-new is Pending, not ready"
    )


def test_where_no_other_pod_is_left_the_ended_one_is_described():
    world = evaluated()
    evicted(world, SYNCER)
    del world.pods[f"{SYNCER}-new"]
    world.count_pods()
    world.becomes_unreachable()
    world.reconcile(30)
    message = world.condition("SyncerReady")["message"]
    assert message.endswith("the pod does not exist yet")


def test_a_suspended_job_has_no_pods_left_and_those_that_ended_neither():
    """Or `kubectl wait --for=delete pod` before a resume would wait for them in vain."""
    world = evaluated()
    for pod in (EVALUATOR, SYNCER):
        evicted(world, pod)
        owner = {"kind": "ReplicaSet", "name": "a-1", "uid": "uid-of-a-1", "controller": True}
        world.pods[pod]["metadata"]["ownerReferences"] = [owner]
    assert is_idle(world.reconcile(1)), "a running job keeps them, as every Deployment does"
    world.change(runPolicy={"suspend": True})
    deleted = {ref.name for ref in world.reconcile(1).delete if ref.kind == "Pod"}
    assert deleted == {EVALUATOR, SYNCER}


@pytest.mark.parametrize("other", ["labels", "ownerReferences"])
def test_an_ended_pod_of_another_owner_is_left_alone(other):
    world = evaluated()
    evicted(world, SYNCER)
    metadata = world.pods[SYNCER]["metadata"]
    owner = {"kind": "ReplicaSet", "name": "a-1", "uid": "uid-of-a-1", "controller": True}
    metadata["ownerReferences"] = [owner]
    if other == "labels":
        metadata["labels"]["app.kubernetes.io/managed-by"] = "diloco-operator-eu"
    else:
        metadata["ownerReferences"] = []
    world.change(runPolicy={"suspend": True})
    assert not [ref for ref in world.reconcile(1).delete if ref.kind == "Pod"]
