"""
What the operator needs for each of many jobs is what it needs for each of few: writes, reads, time and memory.

Real reconciles, against an API server of dicts whose own work for a job does not depend on how many there are. The
numbers are to each other as 200 to 1,000, with which `benchmarks/bench_operator_scale.py` measures the whole process.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
import types
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from kubernetes.client import Configuration

from diloco_operator.cluster.client import Cluster
from diloco_operator.metrics import Metrics
from diloco_operator.reconcile import Reconciler
from diloco_operator.workqueue import Key
from diloco_testing.kubernetes.reconciled_cluster import NOW, SCOPE, job

pytestmark = pytest.mark.slow  # test_many_jobs.py compares three times as many

FEW, MANY = 20, 100
ROUNDS = 2
"""Reconciles of each job at rest."""
MAX_SLOWER = 2.0
"""Of processor time, which depends on what else the machine does."""
MAX_GROWTH = 1.02
"""Of what does not."""

Json = dict[str, Any]


@dataclass(slots=True)
class Response:
    status: int
    data: bytes
    headers: Json = field(default_factory=dict)


class Store:
    """Takes the place of the connections of a Cluster; lists of a job's objects are looked up."""

    def __init__(self) -> None:
        self.reads = self.num_read = 0
        """Requests, and objects in their answers."""
        self.writes: Counter[str] = Counter()
        """By job."""
        self._version = 1000
        self._of_job: dict[str, dict[str, dict[str, Json]]] = defaultdict(lambda: defaultdict(dict))
        """Path of a collection → job → name → object."""

    def request(self, method: str, url: str, *, body: bytes | None, **_: Any) -> Response:
        address = urlsplit(url)
        query, path = dict(parse_qsl(address.query)), address.path
        if method == "GET":
            return self._get(path, query)
        content = json.loads(body or b"{}")
        if method == "POST":
            self.writes[content["involvedObject"]["name"]] += 1
            return Response(201, b"{}")
        assert method == "PATCH"
        return self._apply(path, content)

    def apply(self, path: str, name: str, of: str, content: Json, status: Json | None) -> Json:
        self._version += 1
        place = self._of_job[path][of]
        before = place.get(name, {"metadata": {"uid": f"uid-{self._version}", "generation": 0}})
        kept = before["metadata"]
        after = {**before, **content, "metadata": {**kept, **content.get("metadata", {})}}
        changed = before.get("spec") != after.get("spec")
        after["metadata"]["generation"] = kept["generation"] + changed
        after["metadata"] |= {"uid": kept["uid"], "resourceVersion": str(self._version)}
        if status is not None:
            after["status"] = {**after.get("status", {}), **status}
        place[name] = after
        return after

    def _apply(self, path: str, content: Json) -> Response:
        metadata = content["metadata"]
        if is_status := path.endswith("/status"):
            path = path.removesuffix("/status")
        collection, _, name = path.rpartition("/")
        of = (metadata.get("labels") or {}).get("diloco.dev/job", name)
        self.writes[of] += 1
        status = content.get("status") if is_status else None
        after = self.apply(collection, name, of, {} if is_status else content, status)
        return Response(200, json.dumps(after).encode())

    def _get(self, path: str, query: Json) -> Response:
        self.reads += 1
        selector = query.get("labelSelector")
        if selector is None:
            collection, _, name = path.rpartition("/")
            for of in (name, name.rpartition("-")[0], "-".join(name.split("-")[:2])):
                if found := self._of_job[collection][of].get(name):
                    self.num_read += 1
                    return Response(200, json.dumps(found).encode())
            return Response(404, b'{"message": "not found", "code": 404}')
        _, _, of = selector.partition("=")
        jobs = [self._of_job[path][of]] if of else self._of_job[path].values()
        items = [item for each in jobs for item in each.values()]
        first, limit = int(query.get("continue", 0)), int(query.get("limit", 0)) or len(items)
        shown = items[first : first + limit]
        self.num_read += len(shown)
        after = str(first + limit) if first + limit < len(items) else ""
        metadata = {"resourceVersion": str(self._version), "continue": after}
        return Response(200, json.dumps({"items": shown, "metadata": metadata}).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """For each of the jobs."""

    writes: tuple[int, ...]
    """For each job, sorted; of its first two reconciles."""
    later_writes: int
    """Of the reconciles at rest, and of another process: for all jobs."""
    reads: float
    restart_objects: float
    """That another process reads in its first reconcile of each job."""
    first_seconds: float
    seconds: float
    """Of processor time, for a reconcile at rest."""
    calls: float
    """Of functions, in such a reconcile."""
    bytes: float
    """That the reconciler keeps."""


def cost(num_jobs: int) -> Cost:
    store = Store()
    keys = [Key("ns", f"job-{number:04}") for number in range(num_jobs)]
    for key in keys:
        body = copy.deepcopy(
            job(regions=[{"name": name, "learners": 2} for name in ("eu", "us", "asia")])
        )
        body["metadata"]["name"] = key.name
        store.apply(
            "/apis/diloco.dev/v1alpha1/namespaces/ns/dilocojobs", key.name, key.name, body, None
        )
    process, base = reconciler(store), kept_bytes(reconciler(store))
    first = timed(process, keys) + timed(
        process, keys
    )  # the second status shows what is there then
    writes = dict(store.writes)
    reads, store.reads = store.reads, 0
    at_rest = min(timed(process, keys) for _ in range(ROUNDS))
    calls = counted(process, keys)
    kept = kept_bytes(process) - base
    process.close()
    store.num_read = 0
    successor = reconciler(store)
    timed(successor, keys)
    successor.close()
    return Cost(
        writes=tuple(sorted(writes.values())),
        later_writes=store.writes.total() - sum(writes.values()),
        reads=reads / num_jobs,
        restart_objects=store.num_read / num_jobs,
        first_seconds=first / num_jobs,
        seconds=at_rest / num_jobs,
        calls=calls / num_jobs,
        bytes=kept / num_jobs,
    )


def reconciler(store: Store) -> Reconciler:
    cluster = Cluster(Configuration(host="http://api"), manager="diloco-operator")
    cluster._pool = store
    return Reconciler(cluster, SCOPE, metrics=Metrics(), now=lambda: NOW + timedelta(seconds=1))


def timed(process: Reconciler, keys: list[Key]) -> float:
    """Processor time of this thread; without the garbage collector, which also visits what the test holds."""
    gc.collect()
    gc.disable()
    try:
        begun = time.thread_time()
        for key in keys:
            assert process.reconcile(key) is not None
        return time.thread_time() - begun
    finally:
        gc.enable()


def counted(process: Reconciler, keys: list[Key]) -> int:
    """Calls of functions in this thread."""
    num_calls = 0

    def called(frame: types.FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        for key in keys:
            process.reconcile(key)
    finally:
        sys.setprofile(before)
    return num_calls


def kept_bytes(process: Reconciler) -> int:
    """Of all that the reconciler refers to, but the API server, code and classes."""
    seen: set[int] = set()
    total, left = 0, [process]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, Store | type | types.ModuleType | types.CodeType):
            continue
        if isinstance(item, types.FunctionType):
            left += [cell.cell_contents for cell in item.__closure__ or ()]
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        left += gc.get_referents(item)
    return total


@pytest.fixture(scope="module")
def costs() -> tuple[Cost, Cost]:
    few, many = cost(FEW), cost(MANY)
    print(*(replace(each, writes=each.writes[-1:]) for each in (few, many)), sep="\n")
    return few, many


def test_each_of_five_times_as_many_jobs_is_written_as_often_and_then_never(costs):
    few, many = costs
    assert few.writes[0] > 15
    assert set(many.writes) == set(few.writes) == {few.writes[0]}
    assert few.later_writes == many.later_writes == 0


def test_each_of_five_times_as_many_jobs_is_read_as_often_also_by_a_new_process(costs):
    few, many = costs
    assert few.reads > 20
    assert many.reads <= few.reads
    # The first lists of a process read the objects of all jobs.
    assert few.restart_objects <= many.restart_objects <= few.restart_objects + 1


def test_each_of_five_times_as_many_jobs_takes_as_long(costs):
    few, many = costs
    assert many.first_seconds <= MAX_SLOWER * few.first_seconds
    assert many.seconds <= MAX_SLOWER * few.seconds
    assert few.calls > 1000
    assert many.calls <= MAX_GROWTH * few.calls


def test_each_of_five_times_as_many_jobs_takes_as_much_memory(costs):
    few, many = costs
    assert few.bytes > 100
    assert many.bytes <= MAX_GROWTH * few.bytes
