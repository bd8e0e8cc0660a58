"""The life of a job: running, suspended, complete, failed."""

from dataclasses import replace

import pytest

from diloco_operator.observed import Silence
from diloco_operator.reasons import CONDITIONS
from diloco_testing.operated import World, is_idle, main_of, manifest, set_ready, training


def complete(job=None, **answer):
    world = training(job)
    world.answers("Complete", step=2000, model_path="/m", model_sha256="ab", **answer)
    world.settle()
    return world


# ------------------------------------------------------------------------------ first visit


def test_the_first_visit_writes_all_conditions_and_makes_all_children():
    world = World()
    decisions = world.reconcile()
    assert [one["type"] for one in world.status["conditions"]] == list(CONDITIONS)
    assert {one["kind"] for one in decisions.apply} == {
        "ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "Service", "PodDisruptionBudget",
        "Deployment", "StatefulSet",
    }  # fmt: skip
    assert world.says("Accepted") == ("True", "Valid")
    assert world.says("SyncerReachable") == ("Unknown", "NotAsked")
    assert world.status["state"] == "Pending"


def test_a_job_comes_up_and_trains():
    world = World()
    world.reconcile()
    world.run_controllers(ready=lambda pod: False)
    world.reconcile()
    assert world.status["state"] == "Starting"
    assert world.says("SyncerReady") == ("False", "Starting")
    assert world.says("SyncerReachable") == ("False", "NotStarted")
    for pod in world.pods.values():
        set_ready(pod, True)
    world.count_pods()
    world.answers()
    world.reconcile()
    assert world.status["state"] == "Training"
    for kind in ("SyncerReady", "SyncerReachable", "LearnersReady", "QuorumMet", "SpecConsistent"):
        assert world.condition(kind)["status"] == "True", kind


def test_the_status_shows_what_the_syncer_says():
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
    turned = world.condition("LearnersReady")["lastTransitionTime"]
    assert (since, turned) == ("2026-03-01T12:00:00Z", "2026-03-01T12:01:00Z")
    world.change(steps=3000)
    world.reconcile(60)
    assert world.condition("LearnersReady")["lastTransitionTime"] == turned
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
    assert world.says("Suspended") == ("True", "Suspended")
    assert "startTime" not in world.status


def test_a_suspended_job_is_at_rest():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    world.reconcile(60)
    decisions = world.reconcile(600)
    assert is_idle(decisions)
    assert decisions.again_seconds == 300


def test_resuming_starts_everything_again_and_says_so():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    world.change(runPolicy={"suspend": False})
    world.reconcile(1000)
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1, "a-us": 2}
    assert world.says("Suspended") == ("False", "Resumed")
    assert world.status["startTime"] == "2026-03-01T12:16:40Z"
    assert ("Normal", "Resumed") in world.events
    world.run_controllers()
    world.answers(step=500)
    world.settle()
    assert world.status["state"] == "Training"


def test_the_deadline_begins_anew_at_resume():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.change(runPolicy={"activeDeadlineSeconds": 100, "suspend": True})
    world.reconcile(90)
    world.reconcile(500)
    world.change(runPolicy={"activeDeadlineSeconds": 100})
    world.reconcile(10)
    world.reconcile(99)
    assert world.condition("Failed")["status"] == "False"
    world.reconcile(1)
    assert world.says("Failed") == ("True", "DeadlineExceeded")


def test_what_was_said_while_the_job_rested_is_not_repeated_when_it_runs_again():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.reconcile()
    assert world.says("QuorumMet") == ("False", "Suspended")
    world.change(runPolicy={})
    world.is_silent()
    world.reconcile(5)
    assert world.says("SyncerReachable") == ("True", "Answers")
    assert world.says("QuorumMet") == ("Unknown", "NoAnswer")


def test_what_was_said_of_a_complete_job_is_not_repeated_when_its_steps_are_raised():
    world = complete()
    assert world.says("QuorumMet") == ("False", "Complete")
    world.change(steps=3000)
    world.is_silent()
    world.reconcile(5)
    assert world.says("QuorumMet") == ("Unknown", "NoAnswer")


