"""The operator's process (kopf, queue, health, signals) against an API server in memory, over real HTTP."""

import os
import re
import subprocess
import sys
import time

import pytest

from diloco_job.crd import schema
from diloco_testing.kubernetes.fake_api import FakeApi, Fault
from diloco_testing.kubernetes.operator_process import OperatorProcess, until
from diloco_testing.metrics import missing

pytestmark = pytest.mark.slow


def job(name="a", namespace="ns", **spec):
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"namespace": namespace, "name": name, "uid": f"uid-of-{namespace}-{name}"},
        "spec": {
            "steps": 5,
            "learner": {"recipe": {"name": "gpt", "config": {}}},
            "regions": [{"name": "eu", "learners": 2}, {"name": "us", "learners": 1}],
            **spec,
        },
    }


CHILDREN = (
    "serviceaccounts", "configmaps", "persistentvolumeclaims", "services", "poddisruptionbudgets",
    "deployments", "statefulsets",
)  # fmt: skip


def children(api):
    """The children, without the fields that the server sets."""
    found = {}
    for plural in CHILDREN:
        for item in api.all(plural):
            metadata = {
                key: value
                for key, value in item["metadata"].items()
                if key in ("name", "namespace", "labels", "annotations")
            }
            found[(plural, metadata["name"])] = {**item, "metadata": metadata}
    return found


def settled(api):
    """All children exist, and the status was written."""
    statefulsets = {item["metadata"]["name"] for item in api.all("statefulsets")}
    status = (api.get("dilocojobs", "a") or {}).get("status") or {}
    return statefulsets == {"a-eu", "a-us"} and status.get("conditions")


def quiet(api, seconds=3.0):
    """Wait until the operator stops writing; the number of writes."""
    while True:
        before = len(api.writes())
        time.sleep(seconds)  # what does not happen can only be waited for
        if len(api.writes()) == before:
            return before


@pytest.fixture
def api():
    with FakeApi() as made:
        yield made


def test_a_job_gets_its_children_and_nothing_is_written_after_that_not_even_by_a_new_process(
    api, tmp_path
):
    api.create(job())
    with OperatorProcess(api, tmp_path) as operator:
        until(lambda: settled(api), "children and status")
        wrote = quiet(api)
        operator.until_ready()
        assert operator.get("/healthz") == (200, "ok\n")
        code, text = operator.get("/metrics", operator.metrics_port)
        assert code == 200
        assert re.search(r'diloco_operator_writes_total\{kind="StatefulSet"\} 2\.0', text)
        assert re.search(r'diloco_operator_reconcile_seconds_count\{result="ok"\}', text)
        state = r'diloco_operator_job_state\{job_name="a",job_namespace="ns",state="\w+"\} 1\.0'
        assert len(re.findall(state, text)) == 1
        assert re.search(r"^diloco_operator_queue_seconds_count [1-9]", text, re.M)
        assert re.search(r"^diloco_operator_queue_depth \d", text, re.M)
        assert missing(text, "operator") == set()
        assert operator.stop() == 0
        ours = [line for line in operator.lines() if line["logger"] == "diloco_operator.reconcile"]
        assert {line["job"] for line in ours} == {"ns/a"}
        assert {line["level"] for line in operator.lines()} == {"info"}
    seen = len(api.requests)
    with OperatorProcess(api, tmp_path / "again") as operator:
        operator.until_ready()
        until(lambda: any("/dilocojobs/a" in r.path for r in api.requests[seen:]), "a reconcile")
        assert quiet(api) == wrote


def test_only_labelled_objects_are_requested_and_no_rights_beyond_the_jobs_are_used(api, tmp_path):
    with OperatorProcess(api, tmp_path) as operator:
        operator.until_ready()
        watched = {
            match[1]: "labelSelector=diloco.dev" in request.path
            for request in api.requests
            if "watch=true" in request.path and (match := re.search(r"/([a-z]+)\?", request.path))
        }
        until(lambda: sum("watch=true" in r.path for r in api.requests) >= 9, "watches")
        asked = {request.path.split("?")[0] for request in api.requests}
    assert all(labelled for kind, labelled in watched.items() if kind != "dilocojobs")
    assert not [path for path in asked if re.search("namespaces|customresource", path)]


