"""
Whatever the API server accepts as a job yields children or a clear condition, and the operator keeps running.

Etcd, an API server, and the operator as a process: the field values of `manifest_fuzz`, and nonsense
in everything that is passed through unseen to pods, Services and claims.
"""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_job.crd import crd
from diloco_testing.kubernetes.api_server import JOBS, ApiServer, Refusal, running
from diloco_testing.kubernetes.operator_process import OperatorProcess, until
from diloco_testing.manifests.cases import JOB
from diloco_testing.manifests.fuzz import HOSTILE, NODES, PLACES, edges, put

Json = dict[str, Any]

SPEC = ("spec", "learner", "podTemplate", "spec")
LABELS = ("spec", "learner", "podTemplate", "metadata", "labels")

DEEP: list[Any] = []
"""Lists inside each other, about as many as an API server takes."""
for _ in range(9000):
    DEEP = [DEEP]

POD_NONSENSE = [
    {"containers": "x"}, {"containers": {}}, {"containers": {"name": "main"}}, {"containers": [1]},
    {"containers": [{}]}, {"containers": [{"name": 7}]}, {"containers": [{"name": "main"}] * 2},
    {"containers": [{"name": "Bad Name", "image": "x"}]}, {"containers": [{"name": "side"}]},
    {"containers": [{"name": "main", "env": "x"}]}, {"containers": [{"name": "main", "env": [1]}]},
    {"containers": [{"name": "main", "volumeMounts": [{"name": "no", "mountPath": "/x"}]}]},
    {"containers": [{"name": "main", "resources": {"limits": {"cpu": "abc"}}}]},
    {"containers": [{"name": "main", "resources": {"limits": {"cpu": "1e99999"}}}]},
    {"containers": [{"name": "main", "ports": [{"containerPort": 0}]}]},
    {"containers": [{"name": "main", "startupProbe": "x"}]},
    {"containers": [{"name": "main", "livenessProbe": {"exec": {"command": ["x"]}}}]},
    {"initContainers": [{}]}, {"ephemeralContainers": [{}]}, {"volumes": "x"}, {"volumes": [{}]},
    {"volumes": [{"name": "spec", "hostPath": {"path": "/"}}]}, {"volumes": [{"name": "a"}] * 2},
    {"tolerations": [1]}, {"tolerations": [{"operator": "Never"}]}, {"affinity": "x"},
    {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}},
    {"nodeSelector": {"a": 1}}, {"nodeSelector": {"a": None}}, {"nodeSelector": []},
    {"securityContext": []}, {"securityContext": {"runAsUser": "root"}}, {"hostNetwork": "yes"},
    {"restartPolicy": "Never"}, {"restartPolicy": 5}, {"thereIsNoSuchField": 1},
    {"terminationGracePeriodSeconds": "x"}, {"terminationGracePeriodSeconds": -1},
    {"terminationGracePeriodSeconds": 10**20}, {"terminationGracePeriodSeconds": 1.5},
    {"topologySpreadConstraints": [{}]}, {"imagePullSecrets": ["x"]}, {"hostAliases": [{"ip": 1}]},
    {"priorityClassName": 1}, {"priorityClassName": "none-such"}, {"runtimeClassName": "none-such"},
    {"nodeName": []}, {"dnsConfig": None}, {"overhead": {"cpu": "x"}}, {"os": {"name": "beos"}},
    {"activeDeadlineSeconds": 0}, {"": 1}, {"a": {"b": {"c": [[[[]]]]}}}, {"subdomain": "_"},
    {"schedulingGates": [{"name": "a"}] * 2}, {"serviceAccountName": "Not A Name"},
]  # fmt: skip
CHANGES: list[tuple[tuple[str | int, ...], Any]] = [
    *((SPEC, spec) for spec in POD_NONSENSE),
    *((("spec", "regions", 0, "podTemplate", "spec"), spec) for spec in POD_NONSENSE[:4]),
    *((("spec", "syncer", "podTemplate", "spec"), spec) for spec in POD_NONSENSE[:4]),
    (LABELS, {"no label!": "x"}), (LABELS, {"a": "no value!"}), (LABELS, {"diloco.dev/job": "x"}),
    (("spec", "learner", "podTemplate", "metadata", "annotations"), {"no key!": "x"}),
    (("spec", "learner", "env"), [{"name": "A", "valueFrom": {}}]),
    (("spec", "learner", "env"), [{"name": "A", "valueFrom": {"x": 1}}]),
    (("spec", "learner", "env"), [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]),
    (("spec", "learner", "env"), [{"name": "A", "valueFrom": {"fieldRef": "x"}}]),
    (("spec", "learner", "env"), [{"name": "DILOCO_JOB", "value": "other"}]),
    (("spec", "learner", "resources", "claims"), [{"name": "a"}]),
    (("spec", "learner", "resources", "limits"), {"no resource!": "1"}),
    (("spec", "learner", "resources", "limits"), {"cpu": "1", "example.org/x": "0.5"}),
    (("spec", "learner", "recipe", "config"), {"text": "x" * 1_100_000}),
    (("spec", "learner", "recipe", "config"), {"deep": DEEP}),
    ((*SPEC, "affinity"), {"deep": DEEP}),
    (("spec", "learner", "image"), "no image: !"),
    (("spec", "syncer", "service", "annotations"), {"no key!": "x"}),
    (("spec", "syncer", "service", "nodePort"), 1),
    (("spec", "syncer", "service"), {"type": "NodePort", "nodePort": 1}),
    (("spec", "syncer", "storage", "className"), "none-such"),
]  # fmt: skip
"""What the API server takes as a part of a job, or may refuse by itself."""

