"""What one reconcile reads and writes, with decisions that the test makes; the API server is in memory, over HTTP."""

import base64
import logging
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from diloco import transport
from diloco.tls import Tls
from diloco.v1 import syncer_pb2, syncer_pb2_grpc
from diloco_operator import cluster as cluster_module
from diloco_operator import logs
from diloco_operator.authority import issue, new_authority
from diloco_operator.cluster import Cluster, connect
from diloco_operator.decide import Decisions, EventOf, ObjectRef, decide
from diloco_operator.metrics import Metrics
from diloco_operator.observed import Answer, Silence
from diloco_operator.reconcile import Reconciler
from diloco_operator.settings import Faults
from diloco_operator.view import View
from diloco_operator.workqueue import Key, RetryError
from diloco_testing.fake_api import FakeApi, Fault

KEY = Key("ns", "a")
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
VIEW = View(worker_image="worker", syncer_image="syncer")


def job(**spec):
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"namespace": "ns", "name": "a"},
        "spec": {
            "steps": 5,
            "learner": {"recipe": {"name": "gpt"}},
            "regions": [{"name": "eu", "learners": 2}],
            **spec,
        },
    }


class World:
    """A reconciler whose decisions are `self.decide`."""

    def __init__(self, api, tmp_path, view=VIEW, faults=None):
        configuration = connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
        self.api = api
        self.now = NOW
        self.observed = []
        self.decide = lambda observed: Decisions()
        self.metrics = Metrics()
        self.reconciler = Reconciler(
            Cluster(configuration, manager="diloco-operator"),
            view,
            metrics=self.metrics,
            decide=self._decide,
            reporter="pod-1",
            faults=faults or Faults(),
            now=lambda: self.now,
        )

    def _decide(self, observed, view, now):
        assert now == self.now
        self.observed.append(observed)
        return self.decide(observed)

    def run(self):
        self.observed.clear()
        return self.reconciler.reconcile(KEY)

    def child(self, name="a-spec", applied="1", **data):
        uid = self.api.get("dilocojobs", "a")["metadata"]["uid"]
        owner = {"apiVersion": "diloco.dev/v1alpha1", "kind": "DiLoCoJob", "name": "a"}
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "namespace": "ns",
                "name": name,
                "labels": {"diloco.dev/job": "a"},
                "annotations": {"diloco.dev/applied": applied},
                "ownerReferences": [{**owner, "uid": uid, "controller": True}],
            },
            "data": data or {"x": "1"},
        }

    def count(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(cluster_module, "RETRY_PAUSES", (0.01,))
    with FakeApi() as made:
        yield made


@pytest.fixture
def world(api, tmp_path):
    api.create(job())
    made = World(api, tmp_path)
    yield made
    made.reconciler.close()


def test_a_job_that_is_gone_is_forgotten(api, tmp_path):
    world = World(api, tmp_path)
    assert world.run() is None
    assert not world.observed


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector(world):
    world.api.edit(
        "dilocojobs",
        "a",
        lambda one: one["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"),
    )
    assert world.run() is None
    assert not world.observed
    assert not world.api.writes()


def test_everything_is_read_fresh_and_nothing_is_written_without_a_decision(world):
    world.api.create(world.child())
    world.api.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": "ns", "name": "a-eu-0", "labels": {"diloco.dev/job": "a"}},
        }
    )
    assert world.run() == 30.0
    (seen,) = world.observed
    assert seen.job["spec"]["steps"] == 5
    assert [child["metadata"]["name"] for child in seen.children] == ["a-spec"]
    assert [pod["metadata"]["name"] for pod in seen.pods] == ["a-eu-0"]
    assert (seen.syncer, seen.certificate, seen.foreign, seen.refusals) == (None, None, (), ())
    assert not world.api.writes()