def test_a_job_that_is_made_suspended_starts_nothing():
    world = World(job=manifest(runPolicy={"suspend": True}))
    world.settle()
    assert set(world.replicas().values()) == {0}
    assert world.status["state"] == "Suspended"


# ------------------------------------------------------------------------------ complete


def test_complete_is_written_at_once_with_the_model():
    world = complete()
    assert world.says("Complete") == ("True", "StepsDone")
    assert world.status["state"] == "Complete"
    assert world.status["progress"] == "2000/2000"
    assert world.status["model"] == {"path": "/m", "sha256": "ab"}
    assert world.status["completionTime"] == "2026-03-01T12:00:00Z"


def test_the_last_step_alone_is_not_complete():
    world = training()
    world.answers("Training", step=2000)
    world.settle()
    assert world.says("Complete") == ("False", "NotComplete")


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
    assert world.reconcile(100).again_seconds == 20
    world.reconcile(20)
    assert world.replicas()["a-evaluator"] == 0


def test_complete_stays_when_the_syncer_goes():
    world = complete()
    world.is_silent()
    world.reconcile(3000)
    assert world.says("Complete") == ("True", "StepsDone")
    assert world.status["step"] == 2000
    assert world.replicas() == {"a-eu": 0, "a-syncer": 1, "a-us": 0}


def test_complete_stays_when_a_syncer_without_its_snapshots_answers():
    world = complete()
    world.answers("Initialising", step=0)
    world.reconcile(60)
    world.answers("Initialising", step=0, tokens=1)
    world.reconcile(60)
    assert world.status["tokens"] == 1
    assert world.says("Complete") == ("True", "StepsDone")
    assert world.status["step"] == 2000


def test_raising_the_steps_of_a_complete_job_lets_it_go_on():
    world = complete()
    world.change(steps=3000)
    world.reconcile(1000)
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1, "a-us": 2}
    assert world.says("Complete") == ("False", "StepsRaised")
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
    assert world.says("Complete") == ("False", "StepsRaised")


def test_raised_steps_without_a_volume_are_not_accepted_and_make_nothing():
    world = complete(manifest(runPolicy={"cleanupPolicy": "All"}))
    world.reconcile(60)
    assert not world.children
    world.syncer = None
    world.change(steps=3000)
    world.settle()
    assert not world.children
    assert world.says("Accepted") == ("False", "VolumeGone")
    assert world.says("Complete") == ("True", "StepsDone")
    assert ("Warning", "VolumeGone") in world.events


def test_a_complete_job_whose_claim_was_deleted_gets_no_empty_one():
    world = complete()
    del world.children["PersistentVolumeClaim", "a-syncer"]
    world.settle()
    assert not world.children
    assert world.says("Complete") == ("True", "StepsDone")


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
    assert decisions.again_seconds == 100
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
    world = World(job=manifest(runPolicy=policy))
    world.settle()
    assert (world.status["state"] == "Failed") == (seconds == 0)


# ------------------------------------------------------------------------------ failed


def test_the_deadline_fails_a_job_and_frees_its_pods():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    assert world.reconcile(95).again_seconds == 5
    assert world.reconcile(5).again_seconds == 1
    assert world.says("Failed") == ("True", "DeadlineExceeded")
    assert world.status["state"] == "Failed"
    world.reconcile(1)
    assert set(world.replicas().values()) == {0}
    assert ("PersistentVolumeClaim", "a-syncer") in world.children
    assert world.status["completionTime"] == "2026-03-01T12:01:40Z"
    assert ("Warning", "DeadlineExceeded") in world.events


def test_failed_is_final():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile(100)
    message = world.condition("Failed")["message"]
    world.change(runPolicy={}, steps=9000)
    world.run_controllers()
    world.answers("Complete", step=9000)
    world.reconcile(100)
    assert world.says("Failed") == ("True", "DeadlineExceeded")
    assert world.condition("Failed")["message"] == message
    assert set(world.replicas().values()) == {0}
    assert world.says("Complete") == ("False", "NotComplete")


