"""Learners that fail alone, the job that continues without them, and a failed job that resumes."""

import pytest

from diloco_testing.kubernetes.operated_job import (
    is_idle,
    manifest,
    refuse,
    restarted,
    training,
)

# ------------------------------------------------------------------------------ failed learners


def test_a_learner_fails_alone_while_a_quorum_is_left():
    world = training()
    refuse(world.pod("a-us-1"))
    world.answers(gone=("us/1",))
    decisions = world.reconcile(1)
    assert (decisions.apply, decisions.delete) == ((), ())
    assert world.reason("Failed") == ("False", "NotFailed")
    assert world.status["state"] == "Degraded"
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    assert world.condition("LearnersReady")["message"] == (
        "3 of 4 are training; failed: us/1 (LearnerRefused: hidden size 4, expected 8)"
    )
    assert ("Warning", "LearnersFailed") in world.events
    assert is_idle(world.reconcile(1))


def test_a_learner_over_its_limit_fails_alone():
    world = training(manifest(runPolicy={"learnerRestartLimit": 3}))
    restarted(world.pod("a-us-1"), 4, 1)
    world.answers(gone=("us/1",))
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    assert "us/1 (LearnerRestartLimit" in world.condition("LearnersReady")["message"]


def test_the_job_fails_when_fewer_learners_are_left_than_the_quorum():
    world = training(manifest(sync={"quorum": 3}))
    refuse(world.pod("a-us-1"))
    world.reconcile(1)
    assert world.reason("Failed") == ("False", "NotFailed")
    refuse(world.pod("a-eu-0"))
    world.reconcile(1)
    assert world.reason("Failed") == ("True", "LearnerRefused")
    message = world.condition("Failed")["message"]
    assert message.startswith("2 learners are left, the quorum is 3: learner eu/0 was permanently")


def test_a_reverted_image_heals_without_a_new_job():
    learner = {"recipe": {"name": "gpt", "config": {}}, "image": "good"}
    world = training(manifest(learner=learner))
    world.change(learner={**learner, "image": "bad"})
    world.settle()
    for name in ("a-us-0", "a-us-1"):
        refuse(world.pod(name))
    world.count_pods()
    world.answers(gone=("us/0", "us/1"))
    world.reconcile(1)
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    world.change(learner=learner)
    world.settle()
    world.answers()
    world.settle()
    assert world.reason("LearnersReady") == ("True", "AllTraining")
    assert world.status["state"] == "Training"
    images = {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()}
    assert "bad" not in images


# ------------------------------------------------------------------------------ resumed


def failed_job(step=700, **policy):
    world = training(manifest(sync={"quorum": 4}, runPolicy=policy))
    world.job["status"]["step"] = 0
    world.answers(step=step)
    world.reconcile(31)
    refuse(world.pod("a-us-1"))
    world.reconcile(1)
    world.syncer = None
    world.settle()
    assert world.status["state"] == "Failed"
    return world


@pytest.mark.parametrize("policy", ["Running", "None"])
def test_a_failed_job_resumes_after_it_was_suspended(policy):
    world = failed_job(cleanupPolicy=policy)
    volume = world.children["PersistentVolumeClaim", "a-syncer"]["metadata"]["uid"]
    world.change(runPolicy={"cleanupPolicy": policy, "suspend": True})
    world.settle()
    assert world.status["state"] == "Suspended"
    assert world.reason("Failed") == ("False", "NotFailed")
    assert "completionTime" not in world.status
    assert world.status["step"] == 700
    assert not any(world.replicas().values())
    world.change(runPolicy={"cleanupPolicy": policy})
    world.settle()
    world.answers(step=690)
    world.settle()
    assert world.status["state"] == "Training"
    assert world.children["PersistentVolumeClaim", "a-syncer"]["metadata"]["uid"] == volume


def test_a_failed_job_whose_volume_was_deleted_stays_failed():
    world = failed_job(cleanupPolicy="All")
    assert not world.children
    world.change(runPolicy={"cleanupPolicy": "All", "suspend": True})
    world.settle()
    assert world.reason("Failed") == ("True", "LearnerRefused")
    world.change(runPolicy={})
    world.settle()
    assert world.status["state"] == "Failed"
    assert not world.children


def test_a_job_that_failed_before_its_first_step_has_nothing_to_lose():
    world = failed_job(cleanupPolicy="All", step=0)
    world.change(runPolicy={"suspend": True})
    world.settle()
    assert world.status["state"] == "Suspended"


def test_a_job_that_resumes_has_its_whole_time_again():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile(100)
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
    world.change(runPolicy={"activeDeadlineSeconds": 100, "suspend": True})
    world.settle()
    world.change(runPolicy={"activeDeadlineSeconds": 100})
    world.settle()
    assert world.status["state"] != "Failed"
    world.reconcile(100)
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
