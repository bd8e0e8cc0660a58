"""What of the manifest can reach volumes that exist."""

import copy
from dataclasses import replace
from datetime import timedelta

import pytest

from diloco_operator.decide.drift import same_quantity
from diloco_operator.resources.extra_metadata import ExtraMetadata, Metadata
from diloco_testing.kubernetes.operated_job import (
    SCOPE,
    OperatedJob,
    is_idle,
    manifest,
    training,
)

GPT = {"recipe": {"name": "gpt", "config": {}}}
CLAIM = ("PersistentVolumeClaim", "a-syncer")
SET = ("StatefulSet", "a-eu")


def storage(**fields):
    return {"storage": fields}


def size(world):
    return world.children[CLAIM]["spec"]["resources"]["requests"]["storage"]


def claim_of(pod, owner=None):
    """As the StatefulSet controller makes it."""
    owners = [{"uid": owner, "controller": True}] if owner else []
    labels = {"diloco.dev/job": "a", "diloco.dev/region": "eu", "diloco.dev/role": "learner"}
    return {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"state-{pod}", "uid": f"uid-of-state-{pod}", "labels": labels,
                     "ownerReferences": owners},
        "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {},
    }  # fmt: skip


# ------------------------------------------------------------------------ labels of learners' claims


def labelled(**labels):
    """An installation that adds these labels to all children."""
    return replace(SCOPE, extra_metadata=ExtraMetadata(fixed=Metadata(labels=labels)))


def claim_labels(world):
    (template,) = world.children[SET]["spec"]["volumeClaimTemplates"]
    return template["metadata"].get("labels")


def test_the_claims_of_learners_have_the_labels_with_which_their_set_was_made():
    world = training(manifest(learner={**GPT, "storage": {}}), scope=labelled(cost="42"))
    assert claim_labels(world) == {"cost": "42"}
    world.scope = labelled(cost="43", team="vision")
    world.settle()
    assert world.children[SET]["metadata"]["labels"]["cost"] == "43"
    assert claim_labels(world) == {"cost": "42"}, "a StatefulSet never changes them"
    assert world.reason("Accepted") == ("True", "Valid")
    assert is_idle(world.reconcile())


def test_a_set_of_an_older_operator_whose_claims_have_no_labels_stays_as_it_is():
    world = training(manifest(learner={**GPT, "storage": {}}))
    before = {name: pod["spec"] for name, pod in world.pods.items()}
    world.scope = labelled(cost="42")
    world.settle()
    assert claim_labels(world) is None
    assert world.reason("Accepted") == ("True", "Valid")
    assert {name: pod["spec"] for name, pod in world.pods.items()} == before


# ------------------------------------------------------------------------ the syncer's claim


def test_the_syncers_claim_grows_with_the_manifest():
    world = training(manifest(syncer=storage(size="1Gi")))
    uid = world.children[CLAIM]["metadata"]["uid"]
    world.change(syncer=storage(size="3Gi"))
    world.settle()
    assert size(world) == "3Gi"
    assert world.children[CLAIM]["metadata"]["uid"] == uid
    assert world.status["state"] == "Training"


@pytest.mark.parametrize(
    "status",
    [
        {
            "conditions": [
                {"type": "ControllerResizeError", "status": "True", "message": "attempt 1"}
            ]
        },
        {"conditions": [{"type": "NodeResizeError", "status": "True", "message": "attempt 1"}]},
        {"allocatedResourceStatuses": {"storage": "ControllerResizeInfeasible"}},
        {"allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}},
    ],
    ids=str,
)
def test_a_volume_that_does_not_grow_is_named_although_the_claim_asks_for_more(status):
    """The API server accepted the claim: `Accepted` stays Valid, and a full volume ends the merges."""
    world = training(manifest(syncer=storage(size="1Gi")))
    world.change(syncer=storage(size="3Gi"))
    world.settle()
    world.children[CLAIM]["status"] = status
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "VolumeNotResized")
    message = world.condition("SyncerReady")["message"]
    assert "PersistentVolumeClaim a-syncer to 3Gi" in message
    assert world.events[-1] == ("Warning", "VolumeNotResized")
    assert world.status["state"] == "Training"
    for entry in status.get("conditions", ()):
        entry["message"] = "attempt 2"
    assert is_idle(world.reconcile(10)), "another attempt is no write"
    world.children[CLAIM]["status"] = {"capacity": {"storage": "3Gi"}}
    world.reconcile(30)
    assert world.reason("SyncerReady") == ("True", "Serving")


