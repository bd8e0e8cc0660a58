"""Volumes that stay, volumes that are lost, and a node that is lost."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest

from diloco.journal.records import Recovery
from diloco_testing.clusters.faults import another_node, silent_kubelet
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import until

SOON = 120.0
NODE_LOST = 90.0
"""Until the control plane considers a silent node lost: 50 s by default."""
CLASS = "e2e-fixed-size"
"""A StorageClass that does not allow expansion, until a test changes that."""
NOT_THERE = "not-there"
"""A Secret."""


@pytest.fixture
def make(eu, fleet, namespace):
    """A job in a namespace of this test."""

    def made(name: str, *, regions=None, **spec) -> Job:
        fields = fleet.images.pod_fields
        regions = regions or {"eu": 1}
        body = manifest(name, steps=10**6, regions=regions, pod_fields=fields, **spec)
        return Job(eu, namespace, body)

    return made


@pytest.fixture(scope="module")
def mounting(eu, fleet) -> Iterator[Job]:
    """
    A job whose syncer runs on a volume of CLASS, and whose learner mounts a Secret that does not exist.

    The first test of this file asks for it: until that of the mount begins, the operator has reported it.
    """
    if not eu.local:
        pytest.skip("volumes of a given cluster are not of a class of these tests")
    storage = {
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": CLASS},
        "provisioner": "example.com/none", "allowVolumeExpansion": False,
    }  # fmt: skip
    fields = copy.deepcopy(dict(fleet.images.pod_fields))
    fields["volumes"].append({"name": "keys", "secret": {"secretName": NOT_THERE}})
    fields["containers"][0]["volumeMounts"].append({"name": "keys", "mountPath": "/keys"})
    body = manifest(
        "mounting", steps=10**6, regions={"eu": 1}, pod_fields=fields,
        syncer={"storage": {"size": "1Gi", "storageClassName": CLASS}},
    )  # fmt: skip
    eu.kubectl.apply(storage)
    with fleet.namespace("mounting", eu) as namespace:
        yield Job(eu, namespace, body).apply()
    eu.kubectl.delete("storageclass", CLASS, "")


def claim_of(job: Job):
    return job.cluster.kubectl.get("pvc", f"{job.name}-syncer", job.namespace)


def size_of(job: Job) -> str:
    """Of the syncer's volume, as its claim asks for it."""
    return str(claim_of(job)["spec"]["resources"]["requests"]["storage"])


def until_event(job: Job, reason: str, message: str) -> None:
    """Wait for an Event with this reason and text."""
    until(
        lambda: any(why == reason and message in text for why, text in job.events()),
        30, expected=f"an Event {reason} with {message!r}", details=job.details,
    )  # fmt: skip


def recoveries(job: Job, learner: str) -> list[Recovery]:
    """With which state each process of a learner began, if it began after step 0."""
    return [found for found in job.audit().recoveries if found.learner == learner]


def give_up(job: Job, uid: str) -> None:
    job.cluster.kubectl(
        "annotate", "dlj", job.name, "-n", job.namespace, f"diloco.dev/lost-volume={uid}"
    )


def test_the_syncers_claim_grows_as_soon_as_its_class_allows_it_and_never_shrinks(mounting):
    """Until then the job names the API server's answer, and runs on."""
    job, kubectl = mounting, mounting.cluster.kubectl
    job.until_condition("SyncerReady", SOON)
    before = job.instances()
    job.change(syncer={"storage": {"size": "2Gi"}})
    refused = job.until_condition("Accepted", SOON, status="False", reason="Refused")
    message = "only dynamically provisioned pvc can be resized"
    assert "PersistentVolumeClaim mounting-syncer: " in refused["message"]
    assert message in refused["message"]
    until_event(job, "Refused", message)
    assert size_of(job) == "1Gi"
    assert job.condition("SyncerReady")["status"] == "True"

    kubectl.patch("storageclass", CLASS, {"allowVolumeExpansion": True}, "")
    until(lambda: size_of(job) == "2Gi", SOON, expected="it grows", details=job.details)
    job.until_condition("Accepted", SOON, reason="Valid")

    # The API server would accept less than a person asked for, since the volume has not grown yet.
    larger = {"spec": {"resources": {"requests": {"storage": "4Gi"}}}}
    kubectl.patch("pvc", "mounting-syncer", larger, job.namespace)
    job.change(syncer={"storage": {"size": "3Gi"}})
    until(
        lambda: job.status()["observedGeneration"] == job.object()["metadata"]["generation"],
        SOON, expected="the operator has seen the change", details=job.details,
    )  # fmt: skip
    assert size_of(job) == "4Gi"
    assert job.condition("Accepted")["reason"] == "Valid"
    assert job.instances() == before, "nothing was restarted"


def test_a_learner_that_moves_finds_its_state_on_its_volume(make):
    job = make("moving", learner={"storage": {"size": "1Gi"}}).apply()
    job.until_step(20, 240)
    kubectl, pod = job.cluster.kubectl, job.pod_of("eu/0")
    first = job.instances()[pod]
    kubectl.delete("pod", pod, job.namespace)
    until(lambda: job.instances().get(pod, first) != first, SOON, expected="a new pod")
    job.until_condition("LearnersReady", SOON)
    until(
        lambda: job.steps("eu/0")[-1:] and job.steps("eu/0")[-1]["incarnation"] > 1,
        SOON, expected="steps of the second incarnation", details=job.details,
    )  # fmt: skip
    lines = job.steps("eu/0")
    assert lines[0]["incarnation"] == 1, "what the first pod wrote is there"
    began = next(line["localStep"] for line in lines if line["incarnation"] > 1)
    listing = "import os; print(*os.listdir('/var/lib/diloco'))"
    found = re.findall(r"checkpoint-(\d+)\.json", job.in_learner("eu/0", listing))
    assert any(int(step) < began for step in found), "with the checkpoint that it wrote at its end"
    assert job.condition("Accepted")["reason"] == "Valid"