def test_decisions_are_carried_out_in_order_and_counted(world):
    world.api.create(world.child("old"))
    uid = world.api.get("configmaps", "old")["metadata"]["uid"]
    world.decide = lambda observed: Decisions(
        apply=(world.child("a-1"), world.child("a-2")),
        delete=(ObjectRef(api_version="v1", kind="ConfigMap", name="old", uid=uid),),
        status={"state": "Training", "step": 3},
        events=(EventOf(type="Normal", reason="Valid", message="the job can be run"),),
        again_seconds=7.0,
    )
    assert world.run() == 7.0
    assert [(write.method, write.path.split("?")[0].rpartition("/")[2]) for write in world.api.writes()] == [
        ("PATCH", "a-1"),
        ("PATCH", "a-2"),
        ("DELETE", "old"),
        ("PATCH", "status"),
        ("POST", "events"),
    ]  # fmt: skip
    assert world.api.get("dilocojobs", "a")["status"] == {"state": "Training", "step": 3}
    assert world.count("diloco_operator_writes_total", kind="ConfigMap") == 3
    assert world.count("diloco_operator_writes_total", kind="DiLoCoJob") == 1
    assert world.count("diloco_operator_writes_total", kind="Event") == 1
    assert world.count("diloco_operator_jobs", state="Training") == 1
    assert world.count("diloco_operator_reconcile_seconds_count", result="ok") == 1


def test_an_event_says_what_it_is_about_and_who_says_it(world):
    world.decide = lambda observed: Decisions(
        events=(EventOf(type="Warning", reason="Refused", message="x" * 5000),)
    )
    world.run()
    (event,) = world.api.all("events")
    assert event["metadata"]["name"].startswith("a.")
    assert event["involvedObject"]["uid"] == world.api.get("dilocojobs", "a")["metadata"]["uid"]
    assert (event["reportingComponent"], event["reportingInstance"]) == ("diloco-operator", "pod-1")
    assert event["firstTimestamp"] == "2026-11-21T12:00:00Z"
    assert len(event["message"]) <= 1024
    world.run()
    assert len(world.api.all("events")) == 1


def test_an_apply_that_changed_nothing_is_not_sent_again_until_something_differs(world):
    world.api.create(world.child())
    applied = ["1"]
    world.decide = lambda observed: Decisions(apply=(world.child(applied=applied[0]),))
    world.run()
    world.run()
    assert len(world.api.writes()) == 1

    world.api.edit("configmaps", "a-spec", lambda one: one.update(status={"seen": 1}))
    world.run()
    assert len(world.api.writes()) == 1, "a status is not ours to repair"

    world.api.edit("configmaps", "a-spec", lambda one: one["data"].update(x="drifted"))
    world.run()
    assert len(world.api.writes()) == 2
    assert world.api.get("configmaps", "a-spec")["data"] == {"x": "1"}

    world.run()  # it changed something then: now it does not
    applied[0] = "2"
    world.run()
    assert world.api.get("configmaps", "a-spec")["metadata"]["annotations"] == {
        "diloco.dev/applied": "2"
    }


def foreign_one(world, **metadata):
    body = world.child()
    body["metadata"] = {"namespace": "ns", "name": "a-spec", **metadata}
    body["data"] = {"of": "somebody else"}
    return body


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"labels": {"diloco.dev/job": "b"}},
        {"ownerReferences": [{"uid": "other", "controller": True}]},
        {
            "labels": {"diloco.dev/job": "a"},
            "ownerReferences": [{"uid": "other", "controller": True}],
        },
    ],
    ids=["nobody's", "another job's", "another controller's", "a predecessor's"],
)
def test_a_child_that_another_owner_holds_is_left_alone_and_the_others_are_applied(world, metadata):
    world.api.create(foreign_one(world, **metadata))
    world.decide = lambda observed: Decisions(
        apply=(world.child(), world.child("a-2")),
        status={"state": ",".join(observed.foreign) or "Fine"},
    )
    world.run()
    assert world.api.get("configmaps", "a-spec")["data"] == {"of": "somebody else"}
    assert world.api.get("configmaps", "a-2") is not None
    assert world.api.get("dilocojobs", "a")["status"] == {"state": "ConfigMap a-spec"}