def test_in_namespaced_mode_no_other_namespace_is_touched(api, tmp_path):
    api.create(job())
    api.create(job(namespace="other"))
    with OperatorProcess(api, tmp_path, DILOCO_WATCH_NAMESPACES="ns,ns2") as operator:
        operator.until_ready()
        until(lambda: settled(api), "children")
        assert "status" not in api.get("dilocojobs", "a", "other")
    objects = [r.path for r in api.requests if re.search("dilocojobs|pods|services", r.path)]
    assert objects
    assert all(re.search(r"/namespaces/ns2?/", path) for path in objects)


def test_a_watched_namespace_that_was_deleted_stops_no_other(api, tmp_path):
    """Its Role went with it: lists and watches are forbidden there, and kopf repeats them without end."""
    forbidden = Fault("GET", "/namespaces/gone/", 403, "is forbidden", times=10**6)
    api.faults.append(forbidden)
    api.create(job())
    with OperatorProcess(api, tmp_path, DILOCO_WATCH_NAMESPACES="gone,ns") as operator:
        operator.until_ready()
        until(lambda: settled(api), "children")
        assert operator.get("/readyz") == (200, "ok, but cannot list jobs in gone\n")
        assert operator.get("/healthz") == (200, "ok\n")
        log = operator.log.read_text()
        assert log.count("cannot list jobs in namespace gone") == 1
        until(
            lambda: any(r.status == 403 and "kopf" in r.agent for r in api.requests),
            "a refused watch",
        )
        assert operator.process.poll() is None
        forbidden.times = 0
        api.create(job("b", namespace="gone"))
        until(lambda: api.get("statefulsets", "b-eu", "gone"), "children there as well")
        until(lambda: operator.get("/readyz") == (200, "ok\n"), "no namespace is named")


def test_with_a_crd_that_lacks_a_field_jobs_are_served_and_readiness_names_the_field(api, tmp_path):
    whole = schema()
    del whole["properties"]["spec"]["properties"]["regions"]["items"]["properties"]["cluster"]
    api.openapi = {"components": {"schemas": {"dev.diloco.v1alpha1.DiLoCoJob": whole}}}
    api.create(job())
    with OperatorProcess(api, tmp_path) as operator:
        operator.until_ready()
        until(lambda: settled(api), "children")

        def names_the_field() -> bool:
            status, text = operator.get("/readyz")
            return status == 200 and "lacks spec.regions.cluster;" in text

        until(names_the_field, "the operator is ready, and names the field")
        # Readiness is set before the line is written.
        until(
            lambda: "lacks spec.regions.cluster;" in operator.log.read_text(), "a line of the log"
        )
        assert operator.log.read_text().count("lacks spec.regions.cluster;") == 1


def test_drift_is_seen_by_the_watches_and_repaired(api, tmp_path):
    api.create(job())
    with OperatorProcess(api, tmp_path) as operator:
        operator.until_ready()
        until(lambda: settled(api), "children")
        quiet(api, 1.5)
        before = children(api)
        api.delete("services", "a-eu")
        api.delete("statefulsets", "a-us")
        api.edit("deployments", "a-syncer", lambda item: item["spec"].update(replicas=5))
        until(lambda: children(api) == before, "the same children again")


