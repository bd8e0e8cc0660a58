"""What a job costs where there are many: no more than where there are few."""

import copy

from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import Reconciler
from diloco_operator.workqueue import Key
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


def test_a_job_costs_the_api_server_no_more_where_there_are_three_times_as_many(tmp_path):
    """Each list of a job's objects without a version reads those of all jobs from etcd."""
    few, many = (reconciled(jobs, tmp_path / str(jobs)) for jobs in (FEW, MANY))
    assert few[0] > 20
    assert many == few
