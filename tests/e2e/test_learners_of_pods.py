"""
Learners of several pods: two learners of two pods each, whose ranks share gradients over gloo.

A rank that is killed, a pod that is evicted or preempted and a changed template restart whole learners,
and count against none: the restart limit is 0.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from diloco_testing.clusters.faults import another_node, kill_child, silent_kubelet
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import KubectlError, until
from diloco_testing.clusters.provision import Cluster

pytestmark = pytest.mark.usefixtures("resting")

BACK_SECONDS = 150.0
"""For two processes that import torch and meet, on busy cores."""

PROGRAM = """
import signal, time
import torch
from torch import distributed, nn
from diloco_worker import Learner

distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()
if rank > 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
learner = Learner.connect(model, optimizer) if rank == 0 else None

def share():
    for tensor in model.state_dict().values():
        distributed.broadcast(tensor, src=0)

def done():
    flag = torch.tensor(learner is not None and learner.done, dtype=torch.uint8)
    distributed.broadcast(flag, src=0)
    return bool(flag)

share()
while not done():
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= size
    optimizer.step()
    if learner is not None:
        learner.step(tokens=4 * size, loss=loss)
    share()
    time.sleep(0.25)
"""
LEARNERS = (("ranks-eu-0", "ranks-eu-1"), ("ranks-eu-2", "ranks-eu-3"))
"""The pods of each learner, by rank."""
SLOT = "example.com/slot"
"""A resource of which the node has as many as the job has pods."""
URGENT = "urgent"
"""Name of a PriorityClass, and of a pod of it that takes a slot."""

LOST_SECONDS = 300.0
"""Until a pod of a silent node is replaced: 50 s until the node counts as lost, its tolerance, its grace period."""


@pytest.fixture(scope="module")
def job(eu, fleet):
    """Both learners train."""
    body = manifest(
        "ranks", steps=10**6, regions={"eu": 2}, pod_fields=fleet.images.pod_fields,
        sync={"fragments": 2, "interval": 4, "quorum": 1},
        runPolicy={"learnerRestartLimit": 0},
    )  # fmt: skip
    learner = body["spec"]["learner"]
    del learner["recipe"]
    learner |= {
        "command": ["python3", "-c", PROGRAM], "podsPerLearner": 2,
        "resources": {"limits": {SLOT: 1}},
    }  # fmt: skip
    with slots(eu, 4), fleet.namespace("learners-of-pods", eu) as namespace:
        made = Job(eu, namespace, body).apply()
        made.until_condition("LearnersReady", 240)
        made.until_step(3, 120)
        yield made


@contextlib.contextmanager
def slots(cluster: Cluster, count: int) -> Iterator[None]:
    """The node has so many of SLOT, and pods of the class URGENT preempt others."""
    kubectl = cluster.kubectl
    [node] = kubectl.list("nodes")

    def advertise(count: int | None) -> None:
        change = json.dumps({"status": {"capacity": {SLOT: count and str(count)}}})
        name = node["metadata"]["name"]
        kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", change)

    kubectl.apply(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000,
         "metadata": {"name": URGENT}, "description": "for this test"}
    )  # fmt: skip
    advertise(count)
    try:
        yield
    finally:
        advertise(None)
        kubectl.delete("priorityclass", URGENT)


@pytest.fixture
def healed(job):
    """After each fault both learners train, nothing was merged twice, and no crash was counted."""
    step = job.step()
    yield job
    job.until_condition("LearnersReady", BACK_SECONDS)
    job.until_step(step + 5, BACK_SECONDS)
    assert job.audit().ok
    assert job.condition("Failed")["status"] == "False"
    for pod in (pod for pods in LEARNERS for pod in pods):
        assert counts(job, pod)["faults"] == 0
        assert job.instances()[pod][1] == 0, "no container ended"


def counts(job: Job, pod: str) -> dict[str, int]:
    """How often the pod's process was started, and how often it crashed."""
    text = job.cluster.kubectl.exec(
        pod, "cat", "/var/lib/diloco/lives.json", namespace=job.namespace
    )
    return dict(json.loads(text))


def joins(job: Job, learner: str) -> int:
    """How often it has joined: its pods are ready for some seconds after their processes ended."""
    return sum(line["event"] == "join" and line["learner"] == learner for line in job.log())


def until_back(job: Job, learner: str, before: int) -> None:
    until(
        lambda: joins(job, learner) > before, BACK_SECONDS, expected=f"{learner} joins again",
        every=2.0, details=job.details,
    )  # fmt: skip
    job.until_condition("LearnersReady", BACK_SECONDS)


def until_started(job: Job, pod: str, times: int) -> None:
    until(
        lambda: counts(job, pod)["lives"] >= times, BACK_SECONDS,
        expected=f"the process of {pod} is started again", details=job.details,
    )  # fmt: skip


def test_a_killed_rank_restarts_its_whole_learner_and_no_other(healed):
    job, (mine, others) = healed, LEARNERS
    instances, joined = job.instances(), joins(job, "eu/0")
    before = {pod: counts(job, pod)["lives"] for pod in (*mine, *others)}
    kill_child(job, mine[1], "init_process_group", seconds=90)
    for pod in mine:
        until_started(job, pod, before[pod] + 1)
    until_back(job, "eu/0", joined)
    assert job.instances() == instances, "no pod was replaced"
    assert {pod: counts(job, pod)["lives"] for pod in others} == {p: before[p] for p in others}


