"""
The operator is killed at every named point of its reconcile, or loses the API server: the result is the same.
"""

from __future__ import annotations

import time

import pytest

from diloco_operator.settings import FAULT_POINTS
from diloco_testing.clusters.install import NAMESPACE
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import until

DEPLOYMENT = "deployment/diloco"
POINTS = [
    point.replace("N", str(n))
    for point in FAULT_POINTS
    for n in ((1, 4, 8) if point.endswith("N") else (0,))
]
FIRST_TIER = ("after-apply-4", "before-status")
"""The points of `make test`: in the middle of the writes, and after them."""


def operator_env(kubectl, *settings: str) -> None:
    """Change the operator's variables; returns once the new pod was made."""
    kubectl("set", "env", DEPLOYMENT, "-n", NAMESPACE, *settings)


def operators(kubectl):
    return kubectl.list("pods", NAMESPACE, "app.kubernetes.io/component=operator")


def operator_restarts(kubectl) -> int:
    return max(
        (
            status["restartCount"]
            for pod in operators(kubectl)
            for status in pod["status"].get("containerStatuses", ())
        ),
        default=0,
    )


def shape(job: Job):
    """What the children are, without what differs between two equal jobs."""
    found = {}
    for child in job.children():
        name = child["metadata"]["name"].replace(job.name, "JOB")
        spec = dict(child.get("spec") or {})
        for field in ("clusterIP", "clusterIPs", "volumeName"):
            spec.pop(field, None)
        if child["kind"] == "ConfigMap":
            name = "JOB-spec"
        elif child["kind"] in ("StatefulSet", "Deployment"):
            spec = {"replicas": spec["replicas"]}
        else:
            spec = str(spec).replace(job.name, "JOB")
        found.setdefault((child["kind"], name), []).append(spec)
    return {key: sorted(map(str, specs)) for key, specs in found.items()}


@pytest.fixture(scope="module")
def namespace(eu, fleet):
    with fleet.namespace("operator-failures", eu) as name:
        yield name


def small_job(eu, fleet, namespace, name, learners=1):
    return Job(
        eu, namespace,
        manifest(name, steps=10**6, regions={"eu": learners}, pod_fields=fleet.images.pod_fields),
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(eu, fleet, namespace):
    """A job whose operator was not killed; its children are the reference."""
    job = small_job(eu, fleet, namespace, "calm").apply()
    job.until_condition("LearnersReady", 180)
    return job


@pytest.fixture
def fixed(eu):
    """The operator is restored afterwards in any case."""
    yield
    operator_env(eu.kubectl, "DILOCO_FAULTS-")
    eu.kubectl("rollout", "status", DEPLOYMENT, "-n", NAMESPACE, "--timeout=120s")


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=() if p in FIRST_TIER else pytest.mark.slow_tier) for p in POINTS],
)
def test_an_operator_killed_there_ends_in_the_same_state(
    eu, fleet, namespace, undisturbed, fixed, point
):
    kubectl = eu.kubectl
    calm = undisturbed.instances()
    kubectl("scale", DEPLOYMENT, "-n", NAMESPACE, "--replicas=0")
    until(lambda: not operators(kubectl), 60, expected="no operator is left that knows no fault")
    job = small_job(eu, fleet, namespace, f"killed-{point}").apply()
    operator_env(kubectl, f"DILOCO_FAULTS=reconcile:kill={point}")
    kubectl("scale", DEPLOYMENT, "-n", NAMESPACE, "--replicas=1")
    until(lambda: operator_restarts(kubectl) >= 1, 90, expected=f"the operator was killed {point}")
    operator_env(kubectl, "DILOCO_FAULTS-")
    job.until_condition("LearnersReady", 180)
    assert shape(job) == shape(undisturbed)
    assert all(restarts == 0 for _, restarts in job.instances().values()), job.instances()
    assert undisturbed.instances() == calm, "a job that stood by was touched"
    job.delete("--wait=false")


def test_half_a_minute_without_an_api_server_changes_nothing(eu, undisturbed):
    if not eu.local:
        pytest.skip("the API server is not ours to stop")
    calm, step, before = undisturbed.instances(), undisturbed.step(), shape(undisturbed)
    with eu.without_api_server():
        time.sleep(30.0)
    assert undisturbed.step() > step, "pods kept running meanwhile"
    undisturbed.until_condition("SyncerReachable", 120)
    undisturbed.until_condition("LearnersReady", 120)
    assert undisturbed.instances() == calm
    assert shape(undisturbed) == before
    # The operator acts again: a deleted child comes back.
    eu.kubectl.delete("service", f"{undisturbed.name}-eu", undisturbed.namespace)
    until(
        lambda: eu.kubectl.get("service", f"{undisturbed.name}-eu", undisturbed.namespace),
        120, expected="the operator repairs drift after the API server was unavailable",
    )  # fmt: skip


def test_the_operator_itself_is_not_restarted_by_an_api_server_that_was_down(eu):
    """Its own restarts are those that the tests asked for: the pod is the newest and was not killed."""
    assert operator_restarts(eu.kubectl) == 0