def test_a_size_that_was_never_reached_is_taken_back_in_the_manifest_and_in_the_claim():
    """The operator alone never makes a claim smaller."""
    world = training(manifest(syncer=storage(size="1Gi")))
    world.change(syncer=storage(size="3Gi"))
    world.settle()
    world.change(syncer=storage(size="2Gi"))
    world.settle()
    assert size(world) == "3Gi"
    world.children[CLAIM]["spec"]["resources"]["requests"]["storage"] = "2Gi"
    world.settle()
    assert size(world) == "2Gi"
    assert is_idle(world.reconcile(30))


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "Resizing", "status": "True"}]},
        {"conditions": [{"type": "FileSystemResizePending", "status": "True"}]},
        {"conditions": [{"type": "NodeResizeError", "status": "False"}]},
        {"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}, "conditions": None},
    ],
    ids=str,
)
def test_a_volume_that_grows_is_no_trouble(status):
    world = training()
    world.children[CLAIM]["status"] = status
    assert is_idle(world.reconcile(10))


def test_a_claim_that_is_adopted_is_never_made_smaller_and_keeps_its_class_and_modes():
    world = OperatedJob(job=manifest(syncer=storage(size="10Gi", storageClassName="slow")))
    world.reconcile()
    left = copy.deepcopy(world.children[CLAIM])
    left["metadata"] |= {"uid": "uid-before", "ownerReferences": []}
    left["spec"] = {
        "accessModes": ["ReadWriteOncePod"], "storageClassName": "fast", "volumeName": "pv-1",
        "resources": {"requests": {"storage": "0.5Ti"}},
    }  # fmt: skip
    world = OperatedJob(job=world.job, children={CLAIM: left})
    world.settle()
    spec = world.children[CLAIM]["spec"]
    assert spec["resources"]["requests"]["storage"] == "0.5Ti"
    assert spec["storageClassName"] == "fast"
    assert spec["accessModes"] == ["ReadWriteOncePod"]
    (owner,) = world.children[CLAIM]["metadata"]["ownerReferences"]
    assert owner["uid"] == "uid-of-a"
    assert is_idle(world.reconcile())


def test_a_claim_that_a_person_enlarged_stays_as_it_is():
    world = training()
    world.children[CLAIM]["spec"]["resources"]["requests"]["storage"] = "40Gi"
    world.settle()
    assert same_quantity(size(world), "40Gi")
    world.change(syncer=storage(size="20Gi"))
    world.settle()
    assert same_quantity(size(world), "40Gi")


def test_a_retained_volume_is_found_by_the_next_job_of_the_name():
    retained = manifest(syncer=storage(whenDeleted="Retain"))
    world = training(retained)
    left = world.children[CLAIM]
    assert not left["metadata"].get("ownerReferences")
    again = manifest(syncer=storage(whenDeleted="Retain"))
    again["metadata"]["uid"] = "uid-of-the-next"
    world = OperatedJob(job=again, children={CLAIM: left})
    world.settle()
    assert world.children[CLAIM]["metadata"]["uid"] == left["metadata"]["uid"]
    assert world.reason("Accepted") == ("True", "Valid")
    # The syncer resumes from the last snapshot on it.
    world.answers(step=480, epoch=2)
    world.settle()
    assert world.status["step"] == 480
    assert world.status["syncer"]["volumeUid"] == left["metadata"]["uid"]


def test_cleanup_policy_all_leaves_a_retained_volume():
    world = training(
        manifest(syncer=storage(whenDeleted="Retain"), runPolicy={"cleanupPolicy": "All"})
    )
    world.answers(state="Complete", step=2000, eval_step=2000)
    world.settle()
    world.reconcile(70)
    world.settle()
    assert set(world.children) == {CLAIM}
    assert world.status["state"] == "Complete"


