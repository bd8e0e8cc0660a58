"""The claim with the state of a job that has made steps is lost: the job waits for a person."""

import copy
from dataclasses import replace

import pytest

from diloco_testing.kubernetes.operated_job import (
    SCOPE,
    OperatedJob,
    is_idle,
    manifest,
    refuse,
    training,
)

CLAIM = ("PersistentVolumeClaim", "a-syncer")


def uid(world):
    return world.children[CLAIM]["metadata"]["uid"]


def lose(world):
    """The claim goes, and with it the pod that mounted it; the uid that it had."""
    lost = world.children.pop(CLAIM)
    world.becomes_unreachable()
    return lost


def replaced(world):
    """Another claim takes its name; the uid of the first."""
    lost = lose(world)
    made = copy.deepcopy(lost)
    made["metadata"]["uid"] = "uid-of-another"
    world.children[CLAIM] = made
    return lost["metadata"]["uid"]


def give_up(world, value):
    world.job["metadata"]["annotations"] = {"diloco.dev/lost-volume": value}


def test_the_status_records_the_claim():
    world = training()
    assert world.status["syncer"]["volumeUid"] == uid(world)


def test_a_lost_claim_is_not_replaced_by_an_empty_one_and_the_syncer_waits():
    world = training()
    lost = lose(world)
    world.settle()
    assert CLAIM not in world.children
    assert world.replicas() == {"a-eu": 2, "a-syncer": 0, "a-us": 2}
    assert world.reason("SyncerReady") == ("False", "VolumeGone")
    assert ("Warning", "VolumeGone") in world.events
    message = world.condition("SyncerReady")["message"]
    assert "up to step 100, no longer exists" in message
    assert f"diloco.dev/lost-volume={lost['metadata']['uid']}" in message
    world.reconcile(30)
    assert world.status["state"] == "Degraded"
    assert is_idle(world.reconcile(30))


def test_learners_keep_what_they_have_while_the_job_waits():
    world = training()
    learners = {name: pod for name, pod in world.pods.items() if "syncer" not in name}
    lose(world)
    world.settle()
    world.reconcile(3600)
    assert world.pods == learners


def test_the_deadline_does_not_end_a_job_that_waits_and_starts_over_after_the_wait():
    """A failure would delete the pods of the learners, and with a StatefulSet the volumes of its learners."""
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    learners = {name: pod for name, pod in world.pods.items() if "syncer" not in name}
    lost = lose(world)
    world.settle()
    world.reconcile(4000)
    world.settle()
    assert world.reason("Failed") == ("False", "NotFailed")
    assert world.reason("SyncerReady") == ("False", "VolumeGone")
    assert world.pods == learners
    give_up(world, lost["metadata"]["uid"])
    world.settle()
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1, "a-us": 2}
    assert world.status["startTime"] == "2026-03-01T13:06:40Z"
    world.answers(step=30)
    world.reconcile(99)
    world.settle()
    assert world.reason("Failed") == ("False", "NotFailed")
    world.reconcile(1)
    assert world.reason("Failed") == ("True", "DeadlineExceeded")


def test_the_start_is_that_of_the_job_while_it_waits():
    world = training()
    started = world.status["startTime"]
    lose(world)
    for _ in range(3):
        world.reconcile(60)
        assert world.status["startTime"] == started
    assert is_idle(world.reconcile(60))


def test_learners_that_fail_do_not_end_those_that_hold_the_parameters():
    world = training(manifest(sync={"quorum": 4}))
    lost = lose(world)
    world.settle()
    refuse(world.pod("a-eu-1"))
    world.count_pods()
    world.reconcile(30)
    assert world.reason("Failed") == ("False", "NotFailed")
    assert world.replicas() == {"a-eu": 2, "a-syncer": 0, "a-us": 2}
    assert world.reason("LearnersReady") == ("False", "LearnersFailed")
    give_up(world, lost["metadata"]["uid"])
    world.reconcile(30)
    assert world.reason("Failed") == ("True", "LearnerRefused")


