"""The syncer of a job during a reconcile: how it is contacted, with which certificate, and what is reported to it."""

import base64
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from diloco.rpc import servers
from diloco.rpc.tls import Tls
from diloco.v1 import syncer_pb2, syncer_pb2_grpc
from diloco_cli.authority import issue, new_authority
from diloco_operator.decide.decisions import Decisions, decide
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.state.observation import Answer, Failure, RegionFailure, Unreachable
from diloco_testing.kubernetes.fake_api import Fault
from diloco_testing.kubernetes.reconciled_cluster import NOW, ReconciledCluster, job, reasons


class FakeSyncer(syncer_pb2_grpc.SyncerServicer):
    def GetStatus(self, request, context):  # noqa: N802
        return syncer_pb2.StatusReply(job="a", step=7, steps=9)


class FailingSyncer(FakeSyncer):
    def __init__(self):
        self.failures = []

    def Failed(self, request, context):  # noqa: N802
        self.failures.append((request.reason, request.message))
        return syncer_pb2.FailedReply()

    def RegionFailed(self, request, context):  # noqa: N802
        self.failures.append((request.region, request.reason, request.message))
        return syncer_pb2.RegionFailedReply()


@contextmanager
def syncing(tls=None, syncer=None):
    server = servers.server(max_workers=2)
    syncer_pb2_grpc.add_SyncerServicer_to_server(syncer or FakeSyncer(), server)
    port = servers.bind(server, "127.0.0.1:0", tls)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loopback(OperatorScope):
    """Dials a syncer of this machine, whose address no manifest may have."""

    dialled: str

    def syncer_address(self, job, namespace):
        assert job.spec.syncer.endpoint == "syncer.example.com:7070"
        return self.dialled


def remote(api, tmp_path, dialled, **spec):
    """The job of region us, whose syncer runs in eu."""
    regions = [{"name": "eu", "learners": 2}, {"name": "us", "learners": 1}]
    api.create(
        job(regions=regions, syncer={"region": "eu", "endpoint": "syncer.example.com:7070"}, **spec)
    )
    scope = Loopback(region="us", worker_image="w", syncer_image="s", dialled=dialled)
    return ReconciledCluster(api, tmp_path, scope=scope)


def test_a_remote_syncer_is_contacted_at_the_endpoint_of_the_manifest(api, tmp_path):
    with syncing() as endpoint:
        world = remote(api, tmp_path, endpoint, tls={"mode": "Secret", "secretName": "none"})
        world.run()
    (seen,) = world.observation
    assert isinstance(seen.syncer, Unreachable)
    assert (seen.syncer.reason, seen.certificate.reason) == ("CertificateMissing",) * 2
    assert "none" in seen.certificate.problem
    world.reconciler.close()


def test_a_job_that_was_deleted_and_applied_again_at_once_has_no_answer_yet(api, tmp_path):
    """Between two reconciles, so that no reconcile found it missing; the syncer of the former has gone."""
    authority = new_authority("a", datetime.now(UTC))
    with syncing(issued(authority, ["eu"], ["a-syncer"])) as endpoint:
        world = remote(api, tmp_path, endpoint, tls={"mode": "Secret", "secretName": "s"})
        put_secret(api, issued(authority, ["us"]))
        world.now = datetime.now(UTC) + timedelta(seconds=1)
        world.run()
        assert world.observation[0].last_answer == world.now
    former = api.get("dilocojobs", "a")
    api.delete("dilocojobs", "a")
    del former["metadata"]["uid"]
    api.create(former)
    world.run()
    (seen,) = world.observation
    assert isinstance(seen.syncer, Unreachable)
    assert seen.last_answer is None
    world.reconciler.close()


def test_a_secret_that_may_not_be_read_is_a_condition(api, tmp_path):
    """rbac.tlsSecretNamespaces of the chart lacks the namespace."""
    tls = {"mode": "Secret", "secretName": "s"}
    world = remote(api, tmp_path, "127.0.0.1:1", tls=tls)
    api.faults.append(Fault("GET", "secrets/s", 403, "secrets is forbidden", times=9))
    scope = OperatorScope(region="us", worker_image="w", syncer_image="s")
    world.decide = lambda observation: decide(observation, scope, NOW)
    world.run()
    world.reconciler.close()
    for condition in ("SyncerReachable", "LearnersReady"):
        status, reason, message = reasons(api)[condition]
        assert (status, reason) == ("False", "CertificateUnreadable")
        assert "may not read Secret s (rbac.tlsSecretNamespaces" in message
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
        (seen,) = world.observation
        assert seen.certificate.problem == ""
        assert seen.certificate.regions == ("us",)
        assert isinstance(seen.syncer, Answer), seen.syncer
        assert (seen.syncer.step, seen.syncer.at, seen.last_answer) == (7, world.now, world.now)
    answered = world.now
    for silent in (1, 2):
        world.now += timedelta(seconds=10)
        world.run()
        (seen,) = world.observation
        assert isinstance(seen.syncer, Unreachable)
        assert seen.last_answer == answered
        assert seen.syncer.silent_since == answered + timedelta(seconds=10), f"request {silent}"
    world.reconciler.forget(but=())
    world.run()
    assert world.observation[0].syncer.silent_since == world.now, "nothing is left of a deleted job"
    world.reconciler.close()


