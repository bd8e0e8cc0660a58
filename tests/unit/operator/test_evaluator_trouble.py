"""An evaluator that does not run is named: the job would train, and complete, without scores."""

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

POD = "a-evaluator-0"
LOOP = '{"reason": "CrashLoop", "message": "the evaluator exited 10 times in a row: no data"}'


def evaluated() -> OperatedJob:
    return training(manifest(evaluation={"everySteps": 50}))


def test_an_evaluator_that_runs_is_no_trouble():
    world = evaluated()
    assert world.reason("SyncerReady") == ("True", "Serving")


def test_an_evaluator_that_no_node_fits_is_named_and_the_job_trains():
    world = evaluated()
    world.pod(POD)["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "Insufficient nvidia.com/gpu"}
        ],
    }
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "EvaluatorTrouble")
    message = world.condition("SyncerReady")["message"]
    assert f"pod {POD} cannot be scheduled: Insufficient nvidia.com/gpu" in message
    assert ("Warning", "EvaluatorTrouble") in world.events
    assert world.status["state"] == "Training"
    set_ready(world.pod(POD), True)
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "Serving")


def test_snapshots_that_are_not_copied_are_named_with_their_place_and_the_job_trains():
    world = training(manifest())
    assert world.reason("SyncerReady") == ("True", "Serving")
    world.answers(not_copied_to="s3://bucket/runs/a")
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "SnapshotsNotCopied")
    assert "not copied to s3://bucket/runs/a" in world.condition("SyncerReady")["message"]
    assert world.status["state"] == "Training"


def test_an_evaluator_that_no_quota_admits_is_named_with_the_api_servers_message():
    world = evaluated()
    world.children["Deployment", "a-evaluator"]["status"]["conditions"] = [
        {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "quota"}
    ]
    del world.pods[POD]
    world.reconcile(30)
    assert world.condition("SyncerReady")["message"].endswith(
        "Deployment a-evaluator: FailedCreate: quota"
    )


def test_an_evaluator_whose_volume_cannot_be_mounted_is_named_with_the_kubelets_message():
    world = evaluated()
    since = world.now - timedelta(seconds=19)
    scheduled = {"type": "PodScheduled", "status": "True",
                 "lastTransitionTime": f"{since:%Y-%m-%dT%H:%M:%SZ}"}  # fmt: skip
    world.pod(POD)["status"] = {"phase": "Pending", "conditions": [scheduled]}
    world.report_event(world.pod(POD), "FailedMount", "no such Secret")
    world.reconcile()
    assert world.asked == []
    world.reconcile(1)
    assert world.asked == [POD]
    assert world.condition("SyncerReady")["message"].endswith(
        f"pod {POD}: FailedMount: no such Secret"
    )


def test_an_evaluator_that_runs_is_no_trouble_though_the_pod_before_it_stays_on_a_lost_node():
    world = evaluated()
    lost = world.pod(POD)
    new = copy.deepcopy(lost)
    new["metadata"] |= {"name": "a-evaluator-1", "uid": "uid-of-a-evaluator-1"}
    world.pods["a-evaluator-1"] = new
    ends = world.now - timedelta(hours=1)
    lost["metadata"]["deletionTimestamp"] = f"{ends:%Y-%m-%dT%H:%M:%SZ}"
    lost["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "Serving")
    set_ready(new, False)
    main_of(new)["state"] = {"waiting": {"reason": "ErrImagePull"}}
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "EvaluatorTrouble")
    assert "pod a-evaluator-1: ImagePullBackOff" in world.condition("SyncerReady")["message"]
    del world.pods["a-evaluator-1"]
    world.reconcile(30)
    message = world.condition("SyncerReady")["message"]
    assert f"pod {POD} has been terminating since" in message


def exits(world, count, code, message, *, seconds):
    """The container has run for so long since it last exited."""
    restarted(world.pod(POD), count, code, message=message)
    started = world.now - timedelta(seconds=seconds)
    set_running = {"running": {"startedAt": f"{started:%Y-%m-%dT%H:%M:%SZ}"}}
    main_of(world.pod(POD))["state"] = set_running
    world.pod(POD)["status"]["conditions"] = [{"type": "Ready", "status": "True"}]


def test_an_evaluator_that_keeps_exiting_is_named_once_and_until_it_runs():
    world = evaluated()
    restarted(world.pod(POD), 1, 1, message=LOOP)
    main_of(world.pod(POD))["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "EvaluatorTrouble")
    message = world.condition("SyncerReady")["message"]
    assert "keeps exiting: the evaluator exited 10 times in a row: no data" in message
    exits(world, 2, 1, LOOP, seconds=0)
    assert is_idle(world.reconcile(10)), "a container that begins is as good as the last one"
    world.reconcile(590)
    assert world.reason("SyncerReady") == ("True", "Serving")


@pytest.mark.parametrize(("count", "code"), [(1, 1), (5, 0), (5, 143), (5, 255)])
def test_an_evaluator_that_exited_once_or_was_killed_is_no_trouble(count, code):
    world = evaluated()
    exits(world, count, code, "", seconds=10)
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "Serving")


def test_an_evaluator_that_should_not_run_is_no_trouble():
    world = evaluated()
    world.answers("Complete", step=2000, eval_step=2000)
    world.reconcile()
    exits(world, 3, 1, LOOP, seconds=10)
    world.reconcile(1)
    assert world.reason("SyncerReady") == ("True", "Serving")
