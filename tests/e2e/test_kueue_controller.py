"""
Jobs in the queues of Kueue's own controller: what it admits and preempts trains or waits, and nothing of a job
stays behind in its queue (docs/adr/0021-a-learner-is-an-entry-in-the-queue.md).

No learner may restart on its own account: a learner that Kueue preempts has not failed.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from diloco_testing.clusters import kueue_controller
from diloco_testing.clusters.install import install
from diloco_testing.clusters.job import Job, manifest, steadily
from diloco_testing.clusters.kubectl import until
from diloco_testing.clusters.kueue_controller import PRIORITY, QUEUE, Queue

OPERATOR = "system:serviceaccount:diloco-system:"
PATIENCE_SECONDS = 180.0
SOON_SECONDS = 60.0
LEARNER = {"cpu": "100m", "memory": "64Mi"}
"""What one pod of a learner takes of the quota."""
WORDS = "Kueue: couldn't assign flavors to pod set main: insufficient unused quota for cpu"
SLEEP = {"command": ["python3", "-c", "import time; time.sleep(10**6)"], "podsPerLearner": 2}
"""For learners that need only be admitted."""
CHANGED = [{"name": "OMP_NUM_THREADS", "value": "2"}]
"""Environment of another template."""


@pytest.fixture(scope="module")
def cluster(fleet):
    """A cluster with the operator and Kueue."""
    if fleet.local is None:
        pytest.skip("Kueue's image is built for local clusters")
    made = fleet.cluster("kueue")
    install(made, fleet.images)
    kueue_controller.install(made)
    for name, value in (("urgent", 1000), ("idle", 10)):
        made.kubectl.apply(kueue_controller.priority(name, value))
    yield made
    fleet.end("kueue")


@pytest.fixture
def queue(cluster, fleet, request):
    """A queue `team-a` in a namespace of this test."""
    name = request.node.name.removeprefix("test_")[:40].replace("_", "-").strip("-")
    with fleet.namespace(name, cluster) as namespace:
        made = Queue(cluster, namespace, "team-a")
        yield made
        made.delete()


@pytest.fixture
def make(queue, fleet):
    """Jobs of two learners in the queue; with a recipe, unless the test gives them a command."""
    made = []

    def job(**learner):
        body = manifest(
            "queued", steps=10**6, regions={"eu": 2}, pod_fields=fleet.images.pod_fields,
            sync={"quorum": 1}, runPolicy={"learnerRestartLimit": 0},
            learner={"resources": {"requests": LEARNER}, **learner},
        )  # fmt: skip
        if learner:
            del body["spec"]["learner"]["recipe"]
        body["metadata"]["labels"] = {QUEUE: queue.name, PRIORITY: "idle"}
        made.append(Job(queue.cluster, queue.namespace, body).apply())
        return made[-1]

    yield job
    for made_job in made:
        made_job.delete("--wait=false")


def admitted(job):
    """Pods of learners that no gate holds back, by name."""
    pods = job.pods("learner")
    return {p["metadata"]["name"] for p in pods if not p["spec"].get("schedulingGates")}


def waiting_name(job):
    """The one of its two learners that waits, such as "eu/1"."""
    (pod,) = {"queued-eu-0-0", "queued-eu-1-1"} - admitted(job)
    return f"eu/{pod[-1]}"


def expect_one_waits(job):
    """Wait until one learner trains, and the condition names the other with Kueue's explanation."""

    def reached():
        condition = job.condition("LearnersReady")
        parts = ("1 of 2", f"in queue team-a: {waiting_name(job)}; {WORDS}")
        message = condition.get("message", "")
        return condition.get("reason") == "WaitingInQueue" and all(p in message for p in parts)

    until(lambda: len(admitted(job)) == 1 and reached(), PATIENCE_SECONDS,
          expected="one learner trains, the other waits", details=job.details)  # fmt: skip


def has_changed(pods, num):
    """Whether there are so many pods, all with CHANGED."""
    envs = [pod["spec"]["containers"][0]["env"] for pod in pods]
    return len(envs) == num and all(CHANGED[0] in env for env in envs)


def expect_progress(job, steps=10):
    """Wait for so many more global steps."""
    job.until_step(job.step() + steps, PATIENCE_SECONDS)


def writes(job, resource, since):
    """What the operator asked to change."""
    requests = job.cluster.audit.requests(user=OPERATOR, namespace=job.namespace, since=since)
    return [str(request) for request in requests if request.writes and request.resource == resource]


def test_a_job_begins_with_the_learner_that_fits_and_grows_when_the_quota_does(queue, make):
    queue.resize("100m")
    job = make()
    expect_one_waits(job)
    assert job.status()["learners"]["summary"] == "1/2"
    assert job.status()["state"] == "Training"
    expect_progress(job)
    queue.resize("200m")
    job.until_condition("LearnersReady", PATIENCE_SECONDS, reason="AllTraining")
    expect_progress(job)
    assert {line["learner"] for line in job.log() if line["event"] == "join"} >= {"eu/0", "eu/1"}
    assert "PodTrouble" not in dict(job.events())
    entries = {workload["metadata"]["uid"] for workload in queue.workloads()}
    job.change(learner={"env": CHANGED})
    until(lambda: has_changed(job.pods("learner"), 2), PATIENCE_SECONDS,
          expected="every learner has the changed template", details=job.details)  # fmt: skip
    job.until_condition("LearnersReady", PATIENCE_SECONDS, reason="AllTraining")
    assert {workload["metadata"]["uid"] for workload in queue.workloads()} == entries
    # Kueue's webhook adds an annotation to what the operator applies.
    since = datetime.now(UTC)
    steadily(lambda: not writes(job, "statefulsets", since), 15, expected="no write")


