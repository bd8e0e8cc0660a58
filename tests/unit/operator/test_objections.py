"""Jobs with a valid spec that an operator leaves as they are, and says why."""

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
def test_a_forbidden_field_of_a_pod_is_refused_by_its_path(spec, path):
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
    assert world.reconcile().status is None, "said once"


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