@pytest.mark.parametrize(("policy", "learners"), [("Running", 0), ("None", 2)])
def test_a_failed_job_whose_claim_was_deleted_keeps_its_workloads_and_gets_no_empty_claim(
    policy, learners
):
    """With a StatefulSet, the volumes of its learners would go."""
    runs = {"activeDeadlineSeconds": 100, "cleanupPolicy": policy}
    world = training(manifest(runPolicy=runs))
    world.reconcile(100)
    world.settle()
    others = world.children.keys() - {CLAIM}
    lose(world)
    world.settle()
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
    assert world.children.keys() == others
    assert world.replicas() == {"a-eu": learners, "a-syncer": 0, "a-us": learners}
    world.reconcile(60)
    assert is_idle(world.reconcile(1000))


def test_a_failed_job_without_a_claim_gets_no_child_that_it_does_not_have():
    """One whose children an earlier version has deleted."""
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile(100)
    world.settle()
    world.children.clear()
    world.settle()
    assert not world.children


def test_a_failed_job_resumes_from_the_claim_that_a_person_restored():
    world = training(manifest(runPolicy={"activeDeadlineSeconds": 100}))
    world.reconcile(100)
    world.settle()
    lost = replaced(world)
    world.settle()
    world.change(runPolicy={"suspend": True})
    world.settle()
    assert world.reason("SyncerReady") == ("False", "VolumeGone")
    give_up(world, lost)
    world.change(runPolicy={})
    world.settle()
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1, "a-us": 2}
    assert world.status["syncer"]["volumeUid"] == "uid-of-another"


def test_a_claim_of_another_uid_is_not_taken_for_the_jobs():
    world = training()
    lost = replaced(world)
    before = copy.deepcopy(world.children[CLAIM])
    world.settle()
    assert world.replicas()["a-syncer"] == 0
    assert world.children[CLAIM] == before
    message = world.condition("SyncerReady")["message"]
    assert "was replaced by one with uid uid-of-another" in message
    assert "To continue with the existing claim: kubectl annotate dlj/a --overwrite" in message
    assert message.endswith(f"={lost}")
    assert world.status["syncer"]["volumeUid"] == lost


def test_the_annotation_begins_anew_on_a_new_claim_once():
    world = training()
    first = lose(world)["metadata"]["uid"]
    world.settle()
    give_up(world, first)
    world.settle()
    second = uid(world)
    assert second != first
    assert world.replicas()["a-syncer"] == 1
    assert world.status["syncer"]["volumeUid"] == second
    world.answers(step=30)
    world.settle()
    assert world.reason("SyncerReady") == ("True", "Serving")
    # The annotation is still there, and does not cover the next loss.
    lose(world)
    world.settle()
    assert CLAIM not in world.children
    assert world.reason("SyncerReady") == ("False", "VolumeGone")


def test_the_annotation_accepts_a_claim_that_a_person_restored():
    world = training()
    give_up(world, replaced(world))
    world.settle()
    assert uid(world) == world.status["syncer"]["volumeUid"] == "uid-of-another"
    assert world.replicas()["a-syncer"] == 1


def test_an_annotation_about_another_claim_has_no_effect():
    world = training()
    lose(world)
    give_up(world, "uid-of-yet-another")
    world.settle()
    assert world.reason("SyncerReady") == ("False", "VolumeGone")


def test_the_claim_itself_when_it_comes_back_needs_no_annotation():
    """A list that missed it, or a label that was removed for a while."""
    world = training()
    claim = lose(world)
    world.settle()
    world.children[CLAIM] = claim
    world.settle()
    assert world.replicas()["a-syncer"] == 1
    assert world.reason("SyncerReady")[1] != "VolumeGone"


