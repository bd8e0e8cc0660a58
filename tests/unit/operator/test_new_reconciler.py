"""A reconciler that starts finds out again what the API server refuses, and writes nothing about what is known."""

from datetime import timedelta

import pytest

from diloco_operator.cluster import client as cluster_module
from diloco_operator.decide.decisions import decide
from diloco_operator.workqueue import RetryError
from diloco_testing.kubernetes.fake_api import FakeApi, Fault
from diloco_testing.kubernetes.reconciled_cluster import SCOPE, ReconciledCluster, job, reasons

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {
        "namespace": "ns",
        "name": "a-eu",
        "ownerReferences": [{"uid": "x", "kind": "Other", "name": "o", "controller": True}],
    },
}


def refused(api):
    denied = 'admission webhook "policy" denied the request'
    api.faults.append(Fault("PATCH", "/statefulsets/", status=403, message=denied, times=99))


def unanswered(api):
    api.faults.append(Fault("PATCH", "/statefulsets/", hang_seconds=60.0, times=99))


def taken(api):
    api.create(SERVICE)


def unreadable(api):
    """Here the operator has written nothing but the status."""
    api.faults.append(Fault("GET", "/pods", status=403, message="pods is forbidden", times=99))


def reconciled(world):
    try:
        world.run()
    except RetryError:
        assert world.api.faults, "only because of the fault"


def written(api):
    """Writes that the API server accepted."""
    return [request for request in api.writes() if 200 <= request.status < 300]


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (refused, "Refused"),
        (unanswered, "Refused"),
        (taken, "NameTaken"),
        (unreadable, "Refused"),
    ],
)
def test_a_new_reconciler_writes_nothing_about_a_trouble_that_is_known(
    tmp_path, monkeypatch, trouble, reason
):
    monkeypatch.setattr(cluster_module, "READ_SECONDS", 0.3)
    with FakeApi() as api:
        api.create(job())
        trouble(api)
        former = ReconciledCluster(api, tmp_path)
        former.decide = lambda observation: decide(observation, SCOPE, former.now)
        for _ in range(3):
            reconciled(former)
            former.now += timedelta(seconds=400)
        assert reasons(api)["Accepted"][:2] == ("False", reason)
        former.reconciler.close()
        before = written(api)
        assert before
        new = ReconciledCluster(api, tmp_path)
        new.now = former.now + timedelta(seconds=7200)
        new.decide = lambda observation: decide(observation, SCOPE, new.now)
        reconciled(new)
        new.reconciler.close()
        assert written(api) == before
