"""A CRD that is older than the operator: the fields that the API server drops are named, and jobs are served."""

import pytest

from diloco_job.crd import schema
from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.state.served_schema import missing_fields
from diloco_operator.watch.crd_check import AGAIN_SECONDS, PUBLISHED_SECONDS, CrdCheck
from diloco_operator.watch.health import Health
from diloco_operator.workqueue import WorkQueue
from diloco_testing.kubernetes.fake_api import Fault


def document(change=lambda spec: None):
    """OpenAPI v3 as an API server publishes it, of a CRD that was changed so."""
    whole = schema()
    # The server describes metadata itself, and extends what it was given.
    whole["properties"]["metadata"] = {"$ref": "#/components/schemas/ObjectMeta"}
    change(whole["properties"]["spec"]["properties"])
    schemas = {"dev.diloco.v1alpha1.DiLoCoJobList": {}, "dev.diloco.v1alpha1.DiLoCoJob": whole}
    return {"components": {"schemas": schemas}}


def older(spec):
    """Before regions had clusters, and learners storage."""
    del spec["regions"]["items"]["properties"]["cluster"]
    del spec["learner"]["properties"]["storage"]


NAMES = ("spec.learner.storage", "spec.regions.cluster")


def test_the_fields_that_an_older_crd_lacks_are_named_without_those_below_them():
    assert sorted(missing_fields(document(older))) == sorted(NAMES)


def test_neither_the_crd_of_this_version_nor_a_newer_one_lacks_a_field():
    assert missing_fields(document()) == ()
    assert missing_fields(document(lambda spec: spec.update(new={"type": "string"}))) == ()


def test_a_crd_that_keeps_unknown_fields_lacks_none():
    def change(spec):
        spec["learner"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

    assert missing_fields(document(change)) == ()


@pytest.mark.parametrize("other", [{}, {"components": None}, {"components": {"schemas": {}}}])
def test_a_document_without_the_kind_shows_nothing(other):
    assert missing_fields(other) is None


@pytest.fixture
def health():
    return Health(WorkQueue(lambda key: None, threads=0))


class TimedCheck(CrdCheck):
    """The time is that of the test."""

    def __init__(self, cluster, health):
        self.now = 0.0
        super().__init__(cluster, health, clock=lambda: self.now)

    def after(self, seconds):
        self.now += seconds
        self.once()


@pytest.fixture
def check(api, tmp_path, health):
    configuration = connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
    return TimedCheck(Cluster(configuration, manager="diloco-operator"), health)


def test_missing_fields_are_logged_once_and_named_with_what_to_do_until_the_crd_is_upgraded(
    api, check, health, caplog
):
    api.openapi = document(older)
    check.once()
    for seconds in (0.1, PUBLISHED_SECONDS - 0.2):
        check.after(seconds)
        assert not health.remarks(), "the server may only be late to publish an upgrade"
    check.after(0.1)
    for _ in range(3):
        check.after(30)
    (remark,) = health.remarks()
    assert "the CRD dilocojobs.diloco.dev is older than this operator" in remark
    assert all(name in remark for name in NAMES)
    assert "diloco crd | kubectl apply" in remark
    assert [record.getMessage() for record in caplog.records] == [remark]
    api.openapi = document()
    check.after(30)
    assert health.remarks() == ()
    before = len(api.requests)
    check.after(AGAIN_SECONDS - 1)
    assert len(api.requests) == before, "nothing is missing: it is not read again soon"


def test_a_crd_that_is_replaced_by_an_older_one_later_is_noticed(api, check, health):
    api.openapi = document()
    check.once()
    api.openapi = document(older)
    check.after(AGAIN_SECONDS)
    assert not health.remarks()
    check.after(30)
    assert len(health.remarks()) == 1


def test_a_server_that_publishes_nothing_is_asked_again_soon_and_one_that_forbids_it_later(
    api, check, health
):
    check.once()
    api.faults.append(Fault("GET", "openapi", 403, "forbidden"))
    check.once()
    api.openapi = document(older)
    before = len(api.requests)
    check.after(AGAIN_SECONDS - 1)
    assert (len(api.requests), health.remarks()) == (before, ())
    check.after(1)
    check.after(30)
    assert len(health.remarks()) == 1, "the permission may only have been late"
