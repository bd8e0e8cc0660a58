"""
What others check a chart for: chart-testing (ct lint) and Artifact Hub.

ct itself runs in the workflow ci.yaml; these are its rules that need no network, so that they fail here first.
"""

import re
from typing import Any

import pytest
import yaml

from diloco_job.types import DiLoCoJob
from diloco_testing.charts import CHART, ROOT

CHART_YAML = yaml.safe_load((CHART / "Chart.yaml").read_text())
ANNOTATIONS = {
    key.removeprefix("artifacthub.io/"): text for key, text in CHART_YAML["annotations"].items()
}
LINTED = [CHART / "Chart.yaml", CHART / "values.yaml", *sorted((CHART / "ci").glob("*.yaml"))]


class UniqueKeys(yaml.SafeLoader):
    """Refuses two equal keys of one mapping, of which YAML libraries keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"{node.start_mark}: a key occurs twice in {keys}"
        return super().construct_mapping(node, deep)


# ------------------------------------------------------------------------------ chart-testing


def test_the_fields_of_the_chart_are_those_of_helm():
    texts = {
        "name",
        "version",
        "apiVersion",
        "appVersion",
        "description",
        "icon",
        "kubeVersion",
        "type",
    }
    lists = {"keywords", "maintainers"}
    assert CHART_YAML.keys() == texts | lists | {"annotations"}
    assert all(isinstance(CHART_YAML[key], str) for key in texts)
    assert all(isinstance(CHART_YAML[key], list) and CHART_YAML[key] for key in lists)
    assert all(isinstance(text, str) for text in CHART_YAML["annotations"].values())


def test_the_chart_has_maintainers_with_names():
    for maintainer in CHART_YAML["maintainers"]:
        assert maintainer["name"]
        assert maintainer.keys() <= {"name", "email", "url"}


def test_the_version_is_a_semantic_one_and_the_folder_has_the_name_of_the_chart():
    assert re.fullmatch(
        r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?", CHART_YAML["version"]
    )
    assert CHART.name == CHART_YAML["name"]


def test_what_ct_cannot_know_is_switched_off_and_nothing_else():
    config = yaml.safe_load((ROOT / ".github" / "ct.yaml").read_text())
    assert config == {
        "charts": ["charts/diloco"],
        "helm-lint-extra-args": "--strict",
        "validate-maintainers": False,
        "check-version-increment": False,
    }
    assert "ct lint --config .github/ct.yaml" in (ROOT / ".github/workflows/ci.yaml").read_text()


@pytest.mark.parametrize("path", LINTED, ids=lambda path: path.name)
def test_yaml_keeps_the_style_that_ct_asks_for(path):
    text = path.read_text()
    yaml.load(text, UniqueKeys)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert not re.search(r"[ \t]\n|\t|\r", text), "blanks at the end of a line, a tab"
    assert not re.match(r"\n", text)
    assert "\n\n\n\n" not in text
    for line in text.splitlines():
        code, quoted = re.subn(r"\"[^\"]*\"|'[^']*'", '""', line)
        assert not re.match(r" *#[^ ]", code), f"{line}: no blank after #"
        if re.match(r" *#", code):
            continue
        assert not re.search(r"\S #", code) or quoted, f"{line}: one blank before #"
        assert not re.search(r"[{\[] |[^ ] [}\]]", code), f"{line}: blanks inside of brackets"
        flow = re.search(r"[{\[].*[}\]]", code)
        assert not flow or not re.search(r" ,|,  |,\S", flow[0]), f"{line}: blanks around a comma"
        assert not re.search(r"^ *(- )?[\w.-]+(:  +\S| :)", code), f"{line}: blanks around a colon"
        assert not re.search(r"^ *-  +", code), f"{line}: blanks after a dash"
        assert not re.search(r": (yes|no|on|off|True|False|Yes|No)$", code), f"{line}: truthy"


# ------------------------------------------------------------------------------- Artifact Hub


def listed(name: str) -> list[dict[str, Any]]:
    """An annotation that holds YAML."""
    entries = yaml.safe_load(ANNOTATIONS[name])
    assert isinstance(entries, list)
    assert entries
    return entries


def test_the_annotations_are_known_to_artifact_hub():
    assert all(key.startswith("artifacthub.io/") for key in CHART_YAML["annotations"])
    assert ANNOTATIONS.keys() == {
        "category", "license", "operator", "operatorCapabilities", "prerelease", "crds",
        "crdsExamples", "changes", "links",
    }  # fmt: skip
    assert ANNOTATIONS["category"] == "ai-machine-learning"
    assert ANNOTATIONS["operator"] == "true"
    assert ANNOTATIONS["operatorCapabilities"] in (
        "Basic Install", "Seamless Upgrades", "Full Lifecycle", "Deep Insights", "Auto Pilot"
    )  # fmt: skip
    assert ANNOTATIONS["prerelease"] == str(CHART_YAML["version"].startswith("0.")).lower()


def test_changes_have_a_kind_and_a_description():
    for change in listed("changes"):
        assert change.keys() <= {"kind", "description", "links"}
        assert change["kind"] in ("added", "changed", "deprecated", "removed", "fixed", "security")
        assert change["description"]


def test_links_have_names_and_lead_out():
    for link in listed("links"):
        assert link.keys() == {"name", "url"}
        assert link["url"].startswith("https://")


def test_the_crd_of_the_annotations_is_the_one_of_the_chart():
    (entry,) = listed("crds")
    crd = yaml.load((CHART / "files" / "crd.yaml").read_text(), yaml.CSafeLoader)
    names = crd["spec"]["names"]
    assert (entry["name"], entry["kind"]) == (crd["metadata"]["name"], names["kind"])
    assert entry["version"] in [version["name"] for version in crd["spec"]["versions"]]


def test_the_example_of_the_annotations_is_a_valid_job():
    for example in listed("crdsExamples"):
        DiLoCoJob.model_validate(example)


def test_the_release_names_its_images_where_it_knows_the_registry():
    """A checkout does not know where the images will be."""
    release = (ROOT / ".github/workflows/release.yaml").read_text()
    assert '.annotations."artifacthub.io/images"' in release
    assert "images" not in ANNOTATIONS


def test_the_packaged_chart_leaves_out_what_only_tests_need():
    ignored = (CHART / ".helmignore").read_text().split()
    assert {"/ci", "/tests"} <= set(ignored)
