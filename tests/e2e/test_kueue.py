"""
A job in a queue, on a real API server with Kueue's CRDs: what the operator makes for it, and what its status shows.

The test stands in for controllers, scheduler and kubelet, and for Kueue: it makes gated pods and Workloads,
and admits one learner after the other.
"""

from __future__ import annotations

import pytest

from diloco_testing.clusters import kueue, scale
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import until

SOON = 60.0
QUEUE = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "urgent"}
NO_QUOTA = (
    "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor any"
)
TWO_PODS = {"command": ["python", "train.py"], "podsPerLearner": 2}


@pytest.fixture(scope="module")
def api(local, tmp_path_factory):
    """A cluster without nodes, with Kueue's CRDs and the operator."""
    cluster = scale.api_server(local, "queues")
    kueue.apply_crds(cluster)
    with scale.operator(cluster, tmp_path_factory.mktemp("operator")):
        yield cluster
    local.end("queues")


@pytest.fixture
def make(api):
    """Jobs of two learners in a queue."""
    made = []

    def job(name, **learner):
        body = manifest(name, steps=1000, regions={"eu": 2}, sync={"quorum": 1})
        body["metadata"]["labels"] = QUEUE
        if learner:
            body["spec"]["learner"] = learner
        made.append(Job(api, "default", body).apply())
        return made[-1]

    yield job
    for made_job in made:
        made_job.delete("--wait=false")


def learner_sets(job):
    """Its two StatefulSets, by name."""

    def found():
        selector = f"diloco.dev/job={job.name},diloco.dev/role=learner"
        sets = job.cluster.kubectl.list("statefulsets", job.namespace, selector)
        return {item["metadata"]["name"]: item for item in sets}

    return until(lambda: len(found()) == 2 and found(), SOON, expected="two StatefulSets")


def expect_learners(job, reason, *parts):
    """Wait until LearnersReady has this reason and text."""

    def reached():
        condition = job.condition("LearnersReady")
        found = condition.get("reason") == reason
        return found and all(part in condition["message"] for part in parts) and condition

    return until(reached, SOON, expected=f"{reason}: {parts}", details=job.details)


def test_a_job_begins_with_the_learner_that_is_admitted_and_grows_with_the_next(make):
    job = make("grows")
    sets = learner_sets(job)
    assert sorted(sets) == ["grows-eu-0", "grows-eu-1"]
    for stateful_set in sets.values():
        assert stateful_set["metadata"]["labels"].items() >= QUEUE.items()
        kueue.make_gated_pods(job.cluster, stateful_set)
        workload = kueue.workload_of(stateful_set, "team-a")
        job.cluster.kubectl.apply(workload)
        kueue.set_condition(
            job.cluster, workload,
            type="QuotaReserved", status="False", reason="Pending", message=NO_QUOTA,
        )  # fmt: skip
    expect_learners(
        job, "WaitingInQueue", "0 of 2", f"in queue team-a: eu/0, eu/1; Kueue: {NO_QUOTA}"
    )
    assert job.status()["state"] == "Pending"
    assert "startTime" not in job.status(), "a deadline begins with the first admission"

    kueue.admit(job.cluster, "grows-eu-0-0", job.namespace)
    expect_learners(job, "WaitingInQueue", "1 of 2", f"in queue team-a: eu/1; Kueue: {NO_QUOTA}")
    assert job.status()["learners"]["summary"] == "1/2"
    assert "startTime" in job.status()

    kueue.admit(job.cluster, "grows-eu-1-1", job.namespace)
    expect_learners(job, "AllTraining")
    assert "PodTrouble" not in dict(job.events())


def test_the_pods_of_a_learner_are_one_statefulset_that_keeps_their_ordinals(make):
    first, second = learner_sets(make("gang", **TWO_PODS)).values()
    assert [item["spec"]["replicas"] for item in (first, second)] == [2, 2]
    assert second["spec"]["ordinals"] == {"start": 2}


def test_a_learner_that_is_preempted_waits_again(make):
    job = make("again")
    for stateful_set in learner_sets(job).values():
        kueue.make_gated_pods(job.cluster, stateful_set)
    for pod in ("again-eu-0-0", "again-eu-1-1"):
        kueue.admit(job.cluster, pod, job.namespace)
    expect_learners(job, "AllTraining")
    job.cluster.kubectl.delete("pod", "again-eu-1-1", job.namespace, "--force")
    kueue.make_gated_pods(job.cluster, learner_sets(job)["again-eu-1"])
    expect_learners(job, "WaitingInQueue", "1 of 2", "in queue team-a: eu/1")
