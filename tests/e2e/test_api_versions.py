"""
A second API version on a real API server, with a made-up v1beta1 (docs/adr/0018): which conversion without a webhook
is safe, and how a version goes.

Needs etcd and kube-apiserver (or hyperkube); nothing runs but those two.
"""

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from diloco_job.crd import crd
from diloco_operator.state.served_schema import missing_fields
from diloco_operator.state.stored_job import StoredJob
from diloco_testing.kubernetes.api_server import CRDS, JOBS, ApiServer, Refusal, running
from diloco_testing.manifests.cases import JOB

Json = dict[str, Any]

NAME = crd()["metadata"]["name"]
BETA_JOBS = JOBS.replace("v1alpha1", "v1beta1")
OLD, NEW = "v1alpha1", "v1beta1"
APPLY = "application/apply-patch+yaml"


@pytest.fixture(scope="module")
def server(programs, tmp_path_factory) -> Iterator[ApiServer]:
    with running(programs, tmp_path_factory.mktemp("versions")) as started:
        yield started


@pytest.fixture
def api(server) -> Iterator[ApiServer]:
    """The API server knows DiLoCoJob in v1alpha1 alone, with one job in it."""
    server.install(crd())
    made = server.create(yaml.safe_load(JOB))
    assert not isinstance(made, Refusal), made
    yield server
    server.send("DELETE", f"{CRDS}/{NAME}")
    _until(lambda: server.send("GET", f"{CRDS}/{NAME}")[0] == 404, "the CRD is deleted")


def versions(
    *, new_field_in: tuple[str, ...] = (), storage: str = OLD, served: bool = True
) -> Json:
    """The CRD with v1beta1, whose schema is that of v1alpha1 with one more field in some versions."""
    whole = crd()
    [old] = whole["spec"]["versions"]
    new = copy.deepcopy(old) | {"name": NEW}
    old["served"] = served
    for version in (old, new):
        version["storage"] = version["name"] == storage
        if version["name"] in new_field_in:
            spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
            spec["properties"]["newThing"] = {"type": "integer", "format": "int32", "default": 1}
    whole["spec"]["versions"] = [old, new]
    return whole


def upgrade(api: ApiServer, changed: Json, until_served: str = BETA_JOBS) -> None:
    code, answer = api.send(
        "PATCH", f"{CRDS}/{NAME}", changed, kind=APPLY, fieldManager="chart", force="true"
    )
    assert code == 200, answer
    _until(lambda: api.send("GET", until_served)[0] == 200, f"{until_served} is served")


def job(api: ApiServer, jobs: str = JOBS) -> Json:
    code, answer = api.send("GET", f"{jobs}/job")
    assert code == 200, answer
    return answer


def put(api: ApiServer, jobs: str, changed: Json) -> Json:
    code, answer = api.send("PUT", f"{jobs}/job", changed)
    assert code == 200, answer
    return answer


def write_status(api: ApiServer) -> None:
    """As the operator, which knows v1alpha1."""
    body = {
        "apiVersion": f"diloco.dev/{OLD}",
        "kind": "DiLoCoJob",
        "metadata": {"name": "job"},
        "status": {"state": "Training"},
    }
    code, answer = api.send(
        "PATCH", f"{JOBS}/job/status", body, kind=APPLY, fieldManager="operator", force="true"
    )
    assert code == 200, answer


def test_with_one_schema_for_both_versions_nothing_is_lost_in_either_direction(api):
    before = job(api)
    for storage in (OLD, NEW, OLD):
        upgrade(api, versions(new_field_in=(OLD, NEW), storage=storage))
        beta = job(api, BETA_JOBS)
        assert beta["apiVersion"] == f"diloco.dev/{NEW}"
        beta["spec"]["newThing"] = 7
        put(api, BETA_JOBS, beta)
        write_status(api)
        alpha = job(api)
        assert alpha["spec"] == {**before["spec"], "newThing": 7}
        put(api, JOBS, alpha)
        assert job(api, BETA_JOBS)["spec"]["newThing"] == 7


def test_an_operator_of_the_old_version_runs_such_a_job_and_names_what_it_ignores(api):
    before = StoredJob.parse(job(api)).job
    assert before is not None
    upgrade(api, versions(new_field_in=(OLD, NEW), storage=NEW))
    _until(lambda: "newThing" in job(api)["spec"], "the schema's default is there")
    parsed = StoredJob.parse(job(api))
    assert parsed.job == before
    assert parsed.unknown_fields == ("spec.newThing",)


def test_a_field_that_one_version_lacks_is_lost_at_the_operators_next_status_write(api):
    """Why each version has the fields of all versions, as long as no webhook converts."""
    upgrade(api, versions(new_field_in=(NEW,), storage=NEW))
    beta = job(api, BETA_JOBS)
    beta["spec"]["newThing"] = 7
    put(api, BETA_JOBS, beta)
    assert job(api, BETA_JOBS)["spec"]["newThing"] == 7
    assert "newThing" not in job(api)["spec"]
    write_status(api)
    assert job(api, BETA_JOBS)["spec"]["newThing"] == 1, "the default, not what the user wrote"


def without_rules(value: Any) -> Any:
    """The schema without its CEL rules, which name fields."""
    if isinstance(value, list):
        return [without_rules(item) for item in value]
    if isinstance(value, dict):
        return {k: without_rules(v) for k, v in value.items() if k != "x-kubernetes-validations"}
    return value


def test_the_fields_that_an_older_crd_lacks_are_read_from_the_api_server(api):
    def missing() -> tuple[str, ...] | None:
        code, document = api.send("GET", f"/openapi/v3/apis/diloco.dev/{OLD}")
        return missing_fields(document) if code == 200 else None

    _until(lambda: missing() == (), "the CRD of this version lacks nothing")
    older = api.send("GET", f"{CRDS}/{NAME}")[1]
    whole = without_rules(older["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    older["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = whole
    fields = whole["properties"]["spec"]["properties"]
    del fields["learner"]["properties"]["storage"]
    del fields["regions"]["items"]["properties"]["cluster"]
    code, answer = api.send("PUT", f"{CRDS}/{NAME}", older)
    assert code == 200, answer
    expected = {"spec.learner.storage", "spec.regions.cluster"}
    _until(lambda: set(missing() or ()) == expected, "the fields that it lacks")


def test_the_old_version_goes_after_every_object_was_written_in_the_new_one(api):
    upgrade(api, versions(storage=NEW))
    definition = api.send("GET", f"{CRDS}/{NAME}")[1]
    assert set(definition["status"]["storedVersions"]) == {OLD, NEW}
    only_new = versions(storage=NEW)
    only_new["spec"]["versions"] = only_new["spec"]["versions"][1:]
    code, answer = api.send(
        "PATCH", f"{CRDS}/{NAME}", only_new, kind=APPLY, fieldManager="chart", force="true"
    )
    assert code == 422, "the server keeps a version in which objects may be stored"
    assert "storedVersions" in answer["message"]
    spec = job(api)["spec"]
    # An equal object is written again if it is stored in another version.
    put(api, BETA_JOBS, job(api, BETA_JOBS))
    definition["status"]["storedVersions"] = [NEW]
    code, answer = api.send("PUT", f"{CRDS}/{NAME}/status", definition)
    assert code == 200, answer
    upgrade(api, only_new)
    _until(lambda: api.send("GET", JOBS)[0] == 404, "v1alpha1 is gone")
    assert job(api, BETA_JOBS)["spec"] == spec


def _until(done: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, f"not after 30 s: {what}"
        time.sleep(0.1)
