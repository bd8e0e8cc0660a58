"""
A job in a cluster in which nothing has an IPv4 address: nodes, pods, Services, API server.
"""

from __future__ import annotations

import ipaddress

import pytest

from diloco_testing.clusters.install import install
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import until

PATIENCE_SECONDS = 240.0


@pytest.fixture
def cluster(fleet):
    """Such a cluster, with the operator."""
    if fleet.local is None:
        pytest.skip("given clusters have the addresses that they have")
    made = fleet.cluster("six", kind="up-ipv6")
    install(made, fleet.images)
    yield made
    fleet.end("six")


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
