"""
The operator dies at every named point of its reconcile, the API server goes away: the end is as if nothing had been.
"""

from __future__ import annotations

import time

import pytest

from diloco_operator.settings import FAULT_POINTS
from diloco_testing.clusters_install import NAMESPACE
from diloco_testing.clusters_job import Job, manifest
from diloco_testing.kubectl import until

DEPLOYMENT = "deployment/diloco"
POINTS = [
    point.replace("N", str(n))
    for point in FAULT_POINTS
    for n in ((1, 4, 8) if point.endswith("N") else (0,))
]


def operator_env(kubectl, *settings: str) -> None:
    """Change the operator's variables; returns once the new pod was made."""
    kubectl("set", "env", DEPLOYMENT, "-n", NAMESPACE, *settings)


def operators(kubectl):
    return kubectl.list("pods", NAMESPACE, "app.kubernetes.io/component=operator")


def operator_restarts(kubectl) -> int:
    return max(
        (
            one["restartCount"]
            for pod in operators(kubectl)
            for one in pod["status"].get("containerStatuses", ())
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
    """A job whose operator nobody killed; its children are the measure."""
    job = small_job(eu, fleet, namespace, "calm").apply()
    job.until_condition("LearnersReady", 180)
    return job


@pytest.fixture
def mended(eu):
    """Whatever happens, the operator is whole afterwards."""
    yield
    operator_env(eu.kubectl, "DILOCO_FAULTS-")
    eu.kubectl("rollout", "status", DEPLOYMENT, "-n", NAMESPACE, "--timeout=120s")


@pytest.mark.parametrize("point", POINTS)
def test_an_operator_killed_there_ends_in_the_same_state(
    eu, fleet, namespace, undisturbed, mended, point
):
    kubectl = eu.kubectl
    calm = undisturbed.lives()
    kubectl("scale", DEPLOYMENT, "-n", NAMESPACE, "--replicas=0")
    until(lambda: not operators(kubectl), 60, saying="no operator is left that knows no fault")
    job = small_job(eu, fleet, namespace, f"killed-{point}").apply()
    operator_env(kubectl, f"DILOCO_FAULTS=reconcile:kill={point}")
    kubectl("scale", DEPLOYMENT, "-n", NAMESPACE, "--replicas=1")
    until(lambda: operator_restarts(kubectl) >= 1, 90, saying=f"the operator was killed {point}")
    operator_env(kubectl, "DILOCO_FAULTS-")
    job.until_condition("LearnersReady", 180)
    assert shape(job) == shape(undisturbed)
    assert all(restarts == 0 for _, restarts in job.lives().values()), job.lives()
    assert undisturbed.lives() == calm, "a job that stood by was touched"
    job.delete("--wait=false")


def test_half_a_minute_without_an_api_server_changes_nothing(eu, undisturbed):
    if not eu.local:
        pytest.skip("the API server is not ours to stop")
    calm, step, before = undisturbed.lives(), undisturbed.step(), shape(undisturbed)
    with eu.without_api_server():
        time.sleep(30.0)
    assert undisturbed.step() > step, "pods went on meanwhile"
    undisturbed.until_condition("SyncerReachable", 120)
    undisturbed.until_condition("LearnersReady", 120)
    assert undisturbed.lives() == calm
    assert shape(undisturbed) == before
    # The operator acts again: what is deleted by hand comes back.
    eu.kubectl.delete("service", f"{undisturbed.name}-eu", undisturbed.namespace)
    until(
        lambda: eu.kubectl.get("service", f"{undisturbed.name}-eu", undisturbed.namespace),
        120, saying="the operator repairs drift after the API server was away",
    )  # fmt: skip


def test_the_operator_itself_is_not_restarted_by_an_api_server_that_was_away(eu):
    """Its own restarts are those that the tests asked for: the pod is the newest, unharmed one."""
    assert operator_restarts(eu.kubectl) == 0
