"""
Two replicas of the operator, and two installations of it: one process writes, the others do not.

The leader is frozen and not killed: when it runs again, it still believes that it leads.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from kubernetes.client import Configuration

from diloco_job.crd import crd
from diloco_operator.cluster.client import ApiError, Cluster, connect
from diloco_operator.leader.candidate import Candidate
from diloco_operator.state.served_schema import missing_fields
from diloco_testing.clusters.faults import signal_first_process
from diloco_testing.clusters.install import NAMESPACE, RELEASE, install
from diloco_testing.clusters.job import Job, manifest
from diloco_testing.clusters.kubectl import until
from diloco_testing.kubernetes.api_server import ApiServer, Refusal, running

SOON = 120.0
OTHER = "diloco-other"


# On an API server without nodes: what it answers to the requests of an election and of a claim


@pytest.fixture(scope="module")
def api(programs, tmp_path_factory) -> Iterator[ApiServer]:
    with running(programs, tmp_path_factory.mktemp("api")) as server:
        server.install(crd())
        yield server


@pytest.fixture
def account(api, tmp_path) -> Configuration:
    """Credentials with the chart's rights on the Lease `diloco` in the namespace `default`."""
    rbac, core = (
        "/apis/rbac.authorization.k8s.io/v1/namespaces/default",
        "/api/v1/namespaces/default",
    )
    role = {
        "metadata": {"name": "election"},
        "rules": [
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["diloco"],
             "verbs": ["get", "create", "update"]},
        ],
    }  # fmt: skip
    binding = {
        "metadata": {"name": "election"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "election"},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": "default"}],
    }
    api.send("POST", f"{core}/serviceaccounts", {"metadata": {"name": "operator"}})
    api.send("POST", f"{rbac}/roles", role)
    api.send("POST", f"{rbac}/rolebindings", binding)
    code, answer = api.send("POST", f"{core}/serviceaccounts/operator/token", {"spec": {}})
    assert code == 201, answer
    path = api.kubeconfig(tmp_path / "kubeconfig", answer["status"]["token"])
    return connect(kubeconfig=path)


def candidate(configuration: Configuration, name: str, *, lease: str = "diloco") -> Candidate:
    requests = Cluster(configuration, manager="test", only_try_seconds=5.0)
    made = Candidate(requests, namespace="default", name=lease, identity=name)
    made.start(lead=lambda again: None, stand_by=lambda: None)
    return made


def test_an_api_server_lets_one_of_two_candidates_lead_with_the_rights_of_the_chart(api, account):
    path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/diloco"
    both = [candidate(account, name) for name in ("a", "b")]
    try:
        until(lambda: any(replica.may_write() for replica in both), SOON, expected="one leads")
        assert sum(replica.may_write() for replica in both) == 1
        code, lease = api.send("GET", path)
        assert (code, lease["spec"]["leaseDurationSeconds"]) == (200, 15)
        renewed = lease["spec"]["renewTime"]
        until(
            lambda: api.send("GET", path)[1]["spec"]["renewTime"] != renewed,
            SOON, expected="a renewal",
        )  # fmt: skip
        leader, other = sorted(both, key=lambda replica: not replica.may_write())
        leader.stop(release=True)
        until(other.may_write, SOON, expected="the other leads")
        assert api.send("GET", path)[1]["spec"]["leaseTransitions"] == 1
    finally:
        for replica in both:
            replica.stop(release=False)


def test_no_other_lease_can_be_made_with_these_rights(api, account):
    requests = Cluster(account, manager="test", only_try_seconds=5.0)
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"namespace": "default", "name": "other"},
        "spec": {},
    }
    with pytest.raises(ApiError) as refused:
        requests.put(body)
    assert refused.value.status == 403


def test_the_operator_may_read_which_fields_the_crd_has_without_a_right_of_the_chart(account):
    operator = Cluster(account, manager="test")
    until(
        lambda: missing_fields(operator.published_schema()) == (), SOON,
        expected="the server publishes the CRD, which lacks no field",
    )  # fmt: skip


def test_of_two_installations_that_read_the_same_job_the_second_gets_a_conflict(api, tmp_path):
    cluster = Cluster(
        connect(kubeconfig=api.kubeconfig(tmp_path / "admin")), manager="diloco-operator"
    )
    body = manifest("claimed", steps=9, regions={"eu": 1}, pod_fields={})
    made = api.create(body | {"metadata": {"name": "claimed", "namespace": "default"}})
    assert not isinstance(made, Refusal), made
    cluster.claim(made, "system/one")
    with pytest.raises(ApiError) as refused:
        cluster.claim(made, "other/two")
    assert refused.value.status == 409
    read = cluster.job("default", "claimed")
    assert read is not None
    cluster.put_status(read, {"state": "Starting"})
    stored = cluster.job("default", "claimed")
    assert stored is not None
    assert (stored["status"]["operator"], stored["status"]["state"]) == ("system/one", "Starting")
    api.delete("claimed")