def test_a_child_left_over_without_a_controller_is_adopted(world):
    world.api.create(foreign_one(world, labels={"diloco.dev/job": "a"}))
    world.decide = lambda observed: Decisions(apply=(world.child(),))
    world.run()
    assert world.api.get("configmaps", "a-spec")["data"]["x"] == "1"


@pytest.mark.parametrize("code", [400, 403, 422, 500])
def test_what_the_server_refuses_is_said_in_the_status_and_tried_again_with_back_off(world, code):
    """500 as well: a real API server says so where a field has the wrong type."""
    world.api.faults.append(Fault("PATCH", "configmaps/a-1", code, "data: Forbidden", times=9))
    world.decide = lambda observed: Decisions(
        apply=(world.child("a-1"), world.child("a-2")),
        status={"state": ";".join(f"{one.child}={one.message}" for one in observed.refusals)},
    )
    with pytest.raises(RetryError, match="data: Forbidden"):
        world.run()
    assert world.api.get("configmaps", "a-2") is not None
    assert world.api.get("dilocojobs", "a")["status"] == {"state": "ConfigMap a-1=data: Forbidden"}
    assert world.count("diloco_operator_reconcile_seconds_count", result="refused") == 1


def test_a_delete_that_is_refused_is_said_and_holds_up_nothing(world):
    world.api.create(world.child("old"))
    world.api.create(world.child("older"))
    refs = tuple(
        ObjectRef(
            api_version="v1",
            kind="ConfigMap",
            name=name,
            uid=world.api.get("configmaps", name)["metadata"]["uid"],
        )
        for name in ("old", "older")
    )
    world.api.faults.append(Fault("DELETE", "configmaps/old$", 403, "a policy says no", times=9))
    world.decide = lambda observed: Decisions(
        delete=refs,
        status={"state": ";".join(f"{one.child}={one.message}" for one in observed.refusals)},
    )
    with pytest.raises(RetryError, match="a policy says no"):
        world.run()
    assert world.api.get("configmaps", "older") is None
    assert world.api.get("dilocojobs", "a")["status"] == {"state": "ConfigMap old=a policy says no"}


def test_a_finished_job_is_removed_though_the_server_refuses_a_child(world):
    world.api.faults.append(Fault("PATCH", "configmaps/", 403, "no", times=9))
    world.decide = lambda observed: Decisions(apply=(world.child(),), remove_job=True)
    with pytest.raises(RetryError, match="no"):
        world.run()
    assert world.api.get("dilocojobs", "a") is None


def reasons(api):
    said = api.get("dilocojobs", "a")["status"]["conditions"]
    return {one["type"]: (one["status"], one["reason"], one["message"]) for one in said}


def test_without_a_right_to_certificates_the_job_says_so_and_gets_its_other_children(api, tmp_path):
    """rbac.certManager of the chart is false: reading one is refused like making one."""
    api.create(job(tls={"mode": "CertManager", "issuerRef": {"name": "ca"}}))
    api.faults.append(Fault("*", "certificates", 403, "certificates is forbidden", times=99))
    world = World(api, tmp_path)
    world.decide = lambda observed: decide(observed, VIEW, NOW)
    with pytest.raises(RetryError, match="certificates is forbidden"):
        world.run()
    world.reconciler.close()
    assert api.get("statefulsets", "a-eu")
    assert api.get("deployments", "a-syncer")
    status, reason, message = reasons(api)["Accepted"]
    assert (status, reason) == ("False", "Refused")
    assert "Certificate a-tls: certificates is forbidden" in message


