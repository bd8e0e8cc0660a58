"""
The status on a real API server: what an apply removes and what it does not, and fields that others have written.

Needs etcd and kube-apiserver (or hyperkube); nothing runs but those two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from diloco_job.crd import crd
from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.decide.decisions import decide
from diloco_operator.workqueue import Key
from diloco_testing.kubernetes.api_server import ApiServer, running
from diloco_testing.kubernetes.reconciled_cluster import SCOPE, ReconciledCluster, job

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
POLICY = {"activeDeadlineSeconds": 3600}
FOREIGN = {
    "type": "Billed", "status": "True", "reason": "Paid", "message": "",
    "lastTransitionTime": "2026-03-01T12:00:00Z",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(programs, tmp_path_factory) -> Iterator[ApiServer]:
    with running(programs, tmp_path_factory.mktemp("api")) as api:
        api.install(crd())
        yield api


class Operated:
    """A job, and operators that reconcile it one after the other."""

    def __init__(self, api: ApiServer, namespace: str, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.key = Key(namespace, "a")
        self.job_path = f"/apis/diloco.dev/v1alpha1/namespaces/{namespace}/dilocojobs/a"
        self.now = datetime.now(UTC).replace(microsecond=0)
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        self.done("POST", "/api/v1/namespaces", made)
        body = job(runPolicy=POLICY)
        body["metadata"]["namespace"] = namespace
        self.done("POST", self.job_path.removesuffix("/a"), body)

    def done(self, method: str, path: str, body: Json | None = None, **options: str) -> Json:
        code, answer = self.api.send(method, path, body, **options)
        assert code < 300, answer
        return answer

    def job(self) -> Json:
        return self.done("GET", self.job_path)

    def set_policy(self, **policy: bool) -> None:
        body = {"spec": {"runPolicy": {"suspend": False} | policy}}
        self.done("PATCH", self.job_path, body, kind=MERGE)

    def patch_status(self, status: Json, manager: str) -> None:
        """As a person, or another controller, updates the status."""
        self.done(
            "PATCH", f"{self.job_path}/status", {"status": status}, kind=MERGE, fieldManager=manager
        )

    @contextmanager
    def operator(self, region: str = "") -> Iterator[Callable[[], Json]]:
        """Reconciles the job, and returns its status."""
        scope = replace(SCOPE, region=region)
        world = ReconciledCluster(self.api, self.folder, scope=scope)
        world.decide = lambda observation: decide(observation, scope, world.now)

        def reconcile() -> Json:
            world.now = self.now
            world.reconciler.reconcile(self.key)
            status: Json = self.job()["status"]
            return status

        try:
            yield reconcile
        finally:
            world.reconciler.close()

    def run_as(self, region: str, seconds: int) -> Json:
        self.now += timedelta(seconds=seconds)
        with self.operator(region) as reconcile:
            reconcile()
            return reconcile()


@pytest.fixture
def operated(server, tmp_path, request) -> Operated:
    """In a namespace of its own, because nothing collects the children of a job."""
    return Operated(server, request.node.name.replace("_", "-")[:40].strip("-"), tmp_path)


def owners(stored: Json, field: str) -> set[str]:
    """Field managers that own this field of the status."""
    return {
        entry["manager"]
        for entry in stored["metadata"]["managedFields"]
        if f"f:{field}" in entry["fieldsV1"].get("f:status", {})
    }


def condition(status: Json, kind: str) -> tuple[str, str, str]:
    [found] = [entry for entry in status["conditions"] if entry["type"] == kind]
    return found["status"], found["reason"], found["message"]


def test_a_field_that_an_apply_lacks_is_removed_and_has_no_owner(operated):
    assert operated.run_as("", 0)["startTime"]
    assert owners(operated.job(), "startTime") == {"diloco-operator-status"}
    operated.set_policy(suspend=True)
    assert "startTime" not in operated.run_as("", 60)
    assert owners(operated.job(), "startTime") == set()


def test_a_region_name_that_was_set_back_leaves_no_times_behind_that_end_a_resumed_job(operated):
    started = operated.run_as("eu", 0)["startTime"]
    assert operated.run_as("eu2", 60)["startTime"] == started
    operated.run_as("eu", 60)
    operated.set_policy(suspend=True)
    assert "startTime" not in operated.run_as("eu", 60)
    assert owners(operated.job(), "startTime") == set()
    operated.set_policy()
    resumed = operated.run_as("eu", 7200)
    assert resumed["startTime"] > started
    assert condition(resumed, "Failed")[0] == "False"


def test_a_restored_status_leaves_no_times_behind_that_end_a_resumed_job(operated):
    """A backup restores a status by an update, so that its fields have another owner."""
    started = operated.run_as("", 0)
    backup = operated.job()
    backup["status"]["regions"].append({"name": "us", "desired": 1, "ready": 1})
    operated.done("PUT", f"{operated.job_path}/status", backup, fieldManager="velero")
    operated.patch_status({"tokens": 5, "model": {"path": "p"}}, "kubectl-edit")
    assert operated.run_as("", 60)["startTime"] == started["startTime"]
    operated.set_policy(suspend=True)
    status = operated.run_as("", 60)
    assert "startTime" not in status
    assert [region["name"] for region in status["regions"]] == ["eu"]
    operated.set_policy()
    resumed = operated.run_as("", 7200)
    assert resumed["startTime"] > started["startTime"]
    assert condition(resumed, "Failed")[0] == "False"


def test_what_others_wrote_into_a_status_is_written_about_once(operated):
    """Each reconcile would write it again if the apply did not replace it, or something else remained."""
    operated.set_policy(suspend=True)
    before = operated.run_as("", 0)
    changed = {"startTime": "2026-03-01T12:00:00Z", "step": 3, "syncer": {"volumeUid": "x"}}
    operated.patch_status(
        {**changed, "conditions": [*before["conditions"], FOREIGN]}, "kubectl-edit"
    )
    after = operated.run_as("", 60)
    assert "startTime" not in after
    assert after["conditions"][-1] == FOREIGN, "another controller's condition is its own"
    version = operated.job()["metadata"]["resourceVersion"]
    with operated.operator() as reconcile:
        assert reconcile() == after
        operated.now += timedelta(seconds=300)
        assert reconcile() == after
    assert operated.job()["metadata"]["resourceVersion"] == version


def test_which_installation_runs_a_job_stays_as_a_person_sets_it(operated):
    operated.run_as("", 0)
    operated.patch_status({"operator": "system/diloco"}, "kubectl-patch")
    operated.set_policy(suspend=True)
    assert operated.run_as("", 60)["operator"] == "system/diloco"
    operated.patch_status({"operator": None}, "kubectl-patch")
    assert "operator" not in operated.run_as("", 60)


def test_a_contested_child_is_named_until_its_other_writer_stops(operated):
    service = f"/api/v1/namespaces/{operated.key.namespace}/services/a-syncer"
    operated.run_as("", 0)
    with operated.operator() as reconcile:
        for _ in range(12):
            body = {"spec": {"selector": {"diloco.dev/job": "another"}}}
            operated.done("PATCH", service, body, kind=MERGE, fieldManager="intruder")
            operated.now += timedelta(seconds=5)
            status = reconcile()
        contested = condition(status, "Accepted")
        assert contested[:2] == ("True", "Contested")
        assert "Service a-syncer (field manager intruder)" in contested[2]
        operated.now += timedelta(seconds=700)
        reconcile()
        operated.now += timedelta(seconds=700)
        assert condition(reconcile(), "Accepted")[1] == "Valid"
    assert operated.done("GET", service)["spec"]["selector"]["diloco.dev/job"] == "a"


def test_the_list_of_all_jobs_has_only_their_metadata(operated):
    with operated.operator() as reconcile:
        reconcile()
    client = Cluster(
        connect(kubeconfig=operated.api.kubeconfig(operated.folder / "k")), manager="m"
    )
    [listed] = client.jobs((operated.key.namespace,))
    assert listed.keys() == {"apiVersion", "kind", "metadata"}
    assert listed["metadata"]["uid"] == operated.job()["metadata"]["uid"]
    assert (listed["apiVersion"], listed["kind"]) == ("diloco.dev/v1alpha1", "DiLoCoJob")