@pytest.mark.parametrize(("policy", "left"), [("None", 5), ("Running", 0), ("All", 0)])
def test_the_cleanup_policy_holds_for_a_failed_job(policy, left):
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 9, "cleanupPolicy": policy}))
    world.reconcile(9)
    world.reconcile(1)
    assert sum(world.replicas().values()) == left
    assert bool(world.children) == (policy != "All")


def die_before_the_status(world):
    """The operator carries out what it decides, and is killed before it writes the status."""
    before = world.job.get("status")
    world.reconcile(1)
    world.job["status"] = before
    world.run_controllers()


@pytest.mark.parametrize("policy", ["Running", "All"])
def test_a_job_that_failed_stays_failed_when_the_operator_dies_at_that_moment(policy):
    """Its pods are the only proof until the status is written."""
    world = training(manifest(runPolicy={"cleanupPolicy": policy}))
    refuse(world.pod("a-us-1"))
    die_before_the_status(world)
    world.reconcile(1)
    assert world.says("Failed") == ("True", "LearnerRefused")
    die_before_the_status(world)
    world.reconcile(1)
    assert world.says("Failed") == ("True", "LearnerRefused")
    assert "hidden size 4" in world.condition("Failed")["message"]
    assert not any(world.replicas().values())
    assert bool(world.children) == (policy == "Running")


def test_a_correction_takes_no_proof_away_before_the_failure_is_written():
    world = training()
    refuse(world.pod("a-us-1"))
    world.change(learner={"recipe": {"name": "gpt", "config": {}}, "image": "another"})
    decisions = world.reconcile()
    assert (decisions.apply, decisions.delete) == ((), ())
    assert world.says("Failed") == ("True", "LearnerRefused")


def refuse(pod, code=78, message='{"reason": "Refused", "message": "hidden size 4, expected 8"}'):
    main_of(pod)["state"] = {
        "terminated": {"exitCode": code, "reason": "Error", "message": message}
    }


def test_a_learner_that_is_refused_for_good_fails_the_job_and_says_why():
    world = training()
    refuse(world.pod("a-us-1"))
    world.reconcile()
    assert world.says("Failed") == ("True", "LearnerRefused")
    message = world.condition("Failed")["message"]
    assert "us/1" in message
    assert "hidden size 4, expected 8" in message


def test_a_refusal_is_seen_after_the_container_was_started_again():
    world = training()
    refuse(world.pod("a-us-1"))
    main = main_of(world.pod("a-us-1"))
    main["lastState"], main["state"] = main["state"], {"running": {}}
    world.reconcile()
    assert world.says("Failed") == ("True", "LearnerRefused")


def test_a_refused_pod_of_a_former_job_of_that_name_does_not_count():
    world = training()
    refuse(world.pod("a-us-1"))
    world.pod("a-us-1")["metadata"]["ownerReferences"][0]["uid"] = "uid-of-another"
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_a_refused_learner_that_is_no_longer_wanted_does_not_count():
    world = training()
    world.change(regions=[{"name": "eu", "learners": 2}, {"name": "us", "learners": 1}])
    refuse(world.pod("a-us-1"))
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_the_learner_of_a_group_is_named_by_its_index():
    world = training(
        manifest(learner={"recipe": {"name": "gpt", "config": {}}, "podsPerLearner": 2})
    )
    refuse(world.pod("a-eu-3"))
    world.reconcile()
    assert "eu/1" in world.condition("Failed")["message"]


def test_a_crash_is_no_refusal():
    world = training()
    refuse(world.pod("a-us-1"), code=1, message="Traceback")
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


LIMIT = {"runPolicy": {"learnerRestartLimit": 3}}


def restarted(pod, count, code, reason="Error", message=""):
    main = main_of(pod)
    main["restartCount"] = count
    main["lastState"] = {"terminated": {"exitCode": code, "reason": reason, "message": message}}