def test_nothing_more_is_tried_in_a_namespace_that_is_being_deleted(world):
    world.api.faults.append(
        Fault("PATCH", "configmaps/", 403, "is being terminated", "NamespaceTerminating", times=9)
    )
    world.decide = lambda observed: Decisions(
        apply=(world.child("a-1"), world.child("a-2")),
        status={"state": "Refused"},
        events=(EventOf(type="Warning", reason="Refused", message="said"),),
    )
    with pytest.raises(RetryError, match="is being terminated"):
        world.run()
    assert [one.path.partition("?")[0] for one in world.api.writes()] == [
        "/api/v1/namespaces/ns/configmaps/a-1"
    ]


def test_a_server_that_is_away_ends_the_reconcile_without_a_word_in_the_status(world):
    world.api.faults.append(Fault("GET", "pods", 503, times=9))
    with pytest.raises(RetryError, match="pods"):
        world.run()
    assert not world.observed
    assert not world.api.writes()
    assert world.count("diloco_operator_reconcile_seconds_count", result="error") == 1


def test_a_finished_job_is_removed_unless_it_changed_meanwhile(world):
    def change_it(observed):
        world.api.edit("dilocojobs", "a", lambda one: one["spec"].update(steps=9))
        return Decisions(remove_job=True)

    world.decide = change_it
    world.run()
    assert world.api.get("dilocojobs", "a") is not None
    world.decide = lambda observed: Decisions(remove_job=True)
    world.run()
    assert world.api.get("dilocojobs", "a") is None
    assert world.run() is None


def test_every_line_of_a_reconcile_carries_the_jobs_key(world, capfd):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure(json=True)
        world.decide = lambda observed: Decisions(apply=(world.child(),))
        world.run()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = capfd.readouterr().err.splitlines()
    assert lines
    assert all('"job": "ns/a"' in line for line in lines)


@pytest.mark.parametrize(
    ("point", "done"),
    [
        ("after-read", []),
        ("after-apply-1", ["a-1"]),
        ("after-apply-2", ["a-1", "a-2"]),
        ("before-status", ["a-1", "a-2"]),
        ("after-status", ["a-1", "a-2", "status"]),
    ],
)
def test_faults_come_where_they_are_named(api, tmp_path, point, done):
    api.create(job())

    class StopError(Exception):
        pass

    class Harm(Faults):
        def reached(self, at):
            if at == point:
                raise StopError

    world = World(api, tmp_path, faults=Harm())
    world.decide = lambda observed: Decisions(
        apply=(world.child("a-1"), world.child("a-2")), status={"step": 1}
    )
    with pytest.raises(StopError):
        world.run()
    assert [write.path.split("?")[0].rpartition("/")[2] for write in api.writes()] == done


# The syncer


class FakeSyncer(syncer_pb2_grpc.SyncerServicer):
    def GetStatus(self, request, context):  # noqa: N802
        return syncer_pb2.StatusReply(job="a", step=7, steps=9)


@contextmanager
def syncing(tls=None):
    server = transport.server(max_workers=2)
    syncer_pb2_grpc.add_SyncerServicer_to_server(FakeSyncer(), server)
    port = transport.bind(server, "127.0.0.1:0", tls)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(10)


def remote(api, tmp_path, endpoint, **spec):
    """The job of region us, whose syncer lives in eu."""
    regions = [{"name": "eu", "learners": 2}, {"name": "us", "learners": 1}]
    api.create(job(regions=regions, syncer={"region": "eu", "endpoint": endpoint}, **spec))
    return World(api, tmp_path, view=View(region="us", worker_image="w", syncer_image="s"))


def test_a_remote_syncer_is_asked_at_the_endpoint_of_the_manifest(api, tmp_path):
    with syncing() as endpoint:
        world = remote(api, tmp_path, endpoint, tls={"mode": "Secret", "secretName": "none"})
        world.run()
    (seen,) = world.observed
    assert isinstance(seen.syncer, Silence)
    assert (seen.syncer.reason, seen.certificate.reason) == ("CertificateMissing",) * 2
    assert "none" in seen.certificate.problem
    world.reconciler.close()


