"""
The CRD on a real API server: it refuses every broken rule of the manifest with the message of
`diloco validate`, and the operator can read everything that it accepts.

Needs etcd and kube-apiserver (or hyperkube); nothing runs but those two.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diloco_job.crd import crd
from diloco_job.manifest_file import apply_set, examine
from diloco_job.rules import FIXED, transition_problems
from diloco_testing.kubernetes.api_server import CRDS, JOBS, ApiServer, Refusal, running
from diloco_testing.manifests.cases import (
    ALLOWED_CHANGES,
    BROKEN_FIELDS,
    BROKEN_RULES,
    FITTING_FIELDS,
    JOB,
    KEPT_RULES,
    REFUSED_CHANGES,
)
from diloco_testing.manifests.files import load_job
from diloco_testing.manifests.fuzz import CHANGE, HOSTILE, NODES, PLACES, edges, put

ROOT = Path(__file__).parents[2]

Json = dict[str, Any]


@pytest.fixture(scope="module")
def api(programs, tmp_path_factory) -> Iterator[ApiServer]:
    """An API server that knows DiLoCoJob."""
    with running(programs, tmp_path_factory.mktemp("api")) as server:
        server.install(crd())
        yield server


@pytest.fixture
def stored(api) -> Iterator[Json]:
    """The job of the tables, as the server has it."""
    made = api.create(job_with())
    assert not isinstance(made, Refusal), made
    yield made
    api.delete(made["metadata"]["name"])


def job_with(*sets: str) -> Json:
    data: Any = yaml.safe_load(JOB)
    for change in sets:
        data = apply_set(data, change)
    return dict(data)


def refused(answer: object) -> Refusal:
    assert isinstance(answer, Refusal), f"accepted: {answer}"
    return answer


# ------------------------------------------------------------------------------ rules


@pytest.mark.parametrize(("sets", "message"), BROKEN_RULES, ids=lambda v: str(v)[:40])
def test_the_server_refuses_a_broken_rule_with_the_message_of_validate(api, sets, message):
    manifest = job_with(*sets)
    [expected] = examine(json.dumps(manifest))[1]
    assert expected.startswith(message)
    problems = refused(api.create(manifest, dry_run=True)).problems
    if "is not an endpoint" in expected:
        # The pattern is the schema's; the message is the server's own.
        assert problems[0].startswith("spec.syncer.endpoint: ")
    else:
        assert problems == [expected]


@pytest.mark.parametrize("sets", KEPT_RULES, ids=str)
def test_the_server_keeps_a_rule_at_its_edge(api, sets):
    assert not isinstance(api.create(job_with(*sets), dry_run=True), Refusal)


def test_rules_of_many_regions_have_the_same_messages(api):
    regions = [{"name": f"r{'x' * (n % 23)}{n}"[:24], "learners": 1} for n in range(64)]
    manifest = job_with("spec.syncer.region=nowhere", "spec.sync.quorum=65")
    manifest["spec"]["regions"] = regions
    manifest["metadata"]["name"] = "j" * 40
    expected = examine(json.dumps(manifest))[1]
    assert len(expected) == 3
    assert sorted(refused(api.create(manifest, dry_run=True)).problems) == sorted(expected)


def test_everything_wrong_between_fields_is_reported_at_once(api):
    manifest = job_with("spec.sync.fragments=30", "spec.sync.quorum=9", "spec.tls.mode=Secret")
    expected = examine(json.dumps(manifest))[1]
    assert len(expected) == 3
    assert sorted(refused(api.create(manifest, dry_run=True)).problems) == sorted(expected)


LEAF_MESSAGES = (
    "is not more than",
    "is not less than 1",
    "is reserved for",
)


@pytest.mark.parametrize(("path", "value", "message"), BROKEN_FIELDS, ids=lambda v: str(v)[:30])
def test_the_server_refuses_a_field_out_of_bounds_at_its_path(api, path, value, message):
    manifest = job_with(f"{path}={json.dumps(value)}")
    refusal = refused(api.create(manifest, dry_run=True))
    if message == "unknown field":
        assert f'unknown field "{path}.' in refusal.message
        return
    # A field that is missing is reported at itself, an entry at its index.
    assert any(field.startswith(path) for field, _ in refusal.causes), refusal.causes
    if any(part in message for part in LEAF_MESSAGES):
        assert refusal.problems == examine(json.dumps(manifest))[1]


@pytest.mark.parametrize(("path", "value"), FITTING_FIELDS, ids=lambda v: str(v)[:30])
def test_the_server_accepts_a_field_at_its_bound(api, path, value):
    manifest = job_with(f"{path}={json.dumps(value)}")
    made = api.create(manifest, dry_run=True)
    assert not isinstance(made, Refusal), made
    assert examine(json.dumps(made))[1] == []


ENDPOINTS = {
    "syncer:1": True,
    "a.b-c.example:65535": True,
    "10.0.0.1:7070": True,
    "[fd00::1]:7070": True,
    "[::1]:7070": False,
    "[fd00::1.2.3.4]:1": True,
    f"{'a' * 63}.{'b' * 63}.{'c' * 63}.{'d' * 61}:65535": True,
    f"{'a' * 63}.{'b' * 63}.{'c' * 63}.{'d' * 62}:1": False,
    "host": False,
    "host:0": False,
    "host:65536": False,
    "host:99999": False,
    "300.1.1.1:1": False,
    "1.2.3:1": False,
    "1:1": False,
    "01.2.3.4:1": False,
    "0x7f000001:80": False,
    "169.254.0XA9FE:80": False,
    "0x.a:80": True,
    "syncer.0xcafe:80": True,
    "::1:1": False,
    "[::g]:1": False,
    "[1.2.3.4]:1": False,
    "[::ffff:1.2.3.4]:1": False,
    "[1::2::3]:1": False,
    "[:]:1": False,
    "http://a:1": False,
}


@pytest.mark.parametrize(("text", "good"), ENDPOINTS.items(), ids=str)
def test_both_validators_agree_on_endpoints(api, text, good):
    manifest = job_with("spec.tls={mode: Secret, secretName: s}")
    manifest["spec"]["syncer"] = {"endpoint": text}
    assert (examine(json.dumps(manifest))[1] == []) is good
    assert (not isinstance(api.create(manifest, dry_run=True), Refusal)) is good


# ---------------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("change", "message"),
    [row for row in REFUSED_CHANGES if not row[0].startswith("metadata.name")],
    ids=lambda v: str(v)[:40],
)
def test_the_server_refuses_a_change_with_the_message_of_validate(api, stored, change, message):
    del stored
    manifest = job_with(change)
    expected = transition_problems(load_job(JOB), load_job(JOB, [change]))
    assert expected[0].startswith(message)
    assert refused(api.replace(manifest)).problems == expected
    # What another manager applies is laid over the stored regions, and 8.0 is read as 8.
    if not change.startswith("spec.regions") and "8.0" not in change:
        assert refused(api.apply(manifest)).problems == expected


OTHER_CHANGES = {
    "spec.learner.command": (
        ["spec.learner={command: [python, a.py]}"],
        ["spec.learner={command: [python, b.py]}"],
    ),
    "spec.learner.podsPerLearner": (
        ["spec.learner={command: [python, a.py]}"],
        ["spec.learner={command: [python, a.py], podsPerLearner: 2}"],
    ),
    "spec.learner.recipe": ([], ["spec.learner={command: [python, a.py]}"]),
    "spec.tls.mode": ([], ["spec.tls={mode: Secret, secretName: s}"]),
    "spec.syncer.storage.size": (["spec.syncer.storage.size=11"], ["spec.syncer.storage.size=10"]),
    "spec.learner.storage": (["spec.learner.storage={}"], []),
    "spec.learner.storage.size": (
        ["spec.learner.storage={}"],
        ["spec.learner.storage.size=20Gi"],
    ),
    "spec.learner.storage.storageClassName": (
        ["spec.learner.storage={}"],
        ["spec.learner.storage.storageClassName=fast"],
    ),
    "spec.learner.storage.accessMode": (
        ["spec.learner.storage={}"],
        ["spec.learner.storage.accessMode=ReadWriteMany"],
    ),
}


def test_the_server_accepts_another_retention_of_the_learners_volumes(api):
    assert not isinstance(api.create(job_with("spec.learner.storage={}")), Refusal)
    try:
        kept = job_with("spec.learner.storage={whenDeleted: Retain, whenScaled: Delete}")
        assert not isinstance(api.replace(kept), Refusal)
    finally:
        api.delete("job")


@pytest.mark.parametrize("path", OTHER_CHANGES)
def test_the_server_refuses_what_takes_two_fields_to_change(api, path):
    before, after = OTHER_CHANGES[path]
    assert not isinstance(api.create(job_with(*before)), Refusal)
    try:
        expected = transition_problems(load_job(JOB, before), load_job(JOB, after))
        assert path in {problem.partition(":")[0] for problem in expected}
        assert refused(api.replace(job_with(*after))).problems == expected
    finally:
        api.delete("job")


def test_every_fixed_field_was_tried_on_the_server():
    tried = {message.partition(":")[0] for _, message in REFUSED_CHANGES} | OTHER_CHANGES.keys()
    assert set(FIXED) <= tried


@pytest.mark.parametrize(
    "value",
    [
        '{"x": {"b": 1, "c": [1]}, "y": 2}',
        '{"a": {"b": 1, "c": [2]}, "d": 2}',
        '{"a": {"b": 1, "c": [1]}}',
        '{"a": {"b": 1, "c": [1]}, "d": null}',
    ],
)
def test_settings_deep_inside_may_not_change_either(api, value):
    """The comparison that CEL gets wrong when the fields are unknown to it."""
    first = job_with('spec.learner.recipe.config={"a": {"b": 1, "c": [1]}, "d": 2}')
    assert not isinstance(api.create(first), Refusal)
    try:
        other = job_with(f"spec.learner.recipe.config={value}")
        assert refused(api.replace(other)).problems == [
            "spec.learner.recipe: cannot change after the job is created"
        ]
        assert not isinstance(api.replace(first), Refusal)
    finally:
        api.delete("job")


def test_the_same_manifest_again_is_no_change_whatever_its_numbers_look_like(api):
    manifest = job_with("spec.learner.recipe.config={a: 8.0, b: 1e3, c: 0.1, d: 1e30, e: [2.0]}")
    try:
        assert api.apply(manifest) is None
        assert api.apply(manifest) is None
        assert api.apply(manifest, manager="another-manager") is None
    finally:
        api.delete("job")


@pytest.mark.parametrize("change", ALLOWED_CHANGES)
def test_the_server_accepts_every_other_change(api, stored, change):
    del stored
    assert not isinstance(api.replace(job_with(change)), Refusal)


def test_a_region_can_be_scaled_by_another_manager(api, stored):
    name = stored["metadata"]["name"]
    part = {key: stored[key] for key in ("apiVersion", "kind")}
    part |= {
        "metadata": {"name": name},
        "spec": {"steps": 100, "regions": [{"name": "us", "learners": 7}]},
    }
    assert api.apply(part, manager="scaler") is None
    regions = api.send("GET", f"{JOBS}/{name}")[1]["spec"]["regions"]
    assert {region["name"]: region["learners"] for region in regions} == {"eu": 2, "us": 7}


# --------------------------------------------------------------- good manifests, status

GOOD = [ROOT / "tests/golden/everything.yaml", *sorted((ROOT / "examples").glob("*/job.yaml"))]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.parent.name)
def test_every_example_is_accepted_and_read_back_unchanged(api, path):
    manifest = yaml.safe_load(path.read_text())
    made = api.create(manifest, dry_run=True)
    assert not isinstance(made, Refusal), made
    job, problems = examine(json.dumps(made))
    assert problems == []
    assert job is not None
    assert job.spec == load_job(path).spec


def test_null_means_left_out_where_a_field_may_be_left_out(api):
    nulls = job_with(
        "spec.runPolicy={ttlSecondsAfterFinished: null, activeDeadlineSeconds: null}",
        "spec.runPolicy.learnerRestartLimit=null",
        "spec.evaluation=null",
        "spec.learner.command=null",
        "spec.tls={issuerRef: null}",
    )
    assert not isinstance(api.create(nulls, dry_run=True), Refusal)
    try:
        assert api.apply(nulls) is None
        read = api.send("GET", f"{JOBS}/job")[1]
        assert examine(json.dumps(read))[1] == []
    finally:
        api.delete("job")


def test_the_stored_job_shows_its_defaults_and_no_empty_ones(stored):
    spec = stored["spec"]
    assert spec["sync"]["outer"] == {"learningRate": "0.7", "momentum": "0.5", "nesterov": True}
    assert spec["runPolicy"] == {"suspend": False, "cleanupPolicy": "Running", "managedBy": ""}
    assert spec["regions"][0] == {"name": "eu", "learners": 2, "cluster": ""}
    assert spec["learner"]["ports"] == {
        "health": 8080,
        "metrics": 9090,
        "peer": 7071,
        "rendezvous": 29500,
    }


STATUS = {
    "observedGeneration": 1,
    "state": "Training",
    "step": 1200,
    "steps": 2000,
    "progress": "1200/2000",
    "tokens": 5_000_000_000_000,
    "epoch": 1,
    "specHash": "abc",
    "syncer": {"endpoint": "job-syncer:7070", "region": "eu"},
    "learners": {"desired": 4, "ready": 3, "training": 3, "summary": "3/4"},
    "regions": [{"name": "eu", "desired": 2, "ready": 2, "training": 2, "restarts": 1}],
    "startTime": "2026-11-21T10:00:00Z",
    "conditions": [
        {
            "type": "QuorumMet",
            "status": "True",
            "reason": "Enough",
            "message": "3 of 1",
            "lastTransitionTime": "2026-11-21T10:00:00Z",
            "observedGeneration": 1,
        }
    ],
}


def test_a_status_is_kept_whole_and_printed(api, stored):
    path = f"{JOBS}/{stored['metadata']['name']}"
    code, answer = api.send(
        "PATCH",
        f"{path}/status",
        {key: stored[key] for key in ("apiVersion", "kind")} | {"status": STATUS},
        kind="application/apply-patch+yaml",
        fieldManager="operator-status",
        fieldValidation="Strict",
    )
    assert code == 200, answer
    assert answer["status"] == STATUS
    table = api.send("GET", path, accept="application/json;as=Table;v=v1;g=meta.k8s.io")[1]
    columns = [column["name"] for column in table["columnDefinitions"]]
    cells = dict(zip(columns, table["rows"][0]["cells"], strict=True))
    assert cells | {"Age": ""} == {
        "Name": "job",
        "State": "Training",
        "Step": "1200/2000",
        "Learners": "3/4",
        "Quorum": "True",
        "Region": "eu",
        "Endpoint": "job-syncer:7070",
        "Tokens": 5_000_000_000_000,
        "Age": "",
    }
    wide = [column["name"] for column in table["columnDefinitions"] if column["priority"]]
    assert wide == ["Region", "Endpoint", "Tokens"]


def test_the_crd_is_found_by_its_short_name_and_category(api):
    resources = api.send("GET", JOBS.partition("/namespaces")[0])[1]["resources"]
    [jobs] = [resource for resource in resources if resource["name"] == "dilocojobs"]
    assert jobs["shortNames"] == ["dlj"]
    assert jobs["categories"] == ["all"]
    assert {resource["name"] for resource in resources} == {"dilocojobs", "dilocojobs/status"}


def test_the_crd_can_be_applied_over_itself(api):
    """An upgrade of the chart does so each time."""
    code, answer = api.send(
        "PATCH",
        f"{CRDS}/{crd()['metadata']['name']}",
        crd(),
        kind="application/apply-patch+yaml",
        fieldManager="chart",
        force="true",
        fieldValidation="Strict",
    )
    assert code == 200, answer


# -------------------------------------------------------------------------------- fuzz


def agree(api: ApiServer, manifest: Json) -> bool:
    """
    Whether the server accepts a manifest; that both validators agree is checked.

    What `diloco validate` finds good, the server accepts; what the server accepts, the operator can
    read, so that it never meets a job that it cannot report on.
    """
    problems = examine(json.dumps(manifest))[1]
    answer = api.create(manifest, dry_run=True)
    if isinstance(answer, Refusal):
        assert answer.code in (400, 422), answer
        assert problems, f"validate accepts it, the server refuses it: {answer.message}"
        return False
    assert examine(json.dumps(answer))[1] == [], "the server stores what validate cannot read"
    # What validate refuses and a server takes: null, which the server replaces by the default.
    for problem in problems:
        assert "is empty; give it a value or leave it out" in problem, problem
    return True


def job_with_everything() -> Json:
    return job_with(
        "spec.learner.env=[{name: A}]",
        "spec.learner.resources.claims=[{name: a}]",
        "spec.evaluation={everySteps: 5, command: [x]}",
        "spec.tls={mode: Secret, secretName: s, issuerRef: {name: a}}",
        "spec.sync={fragments: 1, overlap: 1}",
    )


REQUIRE_MORE = {
    ("spec",),
    ("spec", "regions"),
    ("spec", "learner"),
    ("spec", "learner", "recipe"),
}
"""Too much is required inside for one of the tried values to be good."""


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_both_judges_draw_the_line_of_a_field_at_the_same_value(api, place):
    accepted = 0
    for value in [*edges(NODES[place]), *HOSTILE]:
        manifest = job_with_everything()
        if place == ("spec", "learner", "command"):
            del manifest["spec"]["learner"]["recipe"]
        put(manifest, place, copy.deepcopy(value))
        accepted += agree(api, manifest)
    if place not in REQUIRE_MORE:
        assert accepted, "no value was good: the manifest around it must be bad"


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(CHANGE, min_size=1, max_size=4))
@example([(("spec", "sync"), None)])
@example([(("spec", "regions"), [])])
def test_both_judges_agree_whatever_is_written(api, changes):
    manifest = job_with()
    for place, value in changes:
        put(manifest, place, copy.deepcopy(value))
    agree(api, manifest)