# On a cluster


def holder(kubectl) -> str:
    return str(
        (kubectl.get("lease", RELEASE, NAMESPACE) or {}).get("spec", {}).get("holderIdentity", "")
    )


def replicas(kubectl):
    return {
        pod["metadata"]["name"]: pod
        for pod in kubectl.list("pods", NAMESPACE, "app.kubernetes.io/component=operator")
    }


def waiting_job(eu, namespace, fleet, name: str) -> Job:
    """Its learners find no node: the test is about its objects."""
    fields = {**fleet.images.pod_fields, "nodeSelector": {"there-is": "none"}}
    body = manifest(name, steps=10**6, regions={"eu": 1}, pod_fields=fields)
    return Job(eu, namespace, body).apply()


def scale(job: Job, learners: int) -> None:
    """Change the size of the job; returns once the operator has done its part."""
    job.change(regions=[{"name": "eu", "learners": learners}])
    until(
        lambda: _size(job) == learners,
        SOON, expected=f"{learners} learners", details=job.details,
    )  # fmt: skip


def _size(job: Job) -> int:
    found = job.cluster.kubectl.get("statefulset", f"{job.name}-eu", job.namespace) or {}
    return int(found.get("spec", {}).get("replicas", 0))


def writers(job: Job, since: datetime) -> set[str]:
    """Pods of the operator that wrote about the job's namespace."""
    user = f"system:serviceaccount:{NAMESPACE}:"
    found = job.cluster.audit.requests(user=user, namespace=job.namespace, since=since)
    return {request.pod for request in found if request.writes}


@pytest.fixture
def two_replicas(eu, fleet):
    install(eu, fleet.images, replicas=2)
    yield
    install(eu, fleet.images)


@pytest.fixture
def second_installation(eu, fleet):
    """Another release that sees the same jobs."""
    install(
        eu, fleet.images, release=OTHER, namespace=OTHER,
        crds={"install": False}, rbac={"aggregate": False},
    )  # fmt: skip
    yield f"{OTHER}/{OTHER}"
    eu.helm("uninstall", OTHER, "--namespace", OTHER, "--wait", "--timeout", "2m")


def test_when_the_leader_freezes_the_other_replica_takes_over_and_only_one_ever_writes(
    eu, fleet, namespace, two_replicas
):
    if not eu.local:
        pytest.skip("the operator's process is not ours to freeze")
    job = waiting_job(eu, namespace, fleet, "handed")
    until(lambda: _size(job) == 1, SOON, expected="its StatefulSet", details=job.details)
    pods = replicas(eu.kubectl)
    frozen = holder(eu.kubectl)
    assert frozen in pods
    assert len(pods) == 2
    (successor,) = pods.keys() - {frozen}
    signal_first_process(pods[frozen], signal.SIGSTOP, program="diloco_operator")
    try:
        since = datetime.now(UTC)
        scale(job, 2)
        assert holder(eu.kubectl) == successor
    finally:
        signal_first_process(pods[frozen], signal.SIGCONT, program="diloco_operator")

    def stands_by() -> bool:
        return "standing by" in eu.kubectl("logs", frozen, "-n", NAMESPACE)

    until(stands_by, SOON, expected="the former leader notices", details=job.details)
    scale(job, 3)
    assert writers(job, since) == {successor}
    # In order, as an upgrade does it: at once.
    eu.kubectl.delete("pod", successor, NAMESPACE)
    scale(job, 4)
    assert holder(eu.kubectl) != successor


def test_a_second_installation_leaves_the_jobs_of_the_first_alone_and_names_it(
    eu, fleet, namespace, second_installation
):
    job = waiting_job(eu, namespace, fleet, "shared")
    # Whichever saw it first runs it, and the other one reports that.
    until(
        lambda: any(reason == "OtherOperator" for reason, _ in job.events()),
        SOON, expected="the Event of the other installation", details=job.details,
    )  # fmt: skip
    owner = job.status()["operator"]
    (message,) = {text for reason, text in job.events() if reason == "OtherOperator"}
    both = {f"{NAMESPACE}/{RELEASE}", second_installation}
    assert owner in both
    assert all(name in message for name in both)
    until(lambda: _size(job) == 1, SOON, expected="its StatefulSet", details=job.details)
    if eu.local:
        (other,) = both - {owner}
        user = f"system:serviceaccount:{other.partition('/')[0]}:"
        found = eu.audit.requests(user=user, namespace=namespace)
        wrote = {(r.resource, r.verb, r.code) for r in found if r.writes and r.code < 400}
        assert wrote == {("events", "create", 201)}