def test_a_job_that_fails_when_its_volume_begins_to_be_retained_does_not_take_the_volume_along():
    """The deadline has passed when it is set together with Retain and the policy All."""
    world = training()
    claim = copy.deepcopy(world.children[CLAIM])
    assert claim["metadata"]["ownerReferences"]
    world.now += timedelta(seconds=600)
    ends = {"cleanupPolicy": "All", "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 0}
    world.change(syncer=storage(whenDeleted="Retain"), runPolicy=ends)
    for _ in range(2):
        world.reconcile()
        assert world.reason("Failed") == ("True", "DeadlineExceeded")
        assert "ownerReferences" not in world.children[CLAIM]["metadata"]
        assert not world.removed, "else it would go with the job"
        # The API server refused that, as a webhook may.
        world.children[CLAIM] = copy.deepcopy(claim)
    world.settle()
    assert world.removed
    assert set(world.children) == {CLAIM}
    assert world.children[CLAIM]["metadata"]["uid"] == claim["metadata"]["uid"]


def test_a_finished_job_releases_a_volume_that_begins_to_be_retained_and_never_deletes_it():
    """The operator did not run when the manifest changed, and until the time came to delete it."""
    world = training(manifest(runPolicy={"cleanupPolicy": "All"}))
    world.answers(state="Complete", step=2000, eval_step=2000)
    world.reconcile()
    world.change(syncer=storage(whenDeleted="Retain"))
    decisions = world.reconcile(600)
    assert CLAIM not in [(ref.kind, ref.name) for ref in decisions.delete]
    assert "ownerReferences" not in world.children[CLAIM]["metadata"]
    world.settle()
    assert set(world.children) == {CLAIM}


# --------------------------------------------------------------------- the learners' claims


def test_the_claims_of_learners_belong_to_their_statefulset():
    world = training(manifest(learner={"command": ["x"], "storage": {}}))
    uid = world.children[SET]["metadata"]["uid"]
    for made in (claim_of("a-eu-0"), claim_of("a-eu-1", uid), claim_of("a-eu-2", "uid-of-a-pod")):
        world.children[made["kind"], made["metadata"]["name"]] = made
    before = copy.deepcopy(world.children)
    assert is_idle(world.reconcile(30))
    assert world.reason("Accepted") == ("True", "Valid")
    world.change(learner={"command": ["x"], "storage": {}, "image": "new"})
    world.settle()
    kept = {key for key in world.children if key[0] == "PersistentVolumeClaim"}
    assert kept == {key for key in before if key[0] == "PersistentVolumeClaim"}


def other_templates(**learner):
    """A running job whose StatefulSets lack the claims that its manifest asks for."""
    world = training(manifest(learner={"command": ["x"], **learner}))
    world.job["spec"]["learner"] = {"command": ["x"], "storage": {"size": "2Gi"}, **learner}
    return world


def test_a_statefulset_that_was_made_without_claims_keeps_its_template_and_is_named():
    """An operator that did not know the field made it."""
    world = other_templates()
    before = copy.deepcopy(world.children[SET])
    pods = copy.deepcopy(world.pods)
    world.settle()
    live = world.children[SET]
    assert "volumeClaimTemplates" not in live["spec"]
    assert live["spec"]["template"] == before["spec"]["template"]
    assert world.pods == pods
    assert world.reason("Accepted") == ("True", "StorageNotApplied")
    assert "a-eu, a-us" in world.condition("Accepted")["message"]
    assert is_idle(world.reconcile(30))


def test_such_a_job_can_be_scaled_and_suspended_and_a_deleted_statefulset_comes_back_with_claims():
    world = other_templates()
    world.settle()
    world.change(regions=[{"name": "eu", "learners": 3}, {"name": "us", "learners": 2}])
    world.settle()
    assert world.replicas()["a-eu"] == 3
    world.change(runPolicy={"suspend": True})
    world.syncer = None
    world.settle()
    assert set(world.replicas().values()) == {0}
    for name in ("a-eu", "a-us"):
        del world.children["StatefulSet", name]
    world.settle()
    (template,) = world.children[SET]["spec"]["volumeClaimTemplates"]
    assert template["spec"]["resources"] == {"requests": {"storage": "2Gi"}}
    assert world.reason("Accepted") == ("True", "Valid")


def test_an_adopted_statefulset_keeps_the_claims_that_it_was_made_with():
    world = training(manifest(learner={"command": ["x"], "storage": {"size": "2Gi"}}))
    for name in ("a-eu", "a-us"):
        # As the API server stores them.
        (template,) = world.children["StatefulSet", name]["spec"]["volumeClaimTemplates"]
        template["spec"]["volumeMode"] = "Filesystem"
        template["metadata"]["creationTimestamp"] = None
        template["status"] = {"phase": "Pending"}
    assert is_idle(world.reconcile(30))
    world.job["spec"]["learner"]["storage"] = {"size": "4Gi"}
    world.settle()
    (template,) = world.children[SET]["spec"]["volumeClaimTemplates"]
    assert template["spec"]["resources"] == {"requests": {"storage": "2Gi"}}
    assert "status" not in template
    assert world.reason("Accepted") == ("True", "StorageNotApplied")
