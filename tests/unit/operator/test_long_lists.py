"""A list of many pages, as in a large cluster: each is progress of the reconcile that reads it, and small."""

import time
import tracemalloc

import pytest

from diloco_operator import __main__ as program
from diloco_operator.cluster import client as cluster_module
from diloco_operator.cluster.client import Cluster, connect
from diloco_operator.settings import from_env
from diloco_operator.workqueue import Key, WorkQueue
from diloco_testing.kubernetes.fake_api import FakeApi
from diloco_testing.kubernetes.reconciled_cluster import job

KEY = Key("ns", "a")
PAGES = 6


def pod(number):
    """Of another job: the first list of a process reads those of all jobs."""
    labels = {"diloco.dev/job": "other"}
    metadata = {"namespace": "ns", "name": f"other-{number}", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


@pytest.fixture
def api(monkeypatch):
    """Pages of one object."""
    monkeypatch.setattr(cluster_module, "PAGE", 1)
    with FakeApi() as api:
        api.create(job())
        for number in range(PAGES):
            api.create(pod(number))
        yield api


def test_the_operator_counts_each_page_of_a_list_as_progress_of_the_job(api, tmp_path, monkeypatch):
    """Otherwise a list that takes more than five minutes in all would restart the process, which lists again."""
    progress = []
    monkeypatch.setattr(
        WorkQueue, "progressed", lambda queue, key: progress.append((key, len(api.requests)))
    )
    images = {"DILOCO_WORKER_IMAGE": "worker", "DILOCO_SYNCER_IMAGE": "syncer"}
    settings = from_env({**images, "DILOCO_METRICS_PORT": "0", "DILOCO_RECONCILE_THREADS": "1"})
    parts = program._assemble(settings, connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig")))
    parts.queue.start()
    try:
        parts.queue.add(KEY)
        deadline = time.monotonic() + 30
        while not api.all("statefulsets"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        assert parts.queue.stop(30)
        parts.work.reconciler.close()
    pages = [at for at, asked in enumerate(api.requests, start=1) if "/pods?" in asked.path]
    first = pages[:PAGES]
    assert first == list(range(first[0], first[0] + PAGES)), "one after the other"
    assert {(KEY, at) for at in first} <= set(progress)


@pytest.mark.slow
def test_a_list_of_many_large_objects_takes_little_memory(tmp_path):
    """The API server limits a page by the number of its objects alone, and an object to 1.5 MB."""
    number, size = 400, 100_000
    with FakeApi() as api:
        for index in range(number):
            large = job(recipe="x" * size)
            large["metadata"]["name"] = f"a{index}"
            api.create(large)
        cluster = Cluster(connect(kubeconfig=api.kubeconfig(tmp_path / "kubeconfig")), manager="m")
        tracemalloc.start()
        try:
            assert sum(1 for _ in cluster.jobs()) == number
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < number * size, (
        "with the page as the server and the client have it, a few times each"
    )