def test_a_learner_that_is_preempted_waits_while_the_other_trains_and_then_returns(queue, make):
    queue.resize("200m")
    job = make()
    job.until_condition("LearnersReady", PATIENCE_SECONDS, reason="AllTraining")
    expect_progress(job)
    urgent = kueue_controller.pod("urgent", queue.name, "urgent", LEARNER)
    queue.cluster.kubectl.apply(urgent, namespace=queue.namespace)
    expect_one_waits(job)
    expect_progress(job)
    queue.cluster.kubectl.delete("pod", "urgent", queue.namespace)
    job.until_condition("LearnersReady", PATIENCE_SECONDS, reason="AllTraining")
    expect_progress(job)
    assert job.condition("Failed").get("status") != "True"
    assert not {"PodTrouble", "LearnersFailed"} & set(dict(job.events()))


def test_a_suspended_job_frees_its_quota_and_a_deleted_one_leaves_no_workload(queue, make):
    queue.resize("200m")
    job = make()
    job.until_condition("LearnersReady", PATIENCE_SECONDS, reason="AllTraining")
    expect_progress(job)
    assert len(queue.workloads()) == 2
    job.change(runPolicy={"suspend": True})
    job.until_condition("Suspended", PATIENCE_SECONDS)
    until(lambda: not queue.workloads(), SOON_SECONDS, expected="no Workloads", details=job.details)
    until(lambda: queue.used()["cpu"] == "0", SOON_SECONDS, expected="no quota is used")
    changed = {"metadata": {"labels": {PRIORITY: "urgent"}}}
    queue.cluster.kubectl.patch("dilocojob", job.name, changed, queue.namespace)
    job.change(runPolicy={"suspend": False})
    job.until_condition("LearnersReady", PATIENCE_SECONDS, reason="AllTraining")
    assert [workload["spec"]["priority"] for workload in queue.workloads()] == [1000, 1000]
    expect_progress(job)
    # At once: Kueue refuses the resume until the pods have ended.
    job.change(runPolicy={"suspend": True})
    job.until_condition("Suspended", PATIENCE_SECONDS)
    job.change(runPolicy={"suspend": False})
    job.until_condition("LearnersReady", PATIENCE_SECONDS, reason="AllTraining")
    job.until_condition("Accepted", SOON_SECONDS)
    expect_progress(job)
    job.delete()
    until(lambda: not queue.workloads(), SOON_SECONDS, expected="no Workloads")
    until(lambda: queue.used()["cpu"] == "0", SOON_SECONDS, expected="no quota is used")


def test_the_pods_of_a_learner_are_admitted_together_or_not_at_all(queue, make):
    queue.resize("300m")
    job = make(**SLEEP)
    gangs = ({"queued-eu-0-0", "queued-eu-0-1"}, {"queued-eu-1-2", "queued-eu-1-3"})
    until(lambda: len(job.pods("learner")) == 4 and admitted(job) in gangs, PATIENCE_SECONDS,
          expected="one learner is admitted", details=job.details)  # fmt: skip
    first = admitted(job)
    steadily(lambda: admitted(job) == first, 10, expected="room for a third pod admits none")
    job.change(learner={"env": CHANGED})
    until(lambda: has_changed([p for p in job.pods("learner") if p["metadata"]["name"] not in first], 2),
          SOON_SECONDS, expected="the learner that waits has the changed template")  # fmt: skip
    steadily(lambda: admitted(job) == first, 10, expected="it still waits")
    queue.resize("400m")
    until(lambda: admitted(job) == gangs[0] | gangs[1], SOON_SECONDS, expected="both are admitted")


def test_other_requests_are_refused_until_the_statefulsets_are_deleted(queue, make):
    queue.resize("400m")
    job = make(**{**SLEEP, "podsPerLearner": 1})
    until(lambda: len(admitted(job)) == 2, PATIENCE_SECONDS, expected="both are admitted")
    more = {"cpu": "200m", "memory": "64Mi"}
    job.change(learner={"resources": {"requests": more}})
    refused = job.until_condition("Accepted", SOON_SECONDS, status="False", reason="Refused")
    assert "vstatefulset.kb.io" in refused["message"]
    assert "field is immutable" in refused["message"]
    job.change(runPolicy={"suspend": True})
    until(lambda: not job.pods("learner"), SOON_SECONDS, expected="no learners")
    sets = f"diloco.dev/job={job.name},diloco.dev/role=learner"
    queue.cluster.kubectl("delete", "statefulset", "-n", queue.namespace, "-l", sets)
    job.change(runPolicy={"suspend": False})
    until(lambda: len(admitted(job)) == 2, PATIENCE_SECONDS, expected="both are admitted again",
          details=job.details)  # fmt: skip
    for pod in job.pods("learner"):
        assert pod["spec"]["containers"][0]["resources"]["requests"] == more
    until(lambda: queue.used()["cpu"] == "400m", SOON_SECONDS, expected="the new requests count")
    job.until_condition("Accepted", SOON_SECONDS)
