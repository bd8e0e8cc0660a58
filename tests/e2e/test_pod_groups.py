"""
Learners as PodGroups of Kubernetes, with an API server and a scheduler that have them: all pods of a learner are
placed, or none (docs/adr/0021-a-learner-is-an-entry-in-the-queue.md).

The nodes are made up, and the test stands in for controllers and kubelets: it makes the pods of StatefulSets.
"""

from __future__ import annotations

import json

import pytest

from diloco_testing.clusters import kueue, scale
from diloco_testing.clusters.job import Job, manifest, steadily
from diloco_testing.clusters.kubectl import until

SOON = 60.0
TWO_PODS = {
    "command": ["python", "train.py"],
    "podsPerLearner": 2,
    "resources": {"requests": {"cpu": "2"}},
}
POD_GROUPS = {"diloco.dev/pod-groups": "true"}
NODE_CPU = "3"
"""A node fits one pod of a learner."""


@pytest.fixture(scope="module")
def api(local, tmp_path_factory):
    """A cluster with the operator, PodGroups and a scheduler."""
    cluster = scale.api_server(local, "groups", "--set=rbac.podGroups=true", kind="up-groups")
    with scale.operator(cluster, tmp_path_factory.mktemp("operator")):
        yield cluster
    local.end("groups")


@pytest.fixture
def node(api):
    """Makes nodes, which are deleted at the end."""
    made = []

    def add(name):
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        size = {"cpu": NODE_CPU, "memory": "64Gi", "pods": "10"}
        api.kubectl.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        status = {"capacity": size, "allocatable": size, "conditions": [ready]}
        change = json.dumps({"status": status})
        api.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", change)
        # The API server marks a new node, and a controller that does not run here removes the mark.
        api.kubectl("patch", "node", name, "--type=merge", "-p", '{"spec": {"taints": null}}')
        made.append(name)

    yield add
    for name in made:
        api.kubectl.delete("node", name)


@pytest.fixture
def make(api):
    """Jobs of one learner of two pods, with the pods of its StatefulSet."""
    made = []

    def job(name, **metadata):
        body = manifest(name, steps=1000, regions={"eu": 1}, sync={"quorum": 1})
        body["metadata"] |= metadata
        body["spec"]["learner"] = TWO_PODS
        made.append(Job(api, "default", body).apply())
        found = until(
            lambda: api.kubectl.list(
                "statefulsets", "default", f"diloco.dev/job={name},diloco.dev/role=learner"
            ),
            SOON, expected="a StatefulSet", details=made[-1].details,
        )  # fmt: skip
        kueue.make_pods(api, found[0])
        return made[-1]

    yield job
    for made_job in made:
        made_job.delete("--wait=false")
        for pod in made_job.pods():
            api.kubectl.delete("pod", pod["metadata"]["name"], "default", "--force")


def placed(job):
    """The nodes of its pods that have one."""
    return [node for pod in job.pods() if (node := pod["spec"].get("nodeName"))]


def unplaced(job):
    """Its pods that the scheduler has tried to place in vain."""
    conditions = [
        entry for pod in job.pods() for entry in pod.get("status", {}).get("conditions", [])
    ]
    return [e for e in conditions if (e["type"], e["status"]) == ("PodScheduled", "False")]


def test_no_pod_of_a_learner_is_placed_before_all_of_them_fit(make, node, api):
    node("first")
    job = make("gang", annotations=POD_GROUPS)
    group = api.kubectl.get("podgroups.scheduling.k8s.io", "gang-eu-0", "default")
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}
    assert {pod["spec"]["schedulingGroup"]["podGroupName"] for pod in job.pods()} == {"gang-eu-0"}
    until(lambda: unplaced(job), SOON, expected="the scheduler has tried", details=job.details)
    steadily(lambda: not placed(job), 5, expected="none is placed")
    node("second")
    until(lambda: len(placed(job)) == 2, SOON, expected="both are placed", details=job.details)
    assert set(placed(job)) == {"first", "second"}


def test_without_a_pod_group_one_pod_takes_the_node_alone(make, node):
    """So that the test above would notice."""
    node("first")
    job = make("single")
    until(lambda: len(placed(job)) == 1, SOON, expected="one is placed", details=job.details)


def test_pod_groups_show_no_drift_and_go_with_their_learners(make, api):
    job = make("tidy", annotations=POD_GROUPS)

    def groups():
        found = api.kubectl.list("podgroups.scheduling.k8s.io", "default", "diloco.dev/job=tidy")
        metadata = [
            item["metadata"] for item in found if "deletionTimestamp" not in item["metadata"]
        ]
        # The scheduler writes into the status.
        return {entry["name"]: (entry["uid"], entry.get("generation")) for entry in metadata}

    [before] = groups().items()
    job.change(regions=[{"name": "eu", "learners": 2}])
    until(lambda: len(groups()) == 2, SOON, expected="a second group", details=job.details)
    assert before in groups().items()
    job.change(regions=[{"name": "eu", "learners": 1}])
    until(lambda: [*groups()] == ["tidy-eu-0"], SOON, expected="it is gone", details=job.details)
    assert job.condition("Accepted")["reason"] == "Valid"
