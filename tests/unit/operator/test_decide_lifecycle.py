"""The lifecycle of a job: running, suspended, complete."""

from dataclasses import replace

import pytest

from diloco_job.reasons import CONDITIONS
from diloco_operator.state.observation import Unreachable
from diloco_testing.kubernetes.operated_job import (
    OperatedJob,
    is_idle,
    manifest,
    set_ready,
    training,
)


def complete(job=None, **answer):
    world = training(job)
    world.answers("Complete", step=2000, model_path="/m", model_sha256="ab", **answer)
    world.settle()
    return world


# ------------------------------------------------------------------------------ first reconcile


def test_the_first_reconcile_writes_all_conditions_and_creates_all_children():
    world = OperatedJob()
    decisions = world.reconcile()
    assert [condition["type"] for condition in world.status["conditions"]] == list(CONDITIONS)
    assert {child["kind"] for child in decisions.apply} == {
        "ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "Service", "PodDisruptionBudget",
        "Deployment", "StatefulSet",
    }  # fmt: skip
    assert world.reason("Accepted") == ("True", "Valid")
    assert world.reason("SyncerReachable") == ("Unknown", "NotAsked")
    assert world.status["state"] == "Pending"


def test_a_job_comes_up_and_trains():
    world = OperatedJob()
    world.reconcile()
    world.run_controllers(ready=lambda pod: False)
    world.reconcile()
    assert world.status["state"] == "Starting"
    assert world.reason("SyncerReady") == ("False", "Starting")
    assert world.reason("SyncerReachable") == ("False", "NotStarted")
    for pod in world.pods.values():
        set_ready(pod, True)
    world.count_pods()
    world.answers()
    world.reconcile()
    assert world.status["state"] == "Training"
    for kind in ("SyncerReady", "SyncerReachable", "LearnersReady", "QuorumMet", "SpecConsistent"):
        assert world.condition(kind)["status"] == "True", kind


def test_the_status_shows_the_syncers_answer():
    world = training()
    world.answers(step=1200, tokens=77, epoch=3, seconds_since_merge=60.0)
    world.reconcile(30)
    status = world.status
    assert (status["step"], status["steps"], status["progress"]) == (1200, 2000, "1200/2000")
    assert (status["tokens"], status["epoch"]) == (77, 3)
    assert status["lastSyncTime"] == "2026-03-01T12:00:30Z"
    assert status["syncer"] == {
        "endpoint": "a-syncer.work.svc:7070",
        "region": "eu",
        "lastMergeTime": "2026-03-01T11:59:30Z",
        "volumeUid": world.children["PersistentVolumeClaim", "a-syncer"]["metadata"]["uid"],
    }
    assert status["learners"] == {"desired": 4, "ready": 4, "training": 4, "summary": "4/4"}
    assert status["observedGeneration"] == 1


def test_a_condition_keeps_its_time_until_it_turns():
    world = training()
    since = world.condition("LearnersReady")["lastTransitionTime"]
    world.answers(gone=("us/1",))
    world.reconcile(60)
    changed = world.condition("LearnersReady")["lastTransitionTime"]
    assert (since, changed) == ("2026-03-01T12:00:00Z", "2026-03-01T12:01:00Z")
    world.change(steps=3000)
    world.reconcile(60)
    assert world.condition("LearnersReady")["lastTransitionTime"] == changed
    assert world.condition("LearnersReady")["observedGeneration"] == 2


# ------------------------------------------------------------------------------ suspend


def test_suspending_frees_all_pods_and_keeps_the_volume():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    assert set(world.replicas().values()) == {0}
    assert not world.pods
    assert ("PersistentVolumeClaim", "a-syncer") in world.children
    assert world.status["state"] == "Suspended"
    assert world.reason("Suspended") == ("True", "Suspended")
    assert "startTime" not in world.status


def test_a_suspended_job_is_at_rest():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    world.reconcile(60)
    decisions = world.reconcile(600)
    assert is_idle(decisions)
    assert decisions.requeue_seconds == 300


def test_resuming_starts_everything_again_and_is_reported():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    world.change(runPolicy={"suspend": False})
    world.reconcile(1000)
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1, "a-us": 2}
    assert world.reason("Suspended") == ("False", "Resumed")
    assert world.status["startTime"] == "2026-03-01T12:16:40Z"
    assert ("Normal", "Resumed") in world.events
    world.run_controllers()
    world.answers(step=500)
    world.settle()
    assert world.status["state"] == "Training"


def test_resuming_resets_the_deadline():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.change(runPolicy={"activeDeadlineSeconds": 100, "suspend": True})
    world.reconcile(90)
    world.reconcile(500)
    world.change(runPolicy={"activeDeadlineSeconds": 100})
    world.reconcile(10)
    world.reconcile(99)
    assert world.condition("Failed")["status"] == "False"
    world.reconcile(1)
    assert world.reason("Failed") == ("True", "DeadlineExceeded")


