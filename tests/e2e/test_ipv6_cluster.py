"""
A job in a cluster in which nothing has an IPv4 address (nodes, pods, Services, API server), and one in a dual-stack
cluster.
"""

from __future__ import annotations

import contextlib
import ipaddress

import pytest

from diloco_testing.clusters.install import install
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import until

PATIENCE_SECONDS = 240.0


@contextlib.contextmanager
def started(fleet, name, kind):
    """A cluster of this kind, with the operator."""
    if fleet.local is None:
        pytest.skip("given clusters have the addresses that they have")
    made = fleet.cluster(name, kind=kind)
    install(made, fleet.images)
    yield made
    fleet.end(name)


@pytest.fixture
def cluster(fleet):
    """Without IPv4."""
    with started(fleet, "six", "up-ipv6") as made:
        yield made


@pytest.fixture
def dual(fleet):
    """With both families."""
    with started(fleet, "dual", "up-dual") as made:
        yield made


def is_ipv6(address: str) -> bool:
    return ipaddress.ip_address(address).version == 6


def test_a_job_trains_and_completes_where_there_is_no_ipv4(cluster, fleet):
    with fleet.namespace("six", cluster) as namespace:
        body = manifest("six", steps=40, regions={"eu": 2}, pod_fields=fleet.images.pod_fields)
        job = Job(cluster, namespace, body).apply()
        job.until_condition("LearnersReady", PATIENCE_SECONDS)
        pods = cluster.kubectl.list("pods", "")
        addresses = [entry["ip"] for pod in pods for entry in pod["status"]["podIPs"]]
        services = [
            address for service in cluster.kubectl.list("services", "")
            for address in service["spec"]["clusterIPs"] if address != "None"
        ]  # fmt: skip
        assert len(addresses) >= 4, "operator, syncer, learners"
        assert all(map(is_ipv6, [*addresses, *services, cluster.address]))
        assert job.condition("SyncerReachable")["reason"] == "Answers", "the operator asks it"
        job.until_condition("Complete", PATIENCE_SECONDS)
        audit = until(job.audit, 60, expected="an audit", details=job.details)
        assert audit.ok


CONNECT = """
import socket
for address in {addresses}:
    for port in {ports}:
        socket.create_connection((address, port), 10).close()
"""


def families(addresses) -> list[int]:
    return sorted(ipaddress.ip_address(address).version for address in addresses)


def test_a_job_trains_and_completes_where_services_and_pods_have_both_families(dual, fleet):
    with fleet.namespace("dual", dual) as namespace:
        service = {"service": {"ipFamilyPolicy": "RequireDualStack"}}
        body = manifest(
            "dual", steps=40, regions={"eu": 2}, pod_fields=fleet.images.pod_fields, syncer=service
        )
        job = Job(dual, namespace, body).apply()
        job.until_condition("LearnersReady", PATIENCE_SECONDS)
        made = dual.kubectl.get("service", "dual-syncer", namespace)["spec"]["clusterIPs"]
        assert families(made) == [4, 6]
        pods = {pod["metadata"]["name"]: pod["status"]["podIPs"] for pod in job.pods()}
        addresses = {name: [entry["ip"] for entry in ips] for name, ips in pods.items()}
        assert len(addresses) == 3
        assert all(families(found) == [4, 6] for found in addresses.values())
        job.in_learner("eu/0", CONNECT.format(addresses=made, ports=[7070]))
        for found in addresses.values():
            job.in_learner("eu/0", CONNECT.format(addresses=found, ports=[8080, 9090]))
        assert job.condition("SyncerReachable")["reason"] == "Answers", "the operator asks it"
        job.until_condition("Complete", PATIENCE_SECONDS)
        audit = until(job.audit, 60, expected="an audit", details=job.details)
        assert audit.ok