def test_a_secret_that_may_not_be_read_is_a_condition(api, tmp_path):
    """rbac.tlsSecrets of the chart is false."""
    tls = {"mode": "Secret", "secretName": "s"}
    world = remote(api, tmp_path, "127.0.0.1:1", tls=tls)
    api.faults.append(Fault("GET", "secrets/s", 403, "secrets is forbidden", times=9))
    view = View(region="us", worker_image="w", syncer_image="s")
    world.decide = lambda observed: decide(observed, view, NOW)
    world.run()
    world.reconciler.close()
    for condition in ("SyncerReachable", "LearnersReady"):
        status, reason, message = reasons(api)[condition]
        assert (status, reason) == ("False", "CertificateUnreadable")
        assert "may not read Secret s (rbac.tlsSecrets" in message
    assert api.get("statefulsets", "a-us")


def test_the_certificate_comes_from_the_secret_and_the_answer_from_the_syncer(api, tmp_path):
    authority = new_authority("a", datetime.now(UTC))
    ours = issued(authority, ["us"])
    theirs = issued(authority, ["eu"], ["a-syncer"])
    with syncing(theirs) as endpoint:
        world = remote(api, tmp_path, endpoint, tls={"mode": "Secret", "secretName": "s"})
        put_secret(api, ours)
        world.now = datetime.now(UTC) + timedelta(seconds=1)
        world.run()
        (seen,) = world.observed
        assert seen.certificate.problem == ""
        assert seen.certificate.regions == ("us",)
        assert isinstance(seen.syncer, Answer), seen.syncer
        assert (seen.syncer.step, seen.syncer.at, seen.last_answer) == (7, world.now, world.now)
    world.run()
    (seen,) = world.observed
    assert isinstance(seen.syncer, Silence)
    assert seen.last_answer == world.now
    world.reconciler.close()


def issued(authority, regions, server_names=()):
    one = issue(
        authority, job="a", regions=regions, server_names=server_names, now=datetime.now(UTC)
    )
    return Tls(certificate=one.certificate, key=one.key, authority=authority.bundle)


def put_secret(api, tls):
    data = {"tls.crt": tls.certificate, "tls.key": tls.key, "ca.crt": tls.authority}
    api.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"namespace": "ns", "name": "s"},
            "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
        }
    )


def test_the_own_syncer_is_asked_only_while_its_pod_is_ready(world, monkeypatch):
    asked = []

    def ask(key, address):
        asked.append(address.endpoint)
        return syncer_pb2.StatusReply(step=7)

    monkeypatch.setattr(world.reconciler._reader._syncers, "ask", ask)
    body = world.child("a-syncer") | {"apiVersion": "apps/v1", "kind": "Deployment"}
    world.api.create(body)
    world.run()
    assert world.observed[0].syncer is None
    assert not asked
    world.api.edit("deployments", "a-syncer", lambda one: one.update(status={"readyReplicas": 1}))
    world.run()
    assert asked == ["a-syncer.ns.svc:7070"]
    assert world.observed[0].syncer.step == 7


def test_a_manifest_that_cannot_be_read_reaches_the_decision_and_nobody_is_asked(world):
    world.api.edit("dilocojobs", "a", lambda one: one["spec"].update(steps=-1))
    assert world.run() == 30.0
    assert world.observed[0].syncer is None
    assert [one.method for one in world.api.requests] == ["GET"], "the job, and nothing else"


def test_of_a_job_that_another_controller_manages_nothing_more_is_read(api, tmp_path):
    policy = {"managedBy": "kueue.x-k8s.io/multikueue"}
    tls = {"mode": "Secret", "secretName": "s"}
    world = remote(api, tmp_path, "127.0.0.1:1", tls=tls, runPolicy=policy)
    world.run()
    assert world.observed[0].syncer is None, "nobody was dialled"
    assert [one.method for one in api.requests] == ["GET"]
