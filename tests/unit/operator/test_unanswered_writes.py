"""A write that the API server does not answer: an admission webhook that hangs hides nothing else of the job."""

from datetime import UTC, datetime, timedelta

import pytest

from diloco_operator.cluster import client as cluster_module
from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.decide.decisions import decide
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import REMIND_SECONDS, Reconciler
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_operator.workqueue import Key, RetryError
from diloco_testing.kubernetes.fake_api import FakeApi, Fault
from diloco_testing.kubernetes.reconciled_cluster import job

KEY = Key("ns", "a")
SCOPE = OperatorScope(worker_image="worker", syncer_image="syncer")
JOB = {
    "apiVersion": "diloco.dev/v1alpha1",
    "kind": "DiLoCoJob",
    "metadata": {"namespace": "ns", "name": "a"},
    "spec": {
        "steps": 5,
        "sync": {"quorum": 1},
        "learner": {"recipe": {"name": "gpt"}},
        "regions": [{"name": "eu", "learners": 2}, {"name": "us", "learners": 2}],
    },
}


class Installations:
    """A reconciler with its own decisions, and the time of the test."""

    def __init__(self, api, tmp_path):
        self.api, self.now = api, datetime(2026, 11, 21, 12, tzinfo=UTC)
        self.leads, self.progress = True, []
        api.create(JOB)
        self.reconciler = self.installation("system/one", tmp_path)

    def installation(self, name, tmp_path):
        configuration = connect(kubeconfig=self.api.kubeconfig(tmp_path / "kubeconfig"))
        return Reconciler(
            Cluster(configuration, manager="diloco-operator", may_write=lambda: self.leads),
            SCOPE,
            metrics=Metrics(),
            decide=lambda observation, scope, _: decide(observation, scope, self.now),
            progressed=self.progress.append,
            installation=name,
            now=lambda: self.now,
        )

    def fails(self):
        with pytest.raises(RetryError) as raised:
            self.reconciler.reconcile(KEY)
        return str(raised.value)

    def accepted(self):
        conditions = self.api.get("dilocojobs", "a")["status"]["conditions"]
        found = next(entry for entry in conditions if entry["type"] == "Accepted")
        return found["status"], found["reason"], found["message"]

    def tried(self, plural):
        writes = [request.path.partition("?")[0] for request in self.api.writes()]
        return {path.rpartition("/")[2] for path in writes if f"/{plural}/" in path}


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "RETRY_PAUSES", (0.01,))
    with FakeApi() as api:
        made = Installations(api, tmp_path)
        yield made
        made.reconciler.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(cluster_module, "READ_SECONDS", 1.0)


@pytest.mark.usefixtures("impatient")
def test_a_kind_whose_writes_hang_is_reported_and_the_others_are_written(world):
    world.api.faults.append(Fault("PATCH", "/statefulsets/", hang_seconds=60.0, times=99))
    error = world.fails()
    assert error == "StatefulSet a-eu: no answer from the API server"
    assert world.accepted() == (
        "False",
        "Refused",
        f"the API server did not accept {error}",
    )
    assert ("Warning", "Refused") in {(e["type"], e["reason"]) for e in world.api.all("events")}
    assert world.tried("statefulsets") == {"a-eu"}, "the next one would only wait as well"
    assert world.api.get("deployments", "a-syncer")
    assert world.api.get("services", "a-us")


@pytest.mark.parametrize("status", [408, 409, 429, 502, 503, 504])
def test_an_error_that_does_not_pass_is_reported_with_the_servers_message(world, status):
    world.api.faults.append(Fault("PATCH", "/statefulsets/", status, "too many requests", times=99))
    assert world.fails() == "StatefulSet a-eu: too many requests"
    assert world.accepted()[1:] == (
        "Refused",
        "the API server did not accept StatefulSet a-eu: too many requests",
    )


@pytest.mark.usefixtures("impatient")
def test_the_status_is_written_once_however_often_a_write_has_no_answer(world):
    """The error of the client names an object in memory."""
    world.api.faults.append(Fault("PATCH", "/statefulsets/", hang_seconds=60.0, times=99))
    for _ in range(2):
        world.fails()
    before = len(status_writes(world))
    world.fails()
    assert len(status_writes(world)) == before


