"""The lifecycle of a job: running, suspended, complete, failed."""

import json
from dataclasses import replace

import pytest

from diloco_job.reasons import CONDITIONS
from diloco_operator.state.observation import Unreachable
from diloco_testing.kubernetes.operated_job import (
    OperatedJob,
    is_idle,
    main_of,
    manifest,
    refuse,
    restarted,
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


def test_the_evaluator_is_not_waited_for_for_ever():
    world = training(manifest(evaluation={"everySteps": 50}))
    world.answers("Complete", step=2000, eval_step=1950)
    world.settle()
    assert world.reconcile(100).requeue_seconds == 20
    world.reconcile(20)
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


# ------------------------------------------------------------------------------ failed

ALL_NEEDED = {"sync": {"quorum": 4}}
"""A learner that failed fails the job."""


def test_the_deadline_fails_a_job_and_frees_its_pods():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    assert world.reconcile(95).requeue_seconds == 5
    assert world.reconcile(5).requeue_seconds == 1
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
    assert world.status["state"] == "Failed"
    world.reconcile(1)
    assert set(world.replicas().values()) == {0}
    assert ("PersistentVolumeClaim", "a-syncer") in world.children
    assert world.status["completionTime"] == "2026-03-01T12:01:40Z"
    assert ("Warning", "DeadlineExceeded") in world.events


def test_a_failed_job_stays_failed_until_it_is_suspended():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile(100)
    message = world.condition("Failed")["message"]
    world.change(runPolicy={}, steps=9000)
    world.run_controllers()
    world.answers("Complete", step=9000)
    world.reconcile(100)
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
    assert world.condition("Failed")["message"] == message
    assert set(world.replicas().values()) == {0}
    assert world.reason("Complete") == ("False", "NotComplete")


@pytest.mark.parametrize(("policy", "left"), [("None", 5), ("Running", 0), ("All", 0)])
def test_the_cleanup_policy_holds_for_a_failed_job(policy, left):
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 9, "cleanupPolicy": policy}))
    world.reconcile(9)
    world.reconcile(1)
    assert sum(world.replicas().values()) == left
    assert bool(world.children) == (policy != "All")


def die_before_the_status(world):
    """The operator carries out what it decides, and is killed before it writes the status."""
    previous = world.job.get("status")
    world.reconcile(1)
    world.job["status"] = previous
    world.run_controllers()


@pytest.mark.parametrize("policy", ["Running", "All"])
def test_a_failed_job_stays_failed_if_the_operator_is_killed_at_that_moment(policy):
    """Its pods are the only evidence until the status is written."""
    world = training(manifest(**ALL_NEEDED, runPolicy={"cleanupPolicy": policy}))
    refuse(world.pod("a-us-1"))
    die_before_the_status(world)
    world.reconcile(1)
    assert world.reason("Failed") == ("True", "LearnerRefused")
    die_before_the_status(world)
    world.reconcile(1)
    assert world.reason("Failed") == ("True", "LearnerRefused")
    assert "hidden size 4" in world.condition("Failed")["message"]
    assert not any(world.replicas().values())
    assert bool(world.children) == (policy == "Running")


def test_a_correction_removes_no_evidence_before_the_failure_is_written():
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-us-1"))
    world.change(learner={"recipe": {"name": "gpt", "config": {}}, "image": "another"})
    decisions = world.reconcile()
    assert (decisions.apply, decisions.delete) == ((), ())
    assert world.reason("Failed") == ("True", "LearnerRefused")


def test_a_permanently_refused_learner_fails_the_job_with_its_message():
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-us-1"))
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRefused")
    message = world.condition("Failed")["message"]
    assert "us/1" in message
    assert "hidden size 4, expected 8" in message


def test_the_end_of_the_log_is_in_the_condition():
    world = training(manifest(**ALL_NEEDED))
    written = {"reason": "Refused", "message": "no such shape", "log": ["loads", "compares"]}
    refuse(world.pod("a-us-1"), message=json.dumps(written))
    world.reconcile()
    message = world.condition("Failed")["message"]
    assert message.endswith("no such shape; its log before that: loads | compares")


def test_a_container_that_wrote_no_message_is_explained_by_its_log():
    """The kubelet's fallback for a container that was killed: the end of its log as text."""
    world = training(manifest(**LIMIT))
    log = 'compiling\n{"level": "info", "message": "step 7"}\nout of memory soon\n'
    restarted(world.pod("a-us-1"), 4, 137, "OOMKilled", log)
    world.reconcile()
    message = world.condition("Failed")["message"]
    assert "exit code 137 (OOMKilled): out of memory soon" in message
    assert message.endswith("; its log before that: compiling | step 7")


