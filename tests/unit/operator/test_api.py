"""Types, bounds and defaults of single fields."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_operator import names
from diloco_operator.api import DiLoCoJob
from diloco_operator.manifest import apply_set, examine, load_job

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


BROKEN_FIELDS = [
    ("spec.steps", 0, "0 is less than 1, the least allowed"),
    ("spec.steps", 10**9 + 1, "1000000001 is more than 1000000000, the most allowed"),
    ("spec.steps", "5", '"5" is text; write 5 without quotes'),
    ("spec.steps", True, "true is not an integer"),
    ("spec.steps", 1.5, "1.5 is not an integer"),
    ("spec.steps", None, "is empty; give it a value or leave it out"),
    ("spec.seed", -1, "-1 is less than 0, the least allowed"),
    ("spec.seed", 2**31, "2147483648 is more than 2147483647, the most allowed"),
    ("spec.sync.fragments", 0, "0 is less than 1, the least allowed"),
    ("spec.sync.fragments", 1025, "1025 is more than 1024, the most allowed"),
    ("spec.sync.interval", 10**9 + 1, "1000000001 is more than 1000000000, the most allowed"),
    ("spec.sync.overlap", 0, "0 is less than 1, the least allowed"),
    ("spec.sync.quorum", 0, "0 is less than 1, the least allowed"),
    ("spec.sync.grace.maxSteps", 1, '1 is a number; write it as a quoted decimal: "1"'),
    (
        "spec.sync.grace.maxSteps",
        1e-5,
        '1e-05 is a number; write it as a quoted decimal: "0.00001"',
    ),
    ("spec.sync.grace.maxSteps", "-1", '"-1" is no decimal'),
    ("spec.sync.grace.safety", "1", "1 is not less than 1"),
    ("spec.sync.grace.safety", "0.99999999999999999999", "is no decimal"),
    ("spec.sync.merge", "radial", '"radial" is none of Radial or Average'),
    ("spec.sync.averageParameters", "x", '"x" is not a list'),
    ("spec.sync.outer.learningRate", "0", "0 is not more than 0"),
    ("spec.sync.outer.learningRate", "0.000000000", "0.000000000 is not more than 0"),
    ("spec.sync.outer.learningRate", "00.7", '"00.7" is no decimal'),
    ("spec.sync.outer.learningRate", "1e-3", '"1e-3" is no decimal'),
    ("spec.sync.outer.learningRate", "0.7\n", "is no decimal"),
    ("spec.sync.outer.momentum", "1.0", "1.0 is not less than 1"),
    ("spec.sync.outer.nesterov", 1, "1 is neither true nor false"),
    ("spec.sync.wire.up", "int8", '"int8" is none of FP32, BF16, Int8 or Int4'),
    ("spec.sync.wire.down", "Int8", '"Int8" is none of FP32 or BF16'),
    ("spec.learner.recipe.name", "gpt2", '"gpt2" is none of gpt'),
    ("spec.learner.command", [], "is empty; at least 1 is needed"),
    ("spec.learner.podsPerLearner", 4097, "4097 is more than 4096, the most allowed"),
    ("spec.learner.env", [{"name": "A", "value": 1}], '1 is not text; write it in quotes: "1"'),
    ("spec.learner.env", [{"name": "A"}, {"name": "A"}], 'two entries have the name "A"'),
    ("spec.learner.resources", {"requests": {"cpu": 0.5}}, "0.5 is no quantity"),
    ("spec.learner.checkpoint.everySteps", 0, "0 is less than 1, the least allowed"),
    ("spec.learner.checkpoint.keep", 1001, "1001 is more than 1000, the most allowed"),
    ("spec.learner.podTemplate", {"nodeSelector": {}}, "unknown field"),
    ("spec.regions", [], "is empty; at least 1 is needed"),
    ("spec.regions", [{"name": f"r{i}", "learners": 1} for i in range(65)], "65 entries are more"),
    ("spec.regions", [{"name": "eu", "learners": 1}] * 2, 'two entries have the name "eu"'),
    ("spec.regions", [{"name": "eu"}], "missing; it is required"),
    ("spec.regions[0].learners", -1, "-1 is less than 0, the least allowed"),
    ("spec.regions[0].learners", 1001, "1001 is more than 1000, the most allowed"),
    ("spec.regions[0].name", "EU", '"EU" is no region name'),
    ("spec.regions[0].name", "eu-", '"eu-" is no region name'),
    ("spec.regions[0].name", "e" * 25, "is no region name; use at most 24"),
    ("spec.regions[0].name", "syncer", '"syncer" is taken by the job\'s own children'),
    ("spec.regions[0].name", "evaluator", '"evaluator" is taken by'),
    ("spec.regions[0].name", "spec", '"spec" is taken by'),
    ("spec.regions[0].name", False, 'false is not text; write it in quotes: "false"'),
    ("spec.syncer.service.type", "External", "is none of ClusterIP, NodePort or LoadBalancer"),
    ("spec.syncer.service.port", 0, "0 is less than 1, the least allowed"),
    ("spec.syncer.service.port", 65536, "65536 is more than 65535, the most allowed"),
    ("spec.syncer.service.nodePort", 65536, "65536 is more than 65535, the most allowed"),
    ("spec.syncer.checkpoint.everySteps", 10**9 + 1, "is more than 1000000000"),
    ("spec.syncer.checkpoint.keep", 0, "0 is less than 1, the least allowed"),
    ("spec.syncer.storage.size", "10Gb", "'10Gb' is no quantity"),
    ("spec.evaluation", {}, "missing; it is required"),
    ("spec.evaluation.everySteps", 0, "0 is less than 1, the least allowed"),
    ("spec.tls.mode", "mTLS", '"mTLS" is none of Disabled, Secret or CertManager'),
    ("spec.runPolicy.suspend", "yes", '"yes" is neither true nor false'),
    ("spec.runPolicy.ttlSecondsAfterFinished", -1, "-1 is less than 0, the least allowed"),
    ("spec.runPolicy.activeDeadlineSeconds", 2**31, "is more than 2147483647"),
    ("spec.runPolicy.learnerRestartLimit", "3", '"3" is text; write 3 without quotes'),
    ("spec.runPolicy.cleanupPolicy", "Some", "is none of None, Running or All"),
    ("metadata.name", "1job", '"1job" is no job name'),
    ("metadata.name", "My_Job", '"My_Job" is no job name'),
    ("metadata.name", "j" * 51, "is no job name; use at most 50"),
]


@pytest.mark.parametrize(("path", "value", "words"), BROKEN_FIELDS, ids=lambda v: str(v)[:30])
def test_a_field_out_of_bounds_is_refused_alone_and_in_words(path, value, words):
    said = problems_with((path, value))
    assert len(said) == 1
    assert said[0].startswith(path)
    assert words in said[0]


FITTING_FIELDS = [
    ("spec.steps", 10**9),
    ("spec.seed", 2**31 - 1),
    ("spec.sync.grace.maxSteps", "0"),
    ("spec.sync.grace.safety", "0.999999999"),
    ("spec.sync.outer.learningRate", "0.000000001"),
    ("spec.sync.outer.momentum", "0"),
    ("spec.regions[0].learners", 0),
    ("spec.regions[0].name", "0"),
    ("spec.regions[0].name", "e" * 24),
    ("spec.learner.resources.requests", {"cpu": 2, "memory": "1.5Gi"}),
    ("spec.runPolicy.ttlSecondsAfterFinished", None),
    ("metadata.name", "j" * 49),
    ("metadata.labels[app.kubernetes.io/name]", "x"),
]


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