def status_writes(world):
    return [request for request in world.api.writes() if "operator-status" in request.path]


def test_when_writes_of_two_kinds_have_no_answer_no_third_is_tried(world):
    fault = Fault("PATCH", "/(statefulsets|services|deployments|configmaps)/", 503, "no", times=99)
    world.api.faults.append(fault)
    world.fails()
    kinds = {request.path.partition("?")[0].split("/")[-2] for request in world.api.writes()}
    assert len(kinds & {"statefulsets", "services", "deployments", "configmaps"}) == 2
    assert world.accepted()[1] == "Refused"


def test_a_job_whose_writes_are_answered_again_recovers(world):
    world.api.faults.append(Fault("PATCH", "/statefulsets/", 503, "no", times=99))
    world.fails()
    world.api.faults.clear()
    world.reconciler.reconcile(KEY)
    assert world.accepted()[:2] == ("True", "Valid")
    assert world.api.get("statefulsets", "a-us")


def test_a_process_that_leads_no_more_reports_nothing(world):
    world.reconciler.reconcile(KEY)
    world.api.delete("statefulsets", "a-eu")
    world.leads = False
    before = len(world.api.writes())
    assert "not the leader" in world.fails()
    assert len(world.api.writes()) == before


def test_a_token_that_the_server_does_not_take_ends_the_reconcile(world):
    world.reconciler.reconcile(KEY)
    world.api.delete("statefulsets", "a-eu")
    world.api.faults.append(Fault("PATCH", "/statefulsets/", 401, "Unauthorized", times=99))
    assert "Unauthorized" in world.fails()
    assert world.accepted()[1] == "Valid"


def test_each_write_to_a_child_is_progress_however_many_there_are(world):
    world.reconciler.reconcile(KEY)
    children = [
        r for r in world.api.writes() if "dilocojobs" not in r.path and "events" not in r.path
    ]
    assert len(world.progress) == len(children) > 5
    assert set(world.progress) == {KEY}


# What a process remembers of jobs


def test_a_process_that_stands_by_forgets_all_jobs_but_those_that_it_reconciles(world, monkeypatch):
    asked, other = [], job()
    other["metadata"]["name"] = "b"
    world.api.create(other)
    monkeypatch.setattr(world.reconciler._observer, "forget", asked.append)
    world.reconciler.reconcile(KEY)
    world.reconciler.reconcile(Key("ns", "b"))
    asked.clear()
    world.reconciler.forget(but={KEY})
    assert asked == [Key("ns", "b")]
    assert KEY in world.reconciler._unchanged
    world.reconciler.forget(but=())
    assert set(asked) == {KEY, Key("ns", "b")}
    assert not world.reconciler._unchanged


def test_a_job_of_which_the_first_write_failed_is_forgotten_as_well(world):
    children = "/namespaces/ns/(?!dilocojobs)"
    world.api.faults.append(Fault("PATCH", children, 401, "Unauthorized", times=99))
    assert "Unauthorized" in world.fails()
    reconciler = world.reconciler
    assert KEY not in reconciler._unchanged
    assert KEY in reconciler._repairs
    assert KEY in reconciler._refusals
    reconciler.forget(but=())
    assert not reconciler._repairs
    assert not reconciler._refusals


def test_the_event_about_another_installation_is_posted_again_before_it_expires(world, tmp_path):
    world.reconciler.reconcile(KEY)
    second = world.installation("system/two", tmp_path)
    for minutes in (0, 5, 5):
        world.now += timedelta(minutes=minutes)
        second.reconcile(KEY)
        assert posted(world) == 1
    world.now += timedelta(seconds=REMIND_SECONDS)
    second.reconcile(KEY)
    assert posted(world) == 2
    second.forget(but=())
    assert not second._left
    second.close()


def posted(world):
    return sum(event["reason"] == "OtherOperator" for event in world.api.all("events"))
