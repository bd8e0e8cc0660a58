"""What a job costs where there are many: no more than where there are few."""

import copy

import pytest

from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import Reconciler
from diloco_operator.workqueue import Key, WorkQueue
from diloco_testing.kubernetes.fake_api import FakeApi
from diloco_testing.kubernetes.reconciled_cluster import NOW, SCOPE, job

FEW, MANY = 2, 6


def reconciled(jobs, folder):
    """Requests and objects that the API server reads from its store, of this many jobs, for each of them."""
    folder.mkdir()
    with FakeApi() as api:
        cluster = Cluster(
            connect(kubeconfig=api.kubeconfig(folder / "kubeconfig")), manager="diloco-operator"
        )
        reconciler = Reconciler(cluster, SCOPE, metrics=Metrics(), now=lambda: NOW)
        keys = [Key("ns", f"job-{number:02}") for number in range(jobs)]
        for key in keys:
            body = copy.deepcopy(job())
            body["metadata"]["name"] = key.name
            api.create(body)
        for key in keys * 3:
            assert reconciler.reconcile(key) is not None
        assert len(api.all("statefulsets")) == jobs
        reconciler.close()
        return len(api.requests) / jobs, api.num_decoded / jobs


@pytest.mark.slow
def test_a_job_costs_the_api_server_no_more_where_there_are_three_times_as_many(tmp_path):
    """Each list of a job's objects without a version reads those of all jobs from etcd."""
    few, many = (reconciled(jobs, tmp_path / str(jobs)) for jobs in (FEW, MANY))
    assert few[0] > 20
    assert many == few


class Namespace(str):
    """Counts how often a name is looked up."""

    num_lookups = 0

    def __hash__(self):
        Namespace.num_lookups += 1
        return super().__hash__()


def lookups(num_keys):
    """How often the queue looks up a namespace while it runs ten of this many keys."""
    queue = WorkQueue(lambda key: None, threads=0)
    for number in range(num_keys):
        queue.add(Key(Namespace("ns"), f"job-{number:04}"))
    before = Namespace.num_lookups
    for _ in range(10):
        queue._done(queue._take(), 30.0, failed=False)
    return Namespace.num_lookups - before


def test_the_queue_does_not_look_through_all_keys_for_the_next_one():
    assert 0 < lookups(20) == lookups(2000)


def test_the_queue_keeps_nothing_of_a_namespace_without_keys():
    queue = WorkQueue(lambda key: None, threads=0)
    for number in range(3):
        queue.add(Key(f"ns-{number}", "a"))
    for _ in range(3):
        queue._done(queue._take(), None, failed=False)
    assert not queue.keys()
    assert queue._waiting == queue._turns == queue._running == {}


def test_nothing_is_kept_of_a_namespace_whose_last_job_is_gone(tmp_path):
    """Where each run of a pipeline has a namespace of its own, there are thousands in a year."""
    with FakeApi() as api:
        cluster = Cluster(
            connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig")), manager="diloco-operator"
        )
        reconciler = Reconciler(cluster, SCOPE, metrics=Metrics(), now=lambda: NOW)
        keys = [Key("ns", "a"), Key("ns", "b"), Key("other", "a")]
        for key in keys:
            body = copy.deepcopy(job())
            body["metadata"] |= {"namespace": key.namespace, "name": key.name}
            api.create(body)
            reconciler.reconcile(key)
        for key, left in zip(keys, ({"ns", "other"}, {"other"}, set()), strict=True):
            api.delete("dilocojobs", key.name, key.namespace)
            assert reconciler.reconcile(key) is None
            assert {namespace for _, namespace in cluster._listed} == left
        reconciler.close()


def test_jobs_are_counted_by_state_only_when_one_changed(monkeypatch):
    metrics = Metrics()
    gauge, counted = metrics._metrics["diloco_operator_jobs"], []
    monkeypatch.setattr(gauge, "clear", lambda: counted.append(True))
    for state in ("Pending", "Pending", "Running", "Running", None, None):
        metrics.state(Key("ns", "a"), state)
    assert len(counted) == 3