@pytest.mark.parametrize("line", ["x" * 5000, "\x1b[31m\u202e" * 50])
def test_a_log_in_a_condition_is_bounded_and_without_control_characters(line):
    world = training(manifest(**ALL_NEEDED))
    written = {"reason": "Refused", "message": line, "log": [line, "the very last"]}
    refuse(world.pod("a-us-1"), message=json.dumps(written))
    world.reconcile()
    message = world.condition("Failed")["message"]
    assert len(message) <= 1000
    assert message.isprintable()
    assert "the very last" in message


@pytest.mark.parametrize("log", [7, {"a": 1}, None, [{"a": 1}, None], "text"])
def test_a_message_of_another_shape_is_no_error(log):
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-us-1"), message=json.dumps({"reason": "Refused", "log": log}))
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRefused")


def test_a_refusal_is_seen_after_the_container_restarted():
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-us-1"))
    main = main_of(world.pod("a-us-1"))
    main["lastState"], main["state"] = main["state"], {"running": {}}
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRefused")


def test_a_learner_that_became_ready_after_a_refusal_has_not_failed():
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-us-1"))
    ends = main_of(world.pod("a-us-1"))["state"]
    set_ready(world.pod("a-us-1"), True)
    main_of(world.pod("a-us-1"))["lastState"] = ends
    assert is_idle(world.reconcile())


def test_a_refused_pod_that_is_being_replaced_does_not_count():
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-us-1"))
    world.pod("a-us-1")["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_a_refused_pod_of_a_former_job_of_that_name_does_not_count():
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-us-1"))
    world.pod("a-us-1")["metadata"]["ownerReferences"][0]["uid"] = "uid-of-another"
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_a_refused_learner_that_is_no_longer_wanted_does_not_count():
    world = training(manifest(**ALL_NEEDED))
    world.change(regions=[{"name": "eu", "learners": 2}, {"name": "us", "learners": 1}])
    refuse(world.pod("a-us-1"))
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_the_learner_of_a_group_is_named_by_its_index():
    world = training(
        manifest(
            **ALL_NEEDED, learner={"recipe": {"name": "gpt", "config": {}}, "podsPerLearner": 2}
        )
    )
    refuse(world.pod("a-eu-3"))
    world.reconcile()
    assert "eu/1" in world.condition("Failed")["message"]


def test_a_crash_is_no_refusal():
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-us-1"), code=1, message="Traceback")
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


LIMIT = {**ALL_NEEDED, "runPolicy": {"learnerRestartLimit": 3}}


@pytest.mark.parametrize(("code", "reason"), [(1, "Error"), (139, "Error"), (137, "OOMKilled")])
def test_more_crashes_than_the_limit_fail_the_job(code, reason):
    world = training(manifest(**LIMIT))
    restarted(world.pod("a-us-1"), 3, code, reason)
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"
    restarted(world.pod("a-us-1"), 4, code, reason)
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRestartLimit")
    message = "its container restarted 4 times, the last time because of its own error: exit code"
    assert message in world.condition("Failed")["message"]


@pytest.mark.parametrize(
    ("code", "reason"), [(137, "Error"), (143, "Error"), (0, "Completed"), (255, "Unknown")]
)
def test_a_kill_from_outside_is_no_crash(code, reason):
    world = training(manifest(**LIMIT))
    restarted(world.pod("a-us-1"), 40, code, reason)
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_the_supervisors_own_count_of_faults_is_believed():
    world = training(manifest(**LIMIT))
    message = '{"reason": "RestartLimit", "message": "exit code 1, five times"}'
    restarted(world.pod("a-us-1"), 1, 1, message=message)
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRestartLimit")
    assert "exit code 1, five times" in world.condition("Failed")["message"]


def test_without_a_limit_no_number_of_restarts_fails_a_job():
    world = training(manifest(**ALL_NEEDED))
    restarted(world.pod("a-us-1"), 999, 1)
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_evicted_preempted_and_deleted_pods_count_for_nothing():
    world = training(manifest(**LIMIT))
    world.pod("a-us-1")["status"] = {
        "phase": "Failed",
        "reason": "Evicted",
        "conditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    del world.pods["a-us-0"]
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"
    assert world.reason("LearnersReady") == ("False", "SomeNotTraining")


# ------------------------------------------------------------------------------ others


def test_a_job_that_another_controller_manages_is_left_alone():
    world = OperatedJob(job=manifest(runPolicy={"managedBy": "kueue.x-k8s.io/multikueue"}))
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
