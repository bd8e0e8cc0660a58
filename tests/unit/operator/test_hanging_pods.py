"""Children that were deleted and stay, and pods whose node does not respond, are named with the cause."""

from datetime import timedelta

import pytest

from diloco_testing.kubernetes.operated_job import is_idle, manifest, set_ready, training

LOST = {"type": "Ready", "status": "False"}
"""As the node lifecycle controller leaves the condition of a pod that was ready."""


def hanging(name, seconds, conditions=(LOST,), finalizers=()):
    """A job of which one pod should have ended so many seconds ago."""
    world = training()
    pod = world.pods[name]
    set_ready(pod, False)
    pod["spec"] = {**pod["spec"], "nodeName": "node-7"}
    ends = world.now - timedelta(seconds=seconds)
    pod["metadata"] |= {"deletionTimestamp": f"{ends:%Y-%m-%dT%H:%M:%SZ}"}
    pod["metadata"]["finalizers"] = list(finalizers)
    if conditions:
        pod["status"]["conditions"] = list(conditions)
    world.count_pods()
    return world


def since(world, name):
    return world.pods[name]["metadata"]["deletionTimestamp"]


def test_a_learner_that_hangs_on_a_lost_node_is_named_with_its_node_and_since_when():
    world = hanging("a-eu-0", 60)
    world.reconcile()
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    assert world.condition("LearnersReady")["message"] == (
        f"pod a-eu-0 has been terminating since {since(world, 'a-eu-0')}: its node node-7 does not "
        'respond; see "Lost nodes" in docs/operations.md'
    )
    assert ("Warning", "PodTrouble") in world.events
    assert is_idle(world.reconcile(10)), "the message does not change with time"


@pytest.mark.parametrize(
    ("seconds", "conditions"), [(-60, (LOST,)), (0, (LOST,)), (59, (LOST,)), (299, ())]
)
def test_a_pod_that_still_has_time_to_end_is_no_trouble(seconds, conditions):
    """Where the node responds, volumes may be unmounted slowly."""
    world = hanging("a-eu-0", seconds, conditions=conditions)
    world.reconcile()
    assert world.reason("LearnersReady") == ("False", "SomeNotTraining")


@pytest.mark.parametrize(
    ("finalizers", "cause"),
    [
        (["a.io/x", "b.io/y"], "finalizers a.io/x, b.io/y"),
        ([], "node node-7 does not report its end"),
    ],
)
def test_a_pod_that_hangs_on_a_node_that_responds_is_named_with_what_holds_it(finalizers, cause):
    world = hanging("a-eu-0", 3600, conditions=(), finalizers=finalizers)
    world.reconcile()
    assert cause in world.condition("LearnersReady")["message"]


@pytest.mark.parametrize(
    ("grace", "cause"), [(0, ": finalizers a.io/x"), (30, ": its node node-7 does not respond")]
)
def test_a_pod_of_a_lost_node_that_was_deleted_by_force_is_named_with_the_finalizers_that_hold_it(
    grace, cause
):
    world = hanging("a-eu-0", 3600, finalizers=["a.io/x"])
    world.pods["a-eu-0"]["metadata"]["deletionGracePeriodSeconds"] = grace
    world.reconcile()
    assert cause in world.condition("LearnersReady")["message"]


def test_a_pod_whose_node_does_not_respond_is_named_before_it_is_deleted():
    world = training()
    pod = world.pods["a-us-1"]
    pod["spec"] = {**pod["spec"], "nodeName": "node-7"}
    pod["status"]["conditions"] = [LOST]
    world.count_pods()
    world.reconcile()
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    assert world.condition("LearnersReady")["message"].startswith(
        "pod a-us-1: its node node-7 does not respond; see"
    )


def test_a_syncer_that_hangs_on_a_lost_node_is_named_though_its_successor_waits_for_the_volume():
    world = hanging("a-syncer-0", 300)
    waiting = {**world.pods["a-syncer-0"], "status": {"phase": "Pending"}}
    waiting["metadata"] = {"name": "a-syncer-1", "uid": "u", "labels": waiting["metadata"]["labels"],
                           "ownerReferences": waiting["metadata"]["ownerReferences"]}  # fmt: skip
    world.pods["a-syncer-1"] = waiting
    world.becomes_unreachable()
    world.reconcile()
    assert world.reason("SyncerReady") == ("False", "PodTrouble")
    message = world.condition("SyncerReady")["message"]
    assert message.startswith(
        f"pod a-syncer-0 has been terminating since {since(world, 'a-syncer-0')}: its node node-7"
    )
    assert ("Warning", "PodTrouble") in world.events


# ------------------------------------------------------------------------------ of a job that does not run


def suspended(world):
    world.change(runPolicy={"suspend": True})
    world.reconcile()


