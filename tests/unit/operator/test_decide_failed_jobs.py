"""Jobs that fail: deadlines, refused learners, restart limits, and the evidence that stays."""

import json
from datetime import timedelta

import pytest

from diloco_testing.kubernetes.operated_job import (
    is_idle,
    main_of,
    manifest,
    refuse,
    restarted,
    set_ready,
    training,
)

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


def test_only_a_failure_that_pods_show_is_decided_again_from_the_newest_list():
    """To read everything from the store is expensive, and a thousand jobs may have one deadline."""
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.now += timedelta(seconds=100)
    decisions = world.decide()
    assert decisions.status["state"] == "Failed"
    assert not decisions.fails
    world = training(manifest(**ALL_NEEDED))
    refuse(world.pod("a-eu-1"))
    decisions = world.decide()
    assert decisions.status["state"] == "Failed"
    assert decisions.fails


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
    restarted(world.pod("a-us-1"), 4, 1, "Error", log)
    world.reconcile()
    message = world.condition("Failed")["message"]
    assert "exit code 1: out of memory soon" in message
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
        manifest(**ALL_NEEDED, learner={"command": ["python", "train.py"], "podsPerLearner": 2})
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


@pytest.mark.parametrize("code", [1, 127])
def test_more_exits_than_the_limit_fail_the_job_where_no_agent_counts_them(code):
    world = training(manifest(**LIMIT))
    restarted(world.pod("a-us-1"), 3, code)
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"
    restarted(world.pod("a-us-1"), 4, code)
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRestartLimit")
    message = (
        ": learner us/1 restarted 4 times, spec.runPolicy.learnerRestartLimit is 3 "
        f"(the last time: exit code {code}"
    )
    assert message in world.condition("Failed")["message"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (137, "Error"), (143, "Error"), (0, "Completed"), (255, "Unknown"),
        # The agent has counted it when its container runs again, and knows which of the others count.
        (137, "OOMKilled"), (139, "Error"),
    ],
)  # fmt: skip
def test_the_kubelets_count_of_restarts_does_not_turn_one_kill_into_many_crashes(code, reason):
    world = training(manifest(**LIMIT))
    restarted(world.pod("a-us-1"), 40, code, reason)
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"


def test_restarts_of_one_pod_do_not_count_against_another_of_its_learner():
    """Four pods, two restarts of each node, and then one pod exits by itself."""
    learner = {"command": ["python", "train.py"], "podsPerLearner": 4}
    world = training(manifest(sync={"quorum": 4}, learner=learner, runPolicy=LIMIT["runPolicy"]))
    for rank in range(4):
        restarted(world.pod(f"a-us-{rank}"), 2, 255, "Unknown")
    restarted(world.pod("a-us-3"), 3, 1)
    world.reconcile()
    assert world.condition("Failed")["status"] == "False"
    assert world.reason("LearnersReady") != ("False", "LearnersFailed")


def test_the_supervisors_own_count_of_faults_is_used():
    world = training(manifest(**LIMIT))
    message = '{"reason": "RestartLimit", "message": "exit code 1, five times"}'
    restarted(world.pod("a-us-1"), 1, 1, message=message)
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerRestartLimit")
    assert "exit code 1, five times" in world.condition("Failed")["message"]


def test_a_learner_that_never_joined_fails_a_job_that_needs_it_without_any_limit():
    world = training(manifest(**ALL_NEEDED))
    message = '{"reason": "NeverJoined", "message": "learner us/1 ended 10 times", "log": ["why"]}'
    restarted(world.pod("a-us-1"), 1, 1, message=message)
    world.reconcile()
    assert world.reason("Failed") == ("True", "LearnerNeverJoined")
    assert (
        "learner us/1 ended 10 times; its log before that: why"
        in (world.condition("Failed")["message"])
    )


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