@pytest.mark.parametrize(("code", "reason"), [(1, "Error"), (139, "Error"), (137, "OOMKilled")])
def test_more_own_faults_than_the_limit_fail_the_job(code, reason):
    world = training(manifest(**LIMIT))
    restarted(world.pod("a-us-1"), 3, code, reason)
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"
    restarted(world.pod("a-us-1"), 4, code, reason)
    world.reconcile()
    assert world.says("Failed") == ("True", "LearnerRestartLimit")
    words = "its container was restarted 4 times, at last by its own fault: exit code"
    assert words in world.condition("Failed")["message"]


@pytest.mark.parametrize(
    ("code", "reason"), [(137, "Error"), (143, "Error"), (0, "Completed"), (255, "Unknown")]
)
def test_being_killed_from_outside_is_no_own_fault(code, reason):
    world = training(manifest(**LIMIT))
    restarted(world.pod("a-us-1"), 40, code, reason)
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_the_supervisors_own_count_of_faults_is_believed():
    world = training(manifest(**LIMIT))
    said = '{"reason": "RestartLimit", "message": "exit code 1, five times"}'
    restarted(world.pod("a-us-1"), 1, 1, message=said)
    world.reconcile()
    assert world.says("Failed") == ("True", "LearnerRestartLimit")
    assert "exit code 1, five times" in world.condition("Failed")["message"]


def test_without_a_limit_no_number_of_restarts_fails_a_job():
    world = training()
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
    assert world.says("LearnersReady") == ("False", "SomeNotTraining")


# ------------------------------------------------------------------------------ others


def test_a_job_that_another_controller_manages_is_left_alone():
    world = World(job=manifest(runPolicy={"managedBy": "kueue.x-k8s.io/multikueue"}))
    decisions = world.reconcile()
    assert is_idle(decisions)
    assert not world.status
    assert decisions.again_seconds == 300


def test_a_job_that_is_being_deleted_gets_no_child_back():
    world = training()
    world.children.clear()
    world.job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    assert is_idle(world.reconcile())


def test_a_spec_that_cannot_be_used_touches_nothing_and_says_everything():
    world = training()
    before = dict(world.children)
    status = dict(world.status)
    world.change(steps=0, sync={"quorum": 9, "interval": "x"})
    world.reconcile()
    assert world.children == before
    assert world.says("Accepted") == ("False", "InvalidSpec")
    message = world.condition("Accepted")["message"]
    assert "spec.steps" in message
    assert "spec.sync.interval" in message
    assert world.says("LearnersReady") == ("True", "AllTraining")
    assert world.status["step"] == status["step"]
    assert is_idle(world.reconcile(1000))


def test_a_rule_between_fields_is_a_condition_as_well():
    world = World(job=manifest(sync={"quorum": 9}))
    world.reconcile()
    assert not world.children
    assert "9 is more than the 4 learners" in world.condition("Accepted")["message"]
    assert len(world.status["conditions"]) == len(CONDITIONS)


def test_a_corrected_spec_is_accepted_again():
    world = training()
    world.change(sync={"quorum": 9})
    world.reconcile()
    world.change(sync={"quorum": 2})
    world.settle()
    assert world.says("Accepted") == ("True", "Valid")
    assert world.status["state"] == "Training"


def test_an_answer_about_another_job_is_no_answer():
    world = training()
    world.syncer = replace(world.syncer, job="b", step=1999)
    world.reconcile()
    world.last_answer = None
    world.reconcile(100)
    assert world.says("SyncerReachable") == ("False", "OtherJob")
    assert world.status["step"] == 100


def test_a_reason_that_is_not_known_is_said_in_the_transports_words():
    world = training()
    world.syncer = Silence(reason="Odd", message="something odd")
    world.reconcile(100)
    assert world.says("SyncerReachable") == ("False", "NoAnswer")
    assert "something odd" in world.condition("SyncerReachable")["message"]