def test_a_changed_manifest_is_seen_at_once_and_a_deleted_job_is_forgotten(api, tmp_path):
    api.create(job())
    with OperatorProcess(api, tmp_path) as operator:
        operator.until_ready()
        until(lambda: settled(api), "children")

        def more(item):
            item["spec"]["regions"][0]["learners"] = 4

        api.edit("dilocojobs", "a", more)
        until(lambda: api.get("statefulsets", "a-eu")["spec"]["replicas"] == 4, "four learners")
        api.delete("dilocojobs", "a")
        until(
            lambda: (
                "diloco_operator_jobs{" not in operator.get("/metrics", operator.metrics_port)[1]
            ),
            "no job in the metrics",
        )
        assert children(api) == {}, (
            "the garbage collector deleted them, and they were not created again"
        )
        assert operator.stop() == 0
        assert not [line for line in operator.lines() if line["level"] == "error"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with FakeApi() as api:
        api.create(job())
        with OperatorProcess(api, tmp_path_factory.mktemp("undisturbed")):
            until(lambda: settled(api), "children")
            quiet(api)
            return children(api), conditions(api)


def conditions(api):
    conditions = api.get("dilocojobs", "a")["status"]["conditions"]
    return {
        condition["type"]: (condition["status"], condition["reason"]) for condition in conditions
    }


@pytest.mark.parametrize(
    "point",
    [
        "after-read",
        "after-apply-1",
        "after-apply-5",
        "after-delete",
        "before-status",
        "after-status",
    ],
)
def test_killed_at_any_point_the_next_process_reaches_the_same_state(
    api, tmp_path, undisturbed, point
):
    api.create(job())
    with OperatorProcess(api, tmp_path, DILOCO_FAULTS=f"reconcile:kill={point}") as operator:
        assert operator.process.wait(60) == -9
    with OperatorProcess(api, tmp_path) as operator:
        operator.until_ready()
        until(lambda: settled(api), "children")
        quiet(api, 2.0)
        assert (children(api), conditions(api)) == undisturbed


def refused_pod(api):
    """The container of learner eu/0 reports a permanent failure."""
    owner = api.get("statefulsets", "a-eu")["metadata"]
    end = {"exitCode": 78, "message": '{"reason": "Refused", "message": "another model"}'}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "ns",
            "name": "a-eu-0",
            "labels": owner["labels"],
            "ownerReferences": [{"uid": owner["uid"], "controller": True}],
        },
        "status": {"containerStatuses": [{"name": "main", "state": {"terminated": end}}]},
    }


@pytest.mark.parametrize("point", ["after-delete", "before-status", "after-status"])
def test_a_job_that_failed_stays_failed_wherever_the_operator_is_killed(api, tmp_path, point):
    """The only evidence is its pod, which is deleted with the children."""
    api.create(job(runPolicy={"cleanupPolicy": "All"}, sync={"quorum": 3}))
    with OperatorProcess(api, tmp_path) as operator:
        until(lambda: settled(api), "children and status")
        assert operator.stop() == 0
    api.create(refused_pod(api))
    with OperatorProcess(api, tmp_path, DILOCO_FAULTS=f"reconcile:kill={point}") as operator:
        assert operator.process.wait(60) == -9
    with OperatorProcess(api, tmp_path):
        until(lambda: children(api) == {}, "nothing is left")
        until(lambda: conditions(api)["Failed"] == ("True", "LearnerRefused"), "the reason")
        assert api.all("pods") == []


def test_an_unavailable_api_server_ends_nothing_and_missed_events_are_caught_up(api, tmp_path):
    api.create(job())
    with OperatorProcess(api, tmp_path) as operator:
        operator.until_ready()
        until(lambda: settled(api), "children")
        api.unavailable = True
        api.delete("services", "a-eu")
        api.create(job("b"))
        for _ in range(20):
            assert operator.get("/healthz") == (200, "ok\n")
            assert operator.process.poll() is None
            time.sleep(0.2)
        api.unavailable = False
        until(lambda: api.get("services", "a-eu"), "the Service again")
        until(lambda: api.get("statefulsets", "b-eu"), "the new job's children")


def test_watches_continue_after_410_gone(api, tmp_path):
    with OperatorProcess(api, tmp_path, DILOCO_RESYNC_SECONDS="3600") as operator:
        operator.until_ready()
        until(lambda: sum("watch=true" in r.path for r in api.requests) >= 9, "watches")
        api.forget_history()
        api.create(job())
        until(lambda: settled(api), "children")


def test_a_failing_watch_ends_the_process_so_that_it_restarts(api, tmp_path):
    api.faults.append(Fault("GET", "services.*watch=true", 404, "gone for good"))
    with OperatorProcess(api, tmp_path) as operator:
        assert operator.process.wait(60) == 1
        assert "the watches failed" in operator.log.read_text()