@pytest.mark.parametrize("labels", [{}, {"diloco.dev/job": "b"}], ids=["none", "of another job"])
def test_a_claim_without_an_owner_and_without_the_label_of_the_job_is_not_its_own(labels):
    """A person's, or one that was restored: with the label the job continues from it."""
    made = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "a-syncer", "uid": "restored", "generation": 1, "labels": labels},
        "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {},
    }  # fmt: skip
    world = OperatedJob(job=manifest(), children={CLAIM: made})
    world.settle()
    assert world.reason("Accepted") == ("False", "NameTaken")
    assert "PersistentVolumeClaim a-syncer" in world.condition("Accepted")["message"]
    assert world.replicas()["a-syncer"] == 0, "nothing mounts it"
    assert "ownerReferences" not in made["metadata"]
    made["metadata"]["labels"] = {"diloco.dev/job": "a"}
    world.children[CLAIM] = made
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    assert world.replicas()["a-syncer"] == 1


def test_a_retained_claim_that_lost_its_label_is_still_the_jobs_and_gets_it_back():
    """The status records its uid; without a reason, the syncer would end and learners train alone."""
    world = training(manifest(syncer={"storage": {"whenDeleted": "Retain"}}))
    claim = world.children[CLAIM]["metadata"]
    assert "ownerReferences" not in claim
    del claim["labels"]["diloco.dev/job"]
    world.reconcile()
    assert world.reason("Accepted") == ("True", "Valid")
    assert world.reason("SyncerReady") == ("True", "Serving")
    assert world.replicas()["a-syncer"] == 1
    assert world.children[CLAIM]["metadata"]["labels"]["diloco.dev/job"] == "a"
    assert is_idle(world.reconcile())


def test_a_job_that_has_made_no_step_gets_a_new_claim():
    world = OperatedJob(job=manifest())
    world.settle()
    lose(world)
    world.settle()
    assert world.status["syncer"]["volumeUid"] == uid(world)
    assert world.replicas()["a-syncer"] == 1


def test_a_suspended_job_whose_claim_was_lost_gets_no_empty_one_and_waits_when_it_resumes():
    world = training()
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    lose(world)
    world.settle()
    assert CLAIM not in world.children
    assert world.reason("SyncerReady") == ("False", "VolumeGone")
    world.change(runPolicy={})
    world.settle()
    assert CLAIM not in world.children
    assert world.replicas()["a-syncer"] == 0


def test_a_status_of_an_earlier_version_takes_the_claim_that_is_there():
    world = training()
    del world.job["status"]["syncer"]["volumeUid"]
    world.settle()
    assert world.status["syncer"]["volumeUid"] == uid(world)
    assert world.replicas()["a-syncer"] == 1


def test_a_status_of_an_earlier_version_with_no_claim_waits_as_well():
    world = training()
    lose(world)
    del world.job["status"]["syncer"]["volumeUid"]
    world.settle()
    assert "=unrecorded" in world.condition("SyncerReady")["message"]
    give_up(world, "unrecorded")
    world.settle()
    assert world.replicas()["a-syncer"] == 1


@pytest.mark.parametrize("region", ["eu", "us"])
def test_only_the_operator_with_the_syncer_checks_the_claim(region):
    job = manifest(syncer={"endpoint": "h:1"}, tls={"mode": "Secret", "secretName": "s"})
    world = OperatedJob(job=job, scope=replace(SCOPE, region=region))
    world.settle()
    world.answers()
    world.settle()
    assert ("volumeUid" in world.status["syncer"]) == (region == "eu")
    assert world.reason("SyncerReady")[1] != "VolumeGone"


def test_a_claim_that_is_being_deleted_is_reported_while_the_syncers_pod_still_keeps_it():
    world = training()
    world.children[CLAIM]["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "VolumeTerminating")
    assert (
        "PersistentVolumeClaim a-syncer is being deleted"
        in world.condition("SyncerReady")["message"]
    )
    assert ("Warning", "VolumeTerminating") in world.events
    assert world.status["state"] == "Training"
    assert is_idle(world.reconcile(30))
    # The pod restarts: now it is gone.
    lose(world)
    world.settle()
    assert world.reason("SyncerReady") == ("False", "VolumeGone")
