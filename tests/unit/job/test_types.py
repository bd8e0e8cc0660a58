"""Types, bounds and defaults of single fields."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_job import names
from diloco_job.manifest_file import apply_set, examine
from diloco_job.types import DiLoCoJob
from diloco_operator.state.stored_job import StoredJob
from diloco_testing.manifests.cases import BROKEN_FIELDS, FITTING_FIELDS
from diloco_testing.manifests.files import load_job

ROOT = Path(__file__).parents[3]
EVERYTHING = ROOT / "tests/golden/everything.yaml"


def minimal() -> dict[str, Any]:
    return {
        "apiVersion": "diloco.dev/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "job"},
        "spec": {
            "steps": 100,
            "learner": {"recipe": {"name": "gpt"}},
            "regions": [{"name": "eu", "learners": 2}, {"name": "us", "learners": 2}],
        },
    }


def problems_with(*changes: tuple[str, Any]) -> list[str]:
    data: Any = minimal()
    for path, value in changes:
        data = apply_set(data, f"{path}={json.dumps(value)}")
    return examine(json.dumps(data))[1]


def test_the_complete_example_is_valid():
    job = load_job(EVERYTHING)
    assert job.spec.learner.recipe is not None
    assert job.spec.learner.recipe.config["data"] == "stdlib"
    assert [(region.name, region.learners) for region in job.spec.regions] == [("eu", 2), ("us", 2)]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/job.yaml")), ids=str)
def test_every_example_is_valid(path):
    assert examine(path.read_text())[1] == []


def test_the_parts_of_manifests_in_the_guides_are_valid():
    text = "".join((ROOT / "docs" / page).read_text() for page in ("operations.md", "learners.md"))
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.+?)```", text, re.S)]
    parts = [block for block in blocks if "kind" not in block]  # of a job's spec
    assert [list(part) for part in parts] == [
        ["regions"], ["learner", "syncer"], ["syncer", "output"], ["syncer"], ["learner"],
    ]  # fmt: skip
    for part in parts:
        data = minimal()
        data["spec"] |= part
        assert examine(json.dumps(data))[1] == []


def test_omitted_fields_have_their_defaults():
    written = load_job(EVERYTHING).model_dump(by_alias=True)["spec"]
    default = DiLoCoJob.model_validate(minimal()).model_dump(by_alias=True)["spec"]
    # What the example sets on purpose; everything else in it is a default, written out.
    assert (written.pop("steps"), default.pop("steps")) == (2000, 100)
    assert (written.pop("seed"), default.pop("seed")) == (7, 0)
    assert (written["syncer"].pop("region"), default["syncer"].pop("region")) == ("eu", "")
    assert (written.pop("evaluation"), default.pop("evaluation")) == (
        {"everySteps": 50, "command": None, "ports": {"health": 8080, "metrics": 9090}},
        None,
    )
    for spec in (written, default):
        del spec["learner"]["recipe"]["config"]
        del spec["learner"]["resources"]
    assert default == written


@pytest.mark.parametrize(("path", "value", "expected"), BROKEN_FIELDS, ids=lambda v: str(v)[:30])
def test_a_field_out_of_bounds_is_the_only_problem_reported(path, value, expected):
    [problem] = problems_with((path, value))
    assert problem.startswith(path)
    assert expected in problem


@pytest.mark.parametrize(("path", "value"), FITTING_FIELDS, ids=lambda v: str(v)[:30])
def test_a_field_at_its_bound_is_valid(path, value):
    assert problems_with((path, value)) == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("spec.sync.quorom", "did you mean quorum?"),
        ("spec.sync.error_feedback", "the fields here are fragments, interval"),
        ("spec.regions[0].learner", "did you mean learners?"),
        ("spec.runpolicy", "did you mean runPolicy?"),
        ("spec.run_policy", "did you mean runPolicy?"),
        ("metadata.nme", "did you mean name"),
    ],
)
def test_an_unknown_field_suggests_similar_names(path, expected):
    [problem] = problems_with((path, 1))
    assert problem.startswith(f"{path}: unknown field; ")
    assert expected in problem


@pytest.mark.parametrize("field", ["apiVersion", "kind", "metadata", "spec"])
def test_every_required_field_is_reported_when_missing(field):
    data = minimal()
    del data[field]
    assert examine(json.dumps(data))[1] == [f"{field}: missing; it is required"]


def test_a_job_read_from_a_cluster_is_valid():
    data = minimal()
    data["metadata"] |= {"uid": "x", "resourceVersion": "1", "managedFields": [{"manager": "k"}]}
    data["status"] = {"step": 3}
    assert examine(json.dumps(data))[1] == []


@pytest.mark.parametrize(
    "text",
    [
        "0x7f000001.example:80",
        "0x7g:1",
        "x7f:1",
        "syncer.0xcafe:1",
        "7.a.0x1:1",
        "syncer:1",
        "a.b-c.example:65535",
        "10.0.0.1:7070",
        "[::1]:7070",
        "[fe80::1.2.3.4]:1",
    ],
)
def test_an_endpoint_is_a_host_and_a_port(text):
    assert names.is_endpoint(text)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True), ("169.254.169.254", True), ("0.0.0.0", True), ("localhost", True),
        ("a.LOCALHOST", True), ("[::1]", True), ("[::]", True), ("[fe80::1]", True),
        ("10.0.0.1", False), ("192.168.0.1", False), ("[fd00::1]", False), ("syncer", False),
        ("localhost.example", False), ("notlocalhost", False),
    ],
)  # fmt: skip
def test_b06_an_address_that_each_machine_has_for_itself_is_no_endpoint_of_a_cluster(host, local):
    assert names.is_local_endpoint(f"{host}:7070") == local


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", ":1", "host:0", "host:65536", "host:01", "host:1\n", "ho st:1",
        "-a:1", "a-:1", "a..b:1", "300.1.1.1:1", "1.2.3:1", "::1:1", "[::g]:1", "[]:1",
        "0x7f000001:80", "0X7F.1:80", "169.254.0xa9fe:80", "127.0x:80", "0x:1",
        "0x7f.0.0.0x1:80", "syncer.1:80",
        "http://a:1", "a:1/x", f"{'a' * 64}:1", f"{'a.' * 127}aa:1",
    ],
)  # fmt: skip
def test_anything_else_is_not_an_endpoint(text):
    assert not names.is_endpoint(text)


@pytest.mark.parametrize(
    "text",
    ["s3://abc", "s3://a.b-c/", "s3://abc/d/e.f/", "gs://a_b/c=1", "az://abc/d", "file:///a", "file:///a/b-c/"],
)  # fmt: skip
def test_objects_are_below_a_bucket_a_container_or_a_directory(text):
    assert names.is_objects_url(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "s3://", "s3://ab", "S3://abc", "s3://ABC", "s3:///abc", "s3://abc//d", "s3://abc/.d", "s3://abc/..",
        "s3://abc/d?versionId=1", "s3://abc/d#e", "s3://abc/d e", "s3://abc/ü", "s3://key@abc", "s3://abc:80/d",
        "http://abc/d", "file://a", "file:///", "file:///a/../b", "/a", "a", "s3://abc\n", f"s3://abc/{'d' * 510}",
    ],
)  # fmt: skip
def test_anything_else_is_not_a_place_for_objects(text):
    assert not names.is_objects_url(text)


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("place", ["learner.recipe.config", "learner.podTemplate.spec"])
def test_content_that_is_passed_through_has_a_maximum_depth(place):
    """An API server stores 10 000 levels, which exceeds the recursion limit."""

    def problems(levels):
        raw = minimal()
        *above, last = place.split(".")
        inner = raw["spec"]
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = {"a": nested(levels - 1)}
        return list(StoredJob.parse(raw).problems)

    assert problems(64) == []
    for levels in (65, 5000):
        [problem] = problems(levels)
        assert problem == f"spec.{place}: is nested deeper than 64 levels, the maximum"