def complete(world):
    world.answers(state="Complete", step=2000, eval_step=2000)
    world.reconcile()


def failed(world):
    world.change(runPolicy={"activeDeadlineSeconds": 0})
    for _ in range(2):
        world.reconcile()


def ends(world, *names, seconds):
    """These pods, which should have ended so many seconds ago, are the last ones."""
    for name in names:
        pod = world.pods[name]
        pod["spec"] = {**pod["spec"], "nodeName": "node-7"}
        pod["status"]["conditions"] = [LOST]
        ends = world.now - timedelta(seconds=seconds)
        pod["metadata"]["deletionTimestamp"] = f"{ends:%Y-%m-%dT%H:%M:%SZ}"
    world.pods = {name: world.pods[name] for name in names}
    world.syncer = None
    world.count_pods()


@pytest.mark.parametrize("stop", [suspended, failed])
def test_pods_that_hang_after_the_job_was_stopped_are_named(stop):
    world = training()
    stop(world)
    ends(world, "a-eu-0", "a-syncer-0", seconds=60)
    before = world.status["state"]
    world.reconcile()
    for condition, name in (("LearnersReady", "a-eu-0"), ("SyncerReady", "a-syncer-0")):
        assert world.reason(condition) == ("False", "PodTrouble")
        assert world.condition(condition)["message"] == (
            f"pod {name} has been terminating since {since(world, name)}: its node node-7 does not "
            'respond; see "Lost nodes" in docs/operations.md'
        )
    assert world.events.count(("Warning", "PodTrouble")) == 2
    assert world.status["state"] == before
    world.reconcile(60)
    assert is_idle(world.reconcile(30)), "the message does not change with time"
    world.pods.clear()
    world.reconcile()
    assert world.reason("LearnersReady") == world.reason("SyncerReady") == ("False", before)


def test_a_learner_and_an_evaluator_that_hang_after_completion_are_named():
    world = training(manifest(evaluation={"everySteps": 5, "command": ["python", "eval.py"]}))
    complete(world)
    ends(world, "a-evaluator-0", "a-us-1", seconds=60)
    world.reconcile()
    assert world.reason("LearnersReady") == ("False", "PodTrouble")
    message = world.condition("LearnersReady")["message"]
    assert message.startswith("pod a-evaluator-0 has been terminating since")
    assert message.endswith("(and 1 more pods)")


def test_a_stopped_job_is_looked_at_again_soon_while_its_pods_end():
    """No event announces that a pod has not ended."""
    world = training()
    suspended(world)
    ends(world, "a-eu-0", seconds=-90)
    assert world.reconcile(60).requeue_seconds <= 30
    assert world.reason("LearnersReady") == ("False", "Suspended")
    world.pods.clear()
    assert world.reconcile().requeue_seconds > 30


def test_a_job_that_resumes_begins_again_although_its_pods_hung():
    world = training()
    suspended(world)
    ends(world, "a-eu-0", seconds=60)
    world.reconcile()
    world.pods.clear()
    world.change(runPolicy={"suspend": False})
    world.reconcile()
    assert world.reason("LearnersReady") == ("False", "Starting")
    assert world.reason("SyncerReady") == ("False", "Starting")


# ------------------------------------------------------------------------------ other children


def deleted(world, kind, name, seconds, finalizers=("example.com/stuck",)):
    ends = world.now - timedelta(seconds=seconds)
    world.children[kind, name]["metadata"] |= {
        "deletionTimestamp": f"{ends:%Y-%m-%dT%H:%M:%SZ}", "finalizers": list(finalizers)
    }  # fmt: skip
    return f"{ends:%Y-%m-%dT%H:%M:%SZ}"


@pytest.mark.parametrize(
    "child", [("Service", "a-syncer"), ("StatefulSet", "a-eu"), ("Deployment", "a-syncer")]
)
def test_a_child_that_was_deleted_and_stays_is_named_with_its_finalizers(child):
    world = training()
    when = deleted(world, *child, 300)
    world.reconcile()
    assert world.reason("Accepted") == ("True", "ChildTerminating")
    message = world.condition("Accepted")["message"]
    named = f"{' '.join(child)} (since {when}; finalizers: example.com/stuck)"
    assert named in message
    assert ("Warning", "ChildTerminating") in world.events
    world.children[child]["metadata"].pop("deletionTimestamp")
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")


def test_a_deletion_that_takes_a_while_is_no_trouble():
    world = training()
    deleted(world, "StatefulSet", "a-eu", 299)
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")


def test_the_claim_that_is_being_deleted_has_a_reason_of_its_own():
    world = training()
    deleted(world, "PersistentVolumeClaim", "a-syncer", 3600)
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")
    assert world.reason("SyncerReady") == ("True", "VolumeTerminating")