def test_conditions_of_a_suspended_job_do_not_persist_when_it_resumes():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.reconcile()
    assert world.reason("QuorumMet") == ("False", "Suspended")
    world.change(runPolicy={})
    world.becomes_unreachable()
    world.reconcile(5)
    assert world.reason("SyncerReachable") == ("True", "Answers")
    assert world.reason("QuorumMet") == ("Unknown", "NoAnswer")


def test_conditions_of_a_complete_job_do_not_persist_when_its_steps_are_raised():
    world = complete()
    assert world.reason("QuorumMet") == ("False", "Complete")
    world.change(steps=3000)
    world.becomes_unreachable()
    world.reconcile(5)
    assert world.reason("QuorumMet") == ("Unknown", "NoAnswer")


def test_a_job_that_is_created_suspended_starts_nothing():
    world = OperatedJob(job=manifest(runPolicy={"suspend": True}))
    world.settle()
    assert set(world.replicas().values()) == {0}
    assert world.status["state"] == "Suspended"


# ------------------------------------------------------------------------------ complete


def test_complete_is_written_at_once_with_the_model():
    world = complete()
    assert world.reason("Complete") == ("True", "StepsDone")
    assert world.status["state"] == "Complete"
    assert world.status["progress"] == "2000/2000"
    assert world.status["model"] == {"path": "/m", "sha256": "ab"}
    assert world.status["completionTime"] == "2026-03-01T12:00:00Z"


def test_a_complete_job_whose_parameters_never_changed_states_it_also_without_its_syncer():
    world = training()
    world.answers("Complete", step=2000, unchanged=True)
    world.settle()
    assert world.status["state"] == "Complete"
    assert world.reason("Complete") == ("True", "ParametersUnchanged")
    message = world.condition("Complete")["message"]
    assert "no learner changed the parameters: the model is that of step 0" in message
    assert ("Warning", "ParametersUnchanged") in world.events
    world.becomes_unreachable()
    world.reconcile(3000)
    assert world.reason("Complete") == ("True", "ParametersUnchanged")
    world.change(steps=3000)
    world.reconcile(10)
    world.answers("Complete", step=3000)
    world.settle()
    assert world.reason("Complete") == ("True", "StepsDone")


def test_the_last_step_alone_is_not_complete():
    world = training()
    world.answers("Training", step=2000)
    world.settle()
    assert world.reason("Complete") == ("False", "NotComplete")


def test_a_complete_job_keeps_its_syncer_and_no_learner():
    world = complete()
    assert world.replicas() == {"a-eu": 0, "a-syncer": 1, "a-us": 0}


def test_the_evaluator_may_finish():
    world = training(manifest(evaluation={"everySteps": 50}))
    world.answers("Complete", step=2000, eval_step=1950)
    world.settle()
    assert world.replicas()["a-evaluator"] == 1
    world.answers("Complete", step=2000, eval_step=2000)
    world.settle()
    assert world.replicas()["a-evaluator"] == 0


def test_complete_stays_when_the_syncer_is_deleted():
    world = complete()
    world.becomes_unreachable()
    world.reconcile(3000)
    assert world.reason("Complete") == ("True", "StepsDone")
    assert world.status["step"] == 2000
    assert world.replicas() == {"a-eu": 0, "a-syncer": 1, "a-us": 0}


def test_complete_stays_when_a_syncer_without_its_snapshots_answers():
    world = complete()
    world.answers("Initialising", step=0)
    world.reconcile(60)
    world.answers("Initialising", step=0, tokens=1)
    world.reconcile(60)
    assert world.status["tokens"] == 1
    assert world.reason("Complete") == ("True", "StepsDone")
    assert world.status["step"] == 2000


def test_raising_the_steps_of_a_complete_job_resumes_it():
    world = complete()
    world.change(steps=3000)
    world.reconcile(1000)
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1, "a-us": 2}
    assert world.reason("Complete") == ("False", "StepsRaised")
    assert "completionTime" not in world.status
    assert world.status["startTime"] == "2026-03-01T12:16:40Z"
    world.run_controllers()
    world.answers(step=2100)
    world.settle()
    assert world.status["state"] == "Training"


def test_an_answer_from_before_the_raise_does_not_complete_the_job_again():
    world = complete()
    world.change(steps=3000)
    world.settle()
    assert world.reason("Complete") == ("False", "StepsRaised")