def test_the_list_brings_what_a_watch_misses(api, tmp_path):
    with OperatorProcess(api, tmp_path) as operator:
        operator.until_ready()
        until(lambda: sum("watch=true" in r.path for r in api.requests) >= 9, "watches")
        api.deaf = True
        api.create(job())
        until(lambda: settled(api), "children")


def test_a_token_that_is_refused_for_a_while_ends_nothing(api, tmp_path):
    with OperatorProcess(api, tmp_path, token="secret") as operator:
        operator.until_ready()
        until(lambda: sum("watch=true" in r.path for r in api.requests) >= 9, "watches")
        begun = len(api.requests)
        api.faults.append(Fault("GET", "", 401, "Unauthorized", times=10**6))
        api.forget_history()  # makes the watches come again

        def refusals():
            """Refused requests of kopf: each makes it log in again."""
            asked = api.requests[begun:]
            return len(
                [request for request in asked if request.status == 401 and "kopf" in request.agent]
            )

        until(lambda: refusals() >= 9, "every watch was refused")
        time.sleep(4.0)
        assert refusals() < 40, "tried again without a pause"
        api.faults.clear()
        api.create(job())
        until(lambda: settled(api), "children")
        assert operator.process.poll() is None
        assert "secret" not in operator.log.read_text()


def test_it_waits_for_the_crd_and_then_works(api, tmp_path):
    fault = Fault("GET", "dilocojobs", 404, "the server could not find it", times=10**6)
    api.faults.append(fault)
    api.create(job())
    with OperatorProcess(api, tmp_path) as operator:
        until(
            lambda: "waiting for the API server and the CRD" in operator.log.read_text(),
            "the warning",
        )
        assert operator.get("/healthz")[0] == 200
        assert operator.get("/readyz")[0] == 503
        fault.times = 0
        until(lambda: settled(api), "children")


@pytest.mark.parametrize("state", ["idle", "in a request that hangs", "waiting for the CRD"])
def test_sigterm_ends_it_within_five_seconds(api, tmp_path, state):
    api.create(job())
    if state == "in a request that hangs":
        api.faults.append(Fault("GET", "namespaces/ns/pods", hang_seconds=60))
    if state == "waiting for the CRD":
        api.faults.append(Fault("GET", "dilocojobs", 404, times=10**6))
    with OperatorProcess(api, tmp_path) as operator:
        match state:
            case "idle":
                operator.until_ready()
                until(lambda: settled(api), "children")
            case "in a request that hangs":
                until(lambda: any("ns/pods" in r.path for r in api.requests), "the request")
            case _:
                until(lambda: "waiting for" in operator.log.read_text(), "waiting")
        begun = time.monotonic()
        assert operator.stop() == 0
        assert time.monotonic() - begun < 5.0


def test_of_two_replicas_one_writes_and_the_other_takes_over_when_it_is_killed(api, tmp_path):
    def replica(name):
        variables = {"DILOCO_INSTALLATION": "system/diloco", "DILOCO_POD": name}
        return OperatorProcess(api, tmp_path / name, **variables)

    def leads(operator):
        text = operator.get("/metrics", operator.metrics_port)[1]
        return re.findall(r"^diloco_operator_leader (\d)", text, re.M) == ["1"]

    def holder():
        return api.get("leases", "diloco", "system")["spec"]["holderIdentity"]

    api.create(job())
    with replica("first") as first:
        until(lambda: settled(api), "children and status")
        with replica("second") as second:
            second.until_ready()
            assert (leads(first), leads(second)) == (True, False)
            assert "diloco_operator_jobs{" not in second.get("/metrics", second.metrics_port)[1]
            first.process.kill()
            api.delete("services", "a-eu")
            until(lambda: api.get("services", "a-eu"), "the other replica repairs it")
            assert (holder(), leads(second)) == ("second", True)
            assert api.get("dilocojobs", "a")["status"]["operator"] == "system/diloco"
            assert second.stop() == 0
            assert holder() == "", "released, so that a successor need not wait"


def test_invalid_settings_are_reported_with_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "diloco_operator"],
        env={"PATH": os.environ["PATH"], "DILOCO_WORKER_IMAGE": "w"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 2
    assert "DILOCO_SYNCER_IMAGE" in done.stderr
