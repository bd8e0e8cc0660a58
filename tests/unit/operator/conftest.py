"""An API server in memory, and a reconciler of one job in it."""

import pytest

from diloco_operator.cluster import client as cluster_module
from diloco_testing.kubernetes.fake_api import FakeApi
from diloco_testing.kubernetes.reconciled_cluster import ReconciledCluster, job


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(cluster_module, "RETRY_PAUSES", (0.01,))
    with FakeApi() as made:
        yield made


@pytest.fixture
def world(api, tmp_path):
    api.create(job())
    made = ReconciledCluster(api, tmp_path)
    yield made
    made.reconciler.close()