def test_raised_steps_without_a_volume_are_not_accepted_and_make_nothing():
    world = complete(manifest(runPolicy={"cleanupPolicy": "All"}))
    world.reconcile(60)
    assert not world.children
    world.syncer = None
    world.change(steps=3000)
    world.settle()
    assert not world.children
    assert world.reason("Accepted") == ("False", "VolumeGone")
    assert world.reason("Complete") == ("True", "StepsDone")
    assert ("Warning", "VolumeGone") in world.events


def test_a_complete_job_whose_claim_was_deleted_gets_no_empty_claim():
    world = complete()
    del world.children["PersistentVolumeClaim", "a-syncer"]
    world.settle()
    assert not world.children
    assert world.reason("Complete") == ("True", "StepsDone")


# ------------------------------------------------------------------------------ policies


def test_cleanup_policy_none_leaves_everything():
    world = complete(manifest(runPolicy={"cleanupPolicy": "None"}))
    world.reconcile(1000)
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1, "a-us": 2}


def test_cleanup_policy_all_leaves_nothing_after_a_minute():
    world = complete(manifest(runPolicy={"cleanupPolicy": "All"}))
    world.reconcile(59)
    assert world.replicas() == {"a-eu": 0, "a-syncer": 1, "a-us": 0}
    world.reconcile(1)
    assert not world.children
    assert world.status["state"] == "Complete"


def test_a_finished_job_is_removed_when_its_time_has_passed():
    world = complete(manifest(runPolicy={"ttlSecondsAfterFinished": 3600}))
    world.reconcile(3400)
    decisions = world.reconcile(100)
    assert not world.removed
    assert decisions.requeue_seconds == 100
    world.reconcile(100)
    assert world.removed


def test_a_finished_job_without_a_time_to_live_stays():
    world = complete()
    world.reconcile(10**8)
    assert not world.removed


def test_a_job_that_runs_is_not_removed():
    world = training(manifest(runPolicy={"ttlSecondsAfterFinished": 0}))
    world.reconcile(1000)
    assert not world.removed


@pytest.mark.parametrize("seconds", [0, 2**31 - 1])
def test_extreme_times_are_times(seconds):
    policy = {"ttlSecondsAfterFinished": seconds, "activeDeadlineSeconds": seconds}
    world = OperatedJob(job=manifest(runPolicy=policy))
    world.settle()
    assert (world.status["state"] == "Failed") == (seconds == 0)


# ------------------------------------------------------------------------------ others


@pytest.mark.parametrize(
    "spec",
    [
        {"managedBy": "kueue.x-k8s.io/multikueue"},
        {"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}},
    ],
    ids=["where MultiKueue sets it", "its former place"],
)
def test_a_job_that_another_controller_manages_is_left_alone(spec):
    world = OperatedJob(job=manifest(**spec))
    decisions = world.reconcile()
    assert is_idle(decisions)
    assert not world.status
    assert decisions.requeue_seconds == 300


def test_a_job_that_is_being_deleted_gets_no_child_back():
    world = training()
    world.children.clear()
    world.job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    assert is_idle(world.reconcile())


def test_an_invalid_spec_changes_nothing_and_all_its_problems_are_reported():
    world = training()
    previous = dict(world.children)
    status = dict(world.status)
    world.change(steps=0, sync={"quorum": 9, "interval": "x"})
    world.reconcile()
    assert world.children == previous
    assert world.reason("Accepted") == ("False", "InvalidSpec")
    message = world.condition("Accepted")["message"]
    assert "spec.steps" in message
    assert "spec.sync.interval" in message
    assert world.reason("LearnersReady") == ("True", "AllTraining")
    assert world.status["step"] == status["step"]
    assert is_idle(world.reconcile(1000))


def test_a_rule_between_fields_is_a_condition_as_well():
    world = OperatedJob(job=manifest(sync={"quorum": 9}))
    world.reconcile()
    assert not world.children
    assert "9 is more than 4, the number of learners" in world.condition("Accepted")["message"]
    assert len(world.status["conditions"]) == len(CONDITIONS)


def test_a_corrected_spec_is_accepted_again():
    world = training()
    world.change(sync={"quorum": 9})
    world.reconcile()
    world.change(sync={"quorum": 2})
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    assert world.status["state"] == "Training"


def test_an_answer_about_another_job_is_no_answer():
    world = training()
    world.syncer = replace(world.syncer, job="b", step=1999)
    world.reconcile()
    world.last_answer = None
    world.reconcile(100)
    assert world.reason("SyncerReachable") == ("False", "OtherJob")
    assert world.status["step"] == 100


def test_an_unknown_reason_is_reported_with_the_transports_message():
    world = training()
    world.syncer = Unreachable(reason="Odd", message="something odd")
    world.reconcile(100)
    assert world.reason("SyncerReachable") == ("False", "NoAnswer")
    assert "something odd" in world.condition("SyncerReachable")["message"]