def test_a_drain_takes_one_learner_at_a_time_and_restarts_it_whole(healed):
    job, (mine, others) = healed, LEARNERS
    instances, joined = job.instances(), joins(job, "eu/0")
    until(
        lambda: job.disruptions_allowed() == 1,
        60,
        expected="one disruption is allowed",
        details=job.details,
    )
    job.evict(mine[1])
    with pytest.raises(KubectlError, match="disruption budget"):
        job.evict(others[0])
    until(
        lambda: job.instances().get(mine[1], instances[mine[1]])[0] != instances[mine[1]][0],
        BACK_SECONDS, expected=f"another pod takes the place of {mine[1]}", details=job.details,
    )  # fmt: skip
    until_back(job, "eu/0", joined)
    now = job.instances()
    assert {pod: now[pod] for pod in (mine[0], *others)} == {
        pod: instances[pod] for pod in (mine[0], *others)
    }


def test_a_lost_pod_restarts_its_learner(healed):
    """Deleted by force, as after the loss of its node: no process of it sends Goodbye."""
    job, (mine, others) = healed, LEARNERS
    joined = joins(job, "eu/1")
    witness = {pod: job.instances()[pod] for pod in mine}
    peer = counts(job, others[1])["lives"]
    job.cluster.kubectl.delete("pod", others[0], job.namespace, "--force", "--grace-period=0")
    until_started(job, others[1], peer + 1)
    until_back(job, "eu/1", joined)
    assert {pod: job.instances()[pod] for pod in mine} == witness


def test_a_preempted_pod_takes_its_learner_out_until_there_is_room_again(healed):
    job = healed
    before, kubectl = job.instances(), job.cluster.kubectl
    # It takes the slot even though its image does not exist.
    container = {"name": "main", "image": "localhost/none", "imagePullPolicy": "Never",
                 "resources": {"limits": {SLOT: 1}}}  # fmt: skip
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": URGENT},
         "spec": {"priorityClassName": URGENT, "containers": [container]}},
        namespace=job.namespace,
    )  # fmt: skip
    until(
        lambda: f"Insufficient {SLOT}" in job.condition("LearnersReady")["message"],
        BACK_SECONDS, expected="the condition states what the pod waits for", details=job.details,
    )  # fmt: skip
    job.until_step(job.step() + 20, BACK_SECONDS)
    kubectl.delete("pod", URGENT, job.namespace, "--force", "--grace-period=0")
    job.until_condition("LearnersReady", BACK_SECONDS)
    now = job.instances()
    [taken] = [pod for pods in LEARNERS for pod in pods if now[pod] != before[pod]]
    preempted = kubectl(
        "get", "events", "-n", job.namespace, "--field-selector", "reason=Preempted",
        "-o", "jsonpath={.items[*].involvedObject.name}",
    )  # fmt: skip
    assert taken in preempted.split()


@pytest.mark.slow_tier
def test_a_changed_template_replaces_one_whole_learner_after_the_other(healed):
    job = healed
    before = job.instances()
    env = [*job.manifest["spec"]["learner"]["env"], {"name": "NEW", "value": "1"}]
    job.change(learner={"env": env})
    down: set[tuple[int, ...]] = set()

    def replaced() -> bool:
        uids = {pod: uid for pod, (uid, _) in job.instances().items()}
        gone = [
            index for index, pods in enumerate(LEARNERS) if any(pod not in uids for pod in pods)
        ]
        down.add(tuple(gone))
        return all(
            uids.get(pod, before[pod][0]) != before[pod][0] for pods in LEARNERS for pod in pods
        )

    until(
        replaced, 2 * BACK_SECONDS, expected="all pods are replaced", every=0.2,
        details=job.details,
    )  # fmt: skip
    assert (0, 1) not in down, "one learner at a time"
    job.until_condition("LearnersReady", BACK_SECONDS)


@pytest.mark.slow_tier
def test_a_lost_node_takes_one_learner_whole_and_it_comes_back_whole(healed):
    """The pods of the other learner tolerate the loss for longer, and train on."""
    job, (others, mine) = healed, LEARNERS
    if not job.cluster.local:
        pytest.skip("the kubelet of a given cluster cannot be stopped")
    job.change(runPolicy={"forceDeletePodsAfterSeconds": 5})
    before, joined = job.instances(), joins(job, "eu/1")
    running = {pod: counts(job, pod)["lives"] for pod in others}
    for pod in mine:
        lost = {"key": "node.kubernetes.io/unreachable", "operator": "Exists",
                "effect": "NoExecute", "tolerationSeconds": 10}  # fmt: skip
        tolerations = job.cluster.kubectl.get("pod", pod, job.namespace)["spec"]["tolerations"]
        # The first that matches a taint counts, and the control plane has added one of 300 s.
        change = {"spec": {"tolerations": [lost, *tolerations]}}
        job.cluster.kubectl.patch("pod", pod, change, job.namespace)
    with another_node(job.cluster), silent_kubelet(job.cluster):
        until(
            lambda: all(job.instances().get(p, before[p])[0] != before[p][0] for p in mine),
            LOST_SECONDS, expected="both pods of the learner are replaced", details=job.details,
        )  # fmt: skip
        # No status shows it: the Service of the syncer, which is on that node, has no endpoints meanwhile.
        merges = len(job.merges())
        until(
            lambda: len(job.merges()) > merges + 5, BACK_SECONDS,
            expected="the other learner trains on", details=job.details,
        )  # fmt: skip
    until_back(job, "eu/1", joined)
    assert {pod: job.instances()[pod] for pod in others} == {pod: before[pod] for pod in others}
    assert {pod: counts(job, pod)["lives"] for pod in others} == running