def test_a_learner_that_lost_its_volume_returns_with_the_moments_of_another_pod_of_its_region(make):
    job = make("robbed", regions={"eu": 2}).apply()
    job.until_step(40, 240)  # H is 8: from then on, learners have moments of value
    job.until_condition("LearnersReady", SOON)
    kubectl, pod = job.cluster.kubectl, job.pod_of("eu/1")
    other = job.pod_of("eu/0")
    before, known, step = job.instances(), len(recoveries(job, "eu/1")), job.step()
    kubectl.delete("pod", pod, job.namespace, "--force", "--grace-period=0")
    found = until(
        lambda: recoveries(job, "eu/1")[known:],
        2 * SOON, expected="eu/1 trains again", details=job.details,
    )  # fmt: skip
    assert [(r.source, r.peer, r.problem) for r in found] == [("Peer", "eu/0", "")]
    assert found[0].bytes > 0
    assert found[0].state_step >= step, "it is of the moment of the request"
    listing = "import os; print(*os.listdir('/var/lib/diloco'))"
    assert "peer-state" not in job.in_learner("eu/1", listing)
    job.until_condition("LearnersReady", SOON)
    assert job.instances()[other] == before[other], "the other one trains on"
    assert job.audit().ok


def test_a_lost_claim_holds_the_job_until_a_person_gives_it_up(make):
    job = make("bereft").apply()
    job.until_step(20, 240)
    uid = claim_of(job)["metadata"]["uid"]
    assert job.status()["syncer"]["volumeUid"] == uid
    job.change(runPolicy={"suspend": True})
    until(lambda: not job.pods(), SOON, expected="no pod is left", details=job.details)
    job.cluster.kubectl.delete("pvc", f"{job.name}-syncer", job.namespace)
    job.change(runPolicy={"suspend": False})
    seen = job.until_condition("SyncerReady", SOON, status="False", reason="VolumeGone")
    assert f"diloco.dev/lost-volume={uid}" in seen["message"]
    # With its learner, so the operator has carried out the resumption.
    until(lambda: job.pods("learner"), SOON, expected="the learner is back", details=job.details)
    assert claim_of(job) is None
    assert not job.pods("syncer")
    give_up(job, uid)
    job.until_condition("LearnersReady", SOON)
    assert claim_of(job)["metadata"]["uid"] == job.status()["syncer"]["volumeUid"] != uid
    job.until_step(10, SOON)
    assert job.status()["epoch"] == 1, "the job started over"


def test_a_retained_volume_stays_and_the_next_job_of_the_name_continues_from_it(make):
    retained = {"storage": {"size": "1Gi", "whenDeleted": "Retain"}}
    job = make("heir", syncer=retained).apply()
    job.until_step(40, 240)
    uid = claim_of(job)["metadata"]["uid"]
    job.delete()
    until(lambda: not job.pods(), SOON, expected="no pod is left")
    left = until(
        lambda: [c for c in job.children() if c["kind"] == "PersistentVolumeClaim"]
        if len(job.children()) == 1 else None,
        SOON, expected="the claim alone is left",
    )  # fmt: skip
    assert [claim["metadata"]["uid"] for claim in left] == [uid]
    job.apply()
    job.until_condition("LearnersReady", 240)
    assert job.step() >= 40, "what was done before is not done again"
    assert claim_of(job)["metadata"]["uid"] == uid
    # Without the policy the claim belongs to the job again, and goes with it.
    job.change(syncer={"storage": {"whenDeleted": "Delete"}})
    until(lambda: claim_of(job)["metadata"].get("ownerReferences"), SOON, expected="an owner")
    job.delete()
    until(lambda: claim_of(job) is None, SOON, expected="the claim is deleted as well")


def test_a_volume_that_the_kubelet_cannot_mount_is_reported_with_its_message(mounting):
    job = mounting
    message = (
        f'FailedMount: MountVolume.SetUp failed for volume "keys" : secret "{NOT_THERE}" not found'
    )
    ready = job.until_condition("LearnersReady", SOON, status="False", reason="PodTrouble")
    assert ready["message"] == f"pod mounting-eu-0: {message}"
    until_event(job, "PodTrouble", message)


def test_a_learner_on_a_lost_node_is_replaced_by_force(make, eu):
    if not eu.local:
        pytest.skip("the kubelet of a given cluster cannot be stopped")
    job = make("cast-off", runPolicy={"forceDeletePodsAfterSeconds": 5})
    lost = [f"node.kubernetes.io/{taint}" for taint in ("not-ready", "unreachable")]
    job.manifest["spec"]["learner"]["podTemplate"]["spec"] |= {
        "terminationGracePeriodSeconds": 5,
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 20}
            for key in lost
        ],
    }
    job.apply()
    job.until_condition("LearnersReady", 240)
    pod = job.pod_of("eu/0")
    first = job.instances()[pod]
    node = job.cluster.kubectl.get("pod", pod, job.namespace)["spec"]["nodeName"]
    with another_node(eu), silent_kubelet(eu):
        trouble = job.until_condition(
            "LearnersReady", NODE_LOST + SOON, status="False", reason="PodTrouble"
        )
        assert trouble["message"] == (
            f'pod {pod}: its node {node} does not respond; see "Lost nodes" in docs/operations.md'
        )
        until(
            lambda: job.instances().get(pod, first)[0] != first[0], SOON,
            expected="the taint manager deletes the pod, and another one has its name",
            details=job.details,
        )  # fmt: skip
    job.until_condition("LearnersReady", SOON)
    assert job.audit().ok
