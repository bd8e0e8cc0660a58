"""`diloco render`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.errors import ConfigError
from diloco_cli.__main__ import app
from diloco_cli.render import NO_UID, render, to_yaml
from diloco_job.manifest_file import parse_yaml
from diloco_operator.resources import Owner, Wanted, desired
from diloco_operator.resources.operator_scope import OperatorScope
from diloco_testing.manifests.files import load_job

GOLDEN = Path(__file__).parents[3] / "tests/golden"
EVERYTHING = GOLDEN / "everything.yaml"
TWO_REGIONS = GOLDEN / "manifests/two-regions.job.yaml"
SCOPE = OperatorScope(worker_image="w:1", syncer_image="s:1")


def documents(text):
    found = []
    for document in text.split("---\n")[1:]:
        value, problems = parse_yaml(document)
        assert not problems
        found.append(value)
    return found


def test_it_prints_what_the_operator_applies():
    job = load_job(EVERYTHING)
    owner = Owner(namespace="ml", uid=NO_UID)
    assert render(job, SCOPE, "ml") == desired(job, owner, SCOPE, Wanted())


def test_the_namespace_is_that_given_else_the_manifests_else_default():
    def namespace(source, given):
        return render(load_job(source), SCOPE, given)[0]["metadata"]["namespace"]

    assert namespace(TWO_REGIONS, "other") == "other"
    assert namespace(TWO_REGIONS, "") == "training"
    assert namespace(EVERYTHING, "") == "default"


def test_the_yaml_reads_back_as_the_same_objects():
    sets = ["spec.learner.env=[{name: A, value: 'no'}, {name: B, value: '1e3'}]"]
    made = render(load_job(EVERYTHING, sets), SCOPE)
    assert documents(to_yaml(made)) == list(made)


def test_the_command_prints_yaml_for_one_region():
    done = CliRunner().invoke(
        app, ["render", str(TWO_REGIONS), "--region=us", "--worker-image=mine:3"]
    )
    assert done.exit_code == 0
    made = documents(done.output)
    assert [item["kind"] for item in made] == [
        "ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "StatefulSet",
    ]  # fmt: skip
    assert made[-1]["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:3"


def test_the_command_prints_one_list_as_json():
    done = CliRunner().invoke(app, ["render", str(EVERYTHING), "-o", "json", "--namespace=ml"])
    assert done.exit_code == 0
    made = json.loads(done.output)
    assert made["kind"] == "List"
    assert {item["metadata"]["namespace"] for item in made["items"]} == {"ml"}


def test_a_region_that_the_job_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"asia.*eu, us"):
        render(
            load_job(EVERYTHING), OperatorScope(region="asia", worker_image="w", syncer_image="s")
        )