def test_a_failure_is_reported_to_the_syncer_over_tls(api, tmp_path):
    authority, syncer = new_authority("a", datetime.now(UTC)), FailingSyncer()
    with syncing(issued(authority, ["eu"], ["a-syncer"]), syncer) as endpoint:
        world = remote(api, tmp_path, endpoint, tls={"mode": "Secret", "secretName": "s"})
        put_secret(api, issued(authority, ["us"]))
        world.now = datetime.now(UTC) + timedelta(seconds=1)
        world.decide = lambda observation: Decisions(
            failure_to_report=Failure(reason="R", message="why"),
            regions_to_report=(RegionFailure(region="us", reason="S", message="all"),),
        )
        world.run()
        assert syncer.failures == [("R", "why"), ("us", "S", "all")]
    world.reconciler.close()


def test_a_failure_that_cannot_be_reported_ends_no_reconcile(api, tmp_path, caplog):
    """An older version has no such call, another is gone, and a certificate may be missing."""
    authority = new_authority("a", datetime.now(UTC))
    reports = Decisions(failure_to_report=Failure(reason="R", message="why"), requeue_seconds=7.0)
    caplog.set_level(logging.INFO)
    with syncing(issued(authority, ["eu"], ["a-syncer"])) as endpoint:
        world = remote(api, tmp_path, endpoint, tls={"mode": "Secret", "secretName": "s"})
        world.decide = lambda observation: reports
        world.now = datetime.now(UTC) + timedelta(seconds=1)
        assert world.run() == 7.0
        assert "could not report" not in caplog.text, "without a certificate it does not dial"
        put_secret(api, issued(authority, ["us"]))
        assert world.run() == 7.0
        assert "could not report the failure to the syncer: UNIMPLEMENTED" in caplog.text
    caplog.clear()
    assert world.run() == 7.0
    assert "could not report the failure to the syncer: UNAVAILABLE" in caplog.text
    world.reconciler.close()


def issued(authority, regions, server_names=()):
    issued_tls = issue(
        authority, job="a", regions=regions, server_names=server_names, now=datetime.now(UTC)
    )
    return Tls(certificate=issued_tls.certificate, key=issued_tls.key, authority=authority.bundle)


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


def test_the_own_syncer_is_contacted_only_while_its_pod_is_ready(world, monkeypatch):
    asked = []

    def ask(key, address):
        asked.append(address.endpoint)
        return syncer_pb2.StatusReply(step=7)

    monkeypatch.setattr(world.reconciler._observer._syncers, "ask", ask)
    body = world.child("a-syncer") | {"apiVersion": "apps/v1", "kind": "Deployment"}
    world.api.create(body)
    world.run()
    assert world.observation[0].syncer is None
    assert not asked
    world.api.edit("deployments", "a-syncer", lambda item: item.update(status={"readyReplicas": 1}))
    world.run()
    assert asked == ["a-syncer.ns.svc:7070"]
    assert world.observation[0].syncer.step == 7


def finished(world, monkeypatch):
    """A syncer that serves a finished run; what owns it decides whose."""
    monkeypatch.setattr(
        world.reconciler._observer._syncers,
        "ask",
        lambda key, address: syncer_pb2.StatusReply(job="a", step=5, state="Complete", epoch=1),
    )
    body = world.child("a-syncer") | {"apiVersion": "apps/v1", "kind": "Deployment"}
    return body | {"spec": {}, "status": {"readyReplicas": 1}}


def test_the_syncer_of_a_former_job_of_the_same_name_does_not_complete_the_new_one(
    world, monkeypatch
):
    """A job that was deleted and applied again is reconciled before the garbage collector has run."""
    body = finished(world, monkeypatch)
    body["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former"
    world.api.create(body)
    scope = OperatorScope(worker_image="w", syncer_image="s")
    world.decide = lambda observation: decide(observation, scope, NOW)
    world.run()
    status = world.api.get("dilocojobs", "a")["status"]
    assert (status["state"], status["step"]) == ("Pending", 0)
    assert reasons(world.api)["Accepted"][1] == "NameTaken"
    world.api.delete("deployments", "a-syncer")
    world.run()
    assert world.api.get("statefulsets", "a-eu")["spec"]["replicas"] == 2
    assert world.api.get("deployments", "a-syncer")["spec"]["replicas"] == 1


def test_a_syncer_without_an_owner_is_adopted_and_contacted(world, monkeypatch):
    body = finished(world, monkeypatch)
    del body["metadata"]["ownerReferences"]
    world.api.create(body)
    world.run()
    assert world.observation[0].syncer.step == 5


def test_of_a_job_that_another_controller_manages_nothing_more_is_read(api, tmp_path):
    policy = {"managedBy": "kueue.x-k8s.io/multikueue"}
    tls = {"mode": "Secret", "secretName": "s"}
    world = remote(api, tmp_path, "127.0.0.1:1", tls=tls, runPolicy=policy)
    world.run()
    assert world.observation[0].syncer is None, "no syncer was contacted"
    assert [request.method for request in api.requests] == ["GET"]
