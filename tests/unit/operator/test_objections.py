"""Jobs with a valid spec that an operator leaves as they are, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_operator.resources.operator_scope import OperatorScope
from diloco_testing.kubernetes.operated_job import SCOPE, OperatedJob, manifest, training

SHARED = replace(
    SCOPE, forbidden_pod_fields=("hostNetwork", "hostPath", "privileged", "capabilities.add")
)
MAIN = "main"


def learner(**pod):
    return {"recipe": {"name": "gpt", "config": {}}, "podTemplate": {"spec": pod}}


def container(**security):
    return {"containers": [{"name": MAIN, "securityContext": security}]}


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"learner": learner(hostNetwork=True)}, "spec.learner.podTemplate.spec.hostNetwork"),
        (
            {"syncer": {"podTemplate": {"spec": container(privileged=True)}}},
            "spec.syncer.podTemplate.spec.containers[0].securityContext.privileged",
        ),
        (
            {"learner": learner(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/"}}])},
            "spec.learner.podTemplate.spec.volumes[1].hostPath",
        ),
        (
            {"learner": learner(**container(capabilities={"add": ["IPC_LOCK"]}))},
            "spec.learner.podTemplate.spec.containers[0].securityContext.capabilities.add",
        ),
        (
            {"regions": [{"name": "eu", "learners": 2, "podTemplate": {"spec": {"hostNetwork": True}}}]},
            "spec.regions[0].podTemplate.spec.hostNetwork",
        ),
    ],
    ids=["of all learners", "of the syncer", "in a list", "below another", "of a region"],
)  # fmt: skip
def test_b01_a_forbidden_field_of_a_pod_is_refused_by_its_path(spec, path):
    world = OperatedJob(job=manifest(**spec), scope=SHARED)
    decisions = world.reconcile()
    assert (decisions.apply, decisions.delete) == ((), ())
    assert world.reason("Accepted") == ("False", "PodFieldForbidden")
    assert path in world.condition("Accepted")["message"]
    assert ("Warning", "PodFieldForbidden") in world.events
    world.scope = SCOPE
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    assert world.children


@pytest.mark.parametrize(
    "pod",
    [
        {"hostNetwork": False},
        {"hostNetwork": None},
        {"hostPathological": True},
        container(capabilities={"drop": ["ALL"]}),
        container(privileged=False),
        {"nodeSelector": {"hostPath": ""}},
        {},
    ],
    ids=str,
)
def test_a_field_that_is_not_set_or_has_another_name_is_allowed(pod):
    world = OperatedJob(job=manifest(learner=learner(**pod)), scope=SHARED)
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")


def test_a_running_job_with_a_field_that_was_forbidden_later_keeps_its_pods():
    world = training(manifest(learner=learner(hostNetwork=True)))
    children, pods = dict(world.children), sorted(world.pods)
    world.scope = SHARED
    decisions = world.reconcile()
    assert (decisions.apply, decisions.delete) == ((), ())
    assert world.reason("Accepted") == ("False", "PodFieldForbidden")
    assert (world.children, sorted(world.pods)) == (children, pods)
    assert world.reconcile().status is None, "reported once"


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [("", "eu", "no region.name"), ("eu", "", "region.name eu"), ("eu", "us", "region.name eu")],
    ids=["set", "removed", "another"],
)
def test_an_operator_whose_region_changed_leaves_the_objects_of_a_job_as_they_are(
    before, after, named
):
    def scope(region):
        return OperatorScope(region=region, worker_image="w:1", syncer_image="s:1")

    job = manifest(
        syncer={"endpoint": "syncer.example.com:7070"},
        tls={"mode": "Secret", "secretName": "t"},
    )
    world = OperatedJob(job=job, scope=scope(before))
    world.settle()
    children = dict(world.children)
    world.scope = scope(after)
    for _ in range(3):
        decisions = world.reconcile()
        assert (decisions.apply, decisions.delete) == ((), ())
    assert world.children == children
    assert world.reason("Accepted") == ("False", "RegionChanged")
    assert named in world.condition("Accepted")["message"]
    assert ("Warning", "RegionChanged") in world.events
    world.scope = scope(before)
    world.reconcile()
    assert world.reason("Accepted")[1] != "RegionChanged"


def test_a_job_with_a_service_account_of_its_own_name_uses_it():
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "a", "namespace": "work", "uid": "of a person"},
    }
    world = OperatedJob(foreign=(account,))
    world.settle()
    assert world.reason("Accepted") == ("True", "Valid")
    assert ("ServiceAccount", "a") not in world.children
    pods = world.children["StatefulSet", "a-eu"]["spec"]["template"]["spec"]
    assert pods["serviceAccountName"] == "a"


def forbidden(**spec):
    """A job that trains, and has a field that was forbidden later."""
    world = training(manifest(learner=learner(hostNetwork=True), **spec))
    world.scope = SHARED
    world.reconcile()
    return world


def test_a_job_that_is_no_longer_accepted_still_completes_and_frees_its_learners():
    world = forbidden()
    world.answers("Complete", step=2000)
    decisions = world.reconcile(30)
    assert world.reason("Complete") == ("True", "StepsDone")
    assert world.reason("Accepted") == ("False", "PodFieldForbidden")
    assert world.status["state"] == "Complete"
    assert {want["spec"]["replicas"] for want in decisions.apply} == {0}
    assert world.replicas() == {"a-eu": 0, "a-syncer": 1, "a-us": 0}


def test_a_job_that_is_no_longer_accepted_can_be_suspended_but_not_resumed():
    world = forbidden()
    world.change(runPolicy={"suspend": True})
    world.settle()
    assert world.reason("Suspended") == ("True", "Suspended")
    assert set(world.replicas().values()) == {0}
    world.change(runPolicy={})
    world.settle()
    assert set(world.replicas().values()) == {0}
    assert world.reason("Accepted") == ("False", "PodFieldForbidden")
    world.scope = SCOPE
    world.settle()
    assert world.replicas() == {"a-eu": 2, "a-syncer": 1, "a-us": 2}


def test_a_job_that_is_no_longer_accepted_still_ends_by_its_deadline_and_its_ttl():
    world = forbidden(runPolicy={"activeDeadlineSeconds": 600, "ttlSecondsAfterFinished": 60})
    for _ in range(3):
        world.reconcile(300)
    assert world.reason("Failed") == ("True", "DeadlineExceeded")
    world.reconcile(120)
    assert world.removed


def test_a_job_that_is_no_longer_accepted_still_lets_go_of_the_volume_that_is_to_be_kept():
    """Else it would go with the job."""
    world = forbidden()
    claim = ("PersistentVolumeClaim", "a-syncer")
    assert world.children[claim]["metadata"]["ownerReferences"]
    world.change(syncer={"storage": {"whenDeleted": "Retain"}})
    decisions = world.reconcile()
    assert [(want["kind"], want["metadata"]["name"]) for want in decisions.apply] == [claim]
    assert "ownerReferences" not in world.children[claim]["metadata"]
    assert world.reconcile().apply == ()
    world.change(syncer={})
    assert world.reconcile().apply == (), "nothing but that"


def test_a_region_that_is_removed_from_a_job_that_is_no_longer_accepted_ends_with_the_job():
    world = forbidden()
    world.change(regions=[{"name": "eu", "learners": 2}], runPolicy={"suspend": True})
    world.settle()
    assert world.replicas() == {"a-eu": 0, "a-syncer": 0}


def test_a_complete_job_that_is_no_longer_accepted_leaves_nothing_with_the_policy_all():
    world = forbidden(runPolicy={"cleanupPolicy": "All"})
    world.answers("Complete", step=2000)
    world.settle()
    world.reconcile(120)
    assert world.reason("Accepted") == ("False", "PodFieldForbidden")
    assert not world.children


def test_the_status_of_a_job_that_is_no_longer_accepted_stays_current():
    world = forbidden()
    world.answers(gone=("us/1",), step=500)
    world.reconcile(60)
    assert world.status["step"] == 500
    assert world.status["state"] == "Degraded"
    assert world.reason("LearnersReady")[0] == "False"


def test_a_change_that_brings_a_forbidden_field_starts_no_pod_with_it():
    world = training()
    before = {name: pod["spec"] for name, pod in world.pods.items()}
    world.scope = SHARED
    world.change(learner=learner(hostNetwork=True), steps=3000)
    for _ in range(3):
        decisions = world.reconcile(30)
        assert (decisions.apply, decisions.delete) == ((), ())
    world.run_controllers()
    assert {name: pod["spec"] for name, pod in world.pods.items()} == before


def test_an_operator_whose_region_changed_does_not_track_the_job():
    """It would see other learners, and another syncer."""
    world = training()
    status = world.status
    world.scope = replace(SCOPE, region="us")
    world.answers("Complete", step=2000)
    world.reconcile(60)
    assert world.reason("Accepted") == ("False", "RegionChanged")
    assert (world.status["step"], world.status["state"]) == (status["step"], status["state"])
