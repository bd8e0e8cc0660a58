"""The CustomResourceDefinition, as far as it can be checked without a server (see tests/e2e)."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diloco_cli.__main__ import app
from diloco_job.crd import crd, crd_yaml, schema
from diloco_job.rules import CHANGES, FIXED, RULES
from diloco_job.status_types import Status
from diloco_job.types import DiLoCoJob

VALIDATIONS = "x-kubernetes-validations"
MAX_CLIENT_SIDE_APPLY_BYTES = 256 * 1024


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of a schema with its path."""
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}" if path else name)
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(node[key], f"{path}[]")


ALL = dict(nodes(schema()))
RULES_OF_SPEC = ALL["spec"][VALIDATIONS]
RULES_OF_JOB = ALL[""][VALIDATIONS]


def test_it_is_far_below_the_size_limit_of_client_side_apply():
    assert len(crd_yaml().encode()) < MAX_CLIENT_SIDE_APPLY_BYTES / 3


def test_the_yaml_equals_the_object():
    assert yaml.load(crd_yaml(), yaml.CSafeLoader) == crd()


def test_it_is_structural():
    """A server would report NonStructuralSchema, and prune nothing."""
    for path, node in ALL.items():
        assert not {"$ref", "anyOf", "allOf", "oneOf", "title", "const"} & node.keys(), path
        loose = "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"
        assert "type" in node or any(node.get(key) for key in loose), path


def test_every_field_of_the_spec_has_a_description():
    for path, node in ALL.items():
        if path.startswith("spec.") and not path.endswith("[]"):
            assert node.get("description"), path


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_list_text_and_number_has_a_bound(part):
    for path, node in ALL.items():
        if not path.startswith(f"{part}."):
            continue
        match node.get("type"):
            case "integer":
                assert "minimum" in node, path
            case "array":
                assert "maxItems" in node, path
            case "string" if part == "spec":
                assert "maxLength" in node or "enum" in node, path


def test_every_rule_is_at_its_path_and_refers_to_declared_fields():
    reported = {f"spec{rule['fieldPath']}" for rule in RULES_OF_SPEC}
    reported |= {rule["fieldPath"].removeprefix(".") for rule in RULES_OF_JOB}
    assert reported <= ALL.keys()
    assert {rule.path for rule in (*RULES, *CHANGES)} <= reported


def test_every_fixed_field_has_a_transition_rule():
    at_spec = {f"spec{rule['fieldPath']}" for rule in RULES_OF_SPEC if "oldSelf" in rule["rule"]}
    for path in set(FIXED) - {"metadata.name"}:
        own = [rule["rule"] for rule in ALL[path].get(VALIDATIONS, [])]
        assert "self == oldSelf" in own or path in at_spec, path


def test_a_rule_that_compares_a_field_with_itself_always_has_both_values():
    """The server does not evaluate such a rule if one of them is missing."""
    for path, node in ALL.items():
        if any(rule["rule"] == "self == oldSelf" for rule in node.get(VALIDATIONS, [])):
            assert "default" in node, path


def test_every_rule_has_a_message_without_values():
    for path, node in ALL.items():
        for rule in node.get(VALIDATIONS, []):
            assert rule["message"].strip(), path
            assert "\n" not in rule["message"], path
            assert "{}" not in rule["message"] + rule.get("messageExpression", ""), path


def test_python_and_cel_use_the_same_number_of_values():
    for rule in (*RULES, *CHANGES):
        assert rule.message.count("{}") == len(rule.cel_values), rule.path


def test_settings_that_are_passed_through_are_compared_by_value():
    """CEL holds two objects of unknown fields for equal when their first level looks alike."""
    for path in ("spec.learner.recipe.config", "spec.regions[].config"):
        assert "x-kubernetes-preserve-unknown-fields" not in ALL[path]
        assert ALL[f"{path}[]"]["x-kubernetes-preserve-unknown-fields"] is True


def test_optional_fields_are_nullable_and_no_others():
    nullable = {path for path, node in ALL.items() if node.get("nullable")}
    assert {path for path in nullable if not path.endswith("config[]")} == {
        "spec.learner.recipe",
        "spec.learner.command",
        "spec.learner.checkpoint.everySteps",
        "spec.learner.storage",
        "spec.learner.env[].valueFrom",
        "spec.evaluation",
        "spec.evaluation.command",
        "spec.tls.issuerRef",
        "spec.runPolicy.ttlSecondsAfterFinished",
        "spec.runPolicy.activeDeadlineSeconds",
        "spec.runPolicy.learnerRestartLimit",
        "spec.runPolicy.forceDeletePodsAfterSeconds",
    }


def test_a_status_has_no_defaults():
    for path, node in ALL.items():
        if path.startswith("status"):
            assert "default" not in node, path
            assert "nullable" not in node, path


def test_defaults_are_those_of_the_types():
    job = DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.dev/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": "job"},
            "spec": {"steps": 1, "regions": [{"name": "eu", "learners": 1}]},
        }
    ).model_dump(by_alias=True)
    for path, node in ALL.items():
        optional = ("spec.tls.issuerRef.", "spec.learner.storage.", "spec.evaluation.")
        in_optional = path.startswith(optional)
        if "default" not in node or "[]" in path or in_optional:
            continue
        value: Any = job
        for part in path.split("."):
            value = value[part]
        assert node["default"] == ({} if "properties" in node else value), path


def test_regions_conditions_and_variables_are_lists_with_keys():
    keys = {
        path: node["x-kubernetes-list-map-keys"]
        for path, node in ALL.items()
        if node.get("x-kubernetes-list-type") == "map"
    }
    assert keys == {
        "spec.learner.env": ["name"],
        "spec.regions": ["name"],
        "status.regions": ["name"],
        "status.conditions": ["type"],
    }


def test_printer_columns_read_declared_fields():
    [version] = crd()["spec"]["versions"]
    columns = {column["name"]: column for column in version["additionalPrinterColumns"]}
    narrow = [name for name, column in columns.items() if "priority" not in column]
    assert narrow == ["State", "Step", "Learners", "Quorum", "Age"]
    assert [name for name in columns if name not in narrow] == ["Region", "Endpoint", "Tokens"]
    for name, column in columns.items():
        path = column["jsonPath"].partition("[")[0].removeprefix(".")
        assert path in ALL or name == "Age", path


def test_an_empty_status_and_a_full_one_fit_the_types():
    Status.model_validate({})
    Status.model_validate(
        {
            "observedGeneration": 1,
            "state": "Training",
            "progress": "5/10",
            "learners": {"desired": 4, "ready": 3, "training": 3, "summary": "3/4"},
            "conditions": [
                {
                    "type": "Accepted",
                    "status": "True",
                    "reason": "Accepted",
                    "message": "",
                    "lastTransitionTime": "2026-11-21T00:00:00Z",
                }
            ],
        }
    )


@pytest.mark.parametrize(("options", "read"), [((), yaml.safe_load), (("-o", "json"), json.loads)])
def test_the_command_prints_it(options, read):
    shown = CliRunner().invoke(app, ["crd", *options])
    assert shown.exit_code == 0
    assert read(shown.output) == crd()
