"""Types, bounds and defaults of single fields."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_operator import names
from diloco_operator.api import DiLoCoJob
from diloco_operator.decide import read_job
from diloco_operator.manifest import apply_set, examine, load_job
from diloco_testing.manifest_cases import BROKEN_FIELDS, FITTING_FIELDS

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


def test_the_example_of_the_specification_loads_word_for_word():
    job = load_job(EVERYTHING)
    assert job.spec.learner.recipe is not None
    assert job.spec.learner.recipe.config["data"] == "stdlib"
    assert [(one.name, one.learners) for one in job.spec.regions] == [("eu", 2), ("us", 2)]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/job.yaml")), ids=str)
def test_every_example_is_a_good_manifest(path):
    assert examine(path)[1] == []


def test_the_manifests_in_the_operations_guide_are_good():
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = [yaml.safe_load(one) for one in re.findall(r"```yaml\n(.+?)```", text, re.S)]
    parts = [one for one in blocks if "kind" not in one]  # of a job's spec
    assert [list(one) for one in parts] == [["regions"], ["learner"]]
    for part in parts:
        data = minimal()
        data["spec"] |= part
        assert examine(json.dumps(data))[1] == []


def test_what_is_left_out_has_the_default_of_the_specification():
    written = load_job(EVERYTHING).model_dump(by_alias=True)["spec"]
    default = DiLoCoJob.model_validate(minimal()).model_dump(by_alias=True)["spec"]
    # What the example sets on purpose; everything else in it is a default, written out.
    assert (written.pop("steps"), default.pop("steps")) == (2000, 100)
    assert (written.pop("seed"), default.pop("seed")) == (7, 0)
    assert (written["syncer"].pop("region"), default["syncer"].pop("region")) == ("eu", "")
    assert (written.pop("evaluation"), default.pop("evaluation")) == (
        {"everySteps": 50, "command": None},
        None,
    )
    for spec in (written, default):
        del spec["learner"]["recipe"]["config"]
        del spec["learner"]["resources"]
    assert default == written


@pytest.mark.parametrize(("path", "value", "words"), BROKEN_FIELDS, ids=lambda v: str(v)[:30])
def test_a_field_out_of_bounds_is_refused_alone_and_in_words(path, value, words):
    said = problems_with((path, value))
    assert len(said) == 1
    assert said[0].startswith(path)
    assert words in said[0]


@pytest.mark.parametrize(("path", "value"), FITTING_FIELDS, ids=lambda v: str(v)[:30])
def test_a_field_at_its_bound_is_good(path, value):
    assert problems_with((path, value)) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("spec.sync.quorom", "did you mean quorum?"),
        ("spec.sync.error_feedback", "the fields here are fragments, interval"),
        ("spec.regions[0].learner", "did you mean learners?"),
        ("spec.runpolicy", "did you mean runPolicy?"),
        ("spec.run_policy", "did you mean runPolicy?"),
        ("metadata.nme", "did you mean name"),
    ],
)
def test_an_unknown_field_names_the_close_ones(path, words):
    [said] = problems_with((path, 1))
    assert said.startswith(f"{path}: unknown field; ")
    assert words in said


@pytest.mark.parametrize("field", ["apiVersion", "kind", "metadata", "spec"])
def test_every_required_part_is_asked_for(field):
    data = minimal()
    del data[field]
    assert examine(json.dumps(data))[1] == [f"{field}: missing; it is required"]


def test_a_job_read_back_from_a_cluster_is_good():
    data = minimal()
    data["metadata"] |= {"uid": "x", "resourceVersion": "1", "managedFields": [{"manager": "k"}]}
    data["status"] = {"step": 3}
    assert examine(json.dumps(data))[1] == []


@pytest.mark.parametrize(
    "text",
    ["syncer:1", "a.b-c.example:65535", "10.0.0.1:7070", "[::1]:7070", "[fe80::1.2.3.4]:1"],
)
def test_an_endpoint_is_a_host_and_a_port(text):
    assert names.is_endpoint(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", ":1", "host:0", "host:65536", "host:01", "host:1\n", "ho st:1",
        "-a:1", "a-:1", "a..b:1", "300.1.1.1:1", "1.2.3:1", "::1:1", "[::g]:1", "[]:1",
        "http://a:1", "a:1/x", f"{'a' * 64}:1", f"{'a.' * 127}aa:1",
    ],
)  # fmt: skip
def test_anything_else_is_no_endpoint(text):
    assert not names.is_endpoint(text)


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("place", ["learner.recipe.config", "learner.podTemplate.spec"])
def test_what_is_passed_through_may_be_nested_so_deep_and_no_deeper(place):
    """An API server stores 10 000 levels; whoever walks down there by recursion falls."""

    def problems(levels):
        raw = minimal()
        *above, last = place.split(".")
        inner = raw["spec"]
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = {"a": nested(levels - 1)}
        return read_job(raw)[1]

    assert problems(64) == []
    for levels in (65, 5000):
        [said] = problems(levels)
        assert said == f"spec.{place}: is nested deeper than 64 levels; that is the most"