FIELDS_TRIED = 60
"""Places of the schema that get one of the values of `manifest_fuzz`; the seed is fixed."""


def job(name: str, *changes: tuple[tuple[str | int, ...], Any]) -> Json:
    manifest: Any = yaml.safe_load(JOB)
    for place, value in changes:
        put(manifest, place, value)
    manifest["metadata"] = {"name": name}
    return dict(manifest)


def fuzzed() -> Iterator[list[tuple[tuple[str | int, ...], Any]]]:
    """Each change alone, then some of the schema's places with values of all kinds."""
    for change in CHANGES:
        yield [change]
    chance = random.Random(5)
    # A job that another controller manages is left alone, without a condition.
    places = [place for place in PLACES if place[0] == "spec" and "managedBy" not in place]
    for place in chance.sample(places, FIELDS_TRIED):
        yield [(place, chance.choice([*edges(NODES[place]), *HOSTILE]))]


@pytest.fixture(scope="module", autouse=True)
def depth() -> Iterator[None]:
    """Lets the JSON of this module be as deep."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(15_000)
    yield
    sys.setrecursionlimit(before)


@pytest.fixture(scope="module")
def api(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with running(programs, tmp_path_factory.mktemp("api")) as server:
        server.install(crd())
        yield server


@pytest.fixture(scope="module")
def operator(api: ApiServer, tmp_path_factory) -> Iterator[OperatorProcess]:
    with OperatorProcess(api, tmp_path_factory.mktemp("operator")) as process:
        yield process.until_ready()


@pytest.fixture(scope="module")
def accepted(api, operator) -> dict[str, list[tuple[tuple[str | int, ...], Any]]]:
    """Jobs that the server accepted, by name, and their changes."""
    made = {}
    for number, changes in enumerate(fuzzed()):
        name = f"odd-{number}"
        if not isinstance(api.create(job(name, *changes)), Refusal):
            made[name] = changes
    assert len(made) > len(CHANGES) / 2
    return made


def stored(api: ApiServer) -> dict[str, Json]:
    return {job["metadata"]["name"]: job for job in api.send("GET", JOBS)[1]["items"]}


def accepted_of(job: Json) -> Json | None:
    """The condition Accepted, where it is about the job as it is now."""
    status = job.get("status") or {}
    if status.get("observedGeneration") != job["metadata"]["generation"]:
        return None
    return next((c for c in status.get("conditions", ()) if c["type"] == "Accepted"), None)


def children(api: ApiServer, name: str) -> set[str]:
    path = "/apis/apps/v1/namespaces/default/statefulsets"
    found = api.send("GET", path, labelSelector=f"diloco.dev/job={name}")[1]["items"]
    return {child["metadata"]["name"] for child in found}


def until_reported(api: ApiServer, names: set[str], seconds: float) -> dict[str, Json]:
    """The condition Accepted of each of these jobs."""
    deadline = time.monotonic() + seconds
    while True:
        reported = {name: accepted_of(job) for name, job in stored(api).items() if name in names}
        silent = sorted(name for name in names if not reported.get(name))
        if not silent:
            return {name: condition for name, condition in reported.items() if condition}
        assert time.monotonic() < deadline, f"nothing was reported about {silent}"
        time.sleep(0.5)


def test_every_accepted_job_has_children_or_a_condition_with_the_reason(api, operator, accepted):
    reported = until_reported(api, set(accepted), 240)
    for name, condition in reported.items():
        about = f"{accepted[name]!r:.200}: {condition}"
        if condition["status"] == "True":
            regions = stored(api)[name]["spec"]["regions"]
            assert children(api, name) == {f"{name}-{region['name']}" for region in regions}, about
        else:
            assert condition["status"] == "False", about
            assert condition["reason"] in ("Refused", "InvalidSpec", "NoEndpoint"), about
            assert condition["message"], about
    assert {"True", "False"} == {condition["status"] for condition in reported.values()}


def test_a_refused_child_is_named_with_the_servers_message(api, operator, accepted):
    name = next(n for n, changes in accepted.items() if changes == [(SPEC, {"containers": "x"})])
    condition = until_reported(api, {name}, 240)[name]
    assert (condition["status"], condition["reason"]) == ("False", "Refused")
    assert f"StatefulSet {name}-eu" in condition["message"]
    assert ".spec.template.spec.containers" in condition["message"]


def test_a_job_that_is_fixed_gets_its_children_at_once(api, operator, accepted):
    name = next(n for n, changes in accepted.items() if changes == [(SPEC, {"containers": "x"})])
    until_reported(api, {name}, 240)
    fixed = api.replace(job(name))
    assert not isinstance(fixed, Refusal), fixed
    assert until_reported(api, {name}, 20)[name]["status"] == "True"


def test_the_operator_is_healthy_and_serves_other_jobs_at_once(api, operator, accepted):
    until_reported(api, set(accepted), 240)
    assert not isinstance(api.create(job("sane")), Refusal)
    assert until_reported(api, {"sane"}, 30)["sane"]["status"] == "True"
    assert operator.process.poll() is None
    assert operator.get("/healthz") == (200, "ok\n")
    odd = [line for line in operator.lines() if line["level"] not in ("info", "warning")]
    assert not odd, odd[:3]


def test_fuzzed_jobs_cause_no_further_writes(api, operator, accepted):
    """A child that reads back otherwise than it was applied would be applied without end."""
    reported = until_reported(api, set(accepted), 240)
    good = {name for name, condition in reported.items() if condition["status"] == "True"}

    def writes() -> dict[str, int]:
        found: dict[str, int] = {}
        for line in operator.lines():
            if line["message"].startswith("applied ") and line.get("job"):
                name = line["job"].partition("/")[2]
                found[name] = found.get(name, 0) + (name in good)
        return found

    def rested() -> bool:
        before = writes()
        time.sleep(5.0)
        return before == writes()

    until(rested, "the operator rests")
    before = writes()
    time.sleep(65.0)  # two checks of each running job
    assert writes() == before
