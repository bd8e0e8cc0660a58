"""The chart as a dependency of another chart."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_testing.charts import CHART, EVERYTHING, helm, is_test, render, sets

pytestmark = pytest.mark.slow  # each starts helm

VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
ON, OFF = sets(diloco__enabled=True), sets(diloco__enabled=False)
OWN = ("ConfigMap", "of-the-parent")


def umbrella(folder: Path, *dependencies: dict[str, str]) -> Path:
    """A parent chart with values for everything that platforms put under `global`."""
    names = dependencies or ({"condition": "diloco.enabled"},)
    (folder / "templates").mkdir()
    (folder / "charts").mkdir()
    shutil.copytree(CHART, folder / "charts" / "diloco")
    chart = {
        "apiVersion": "v2",
        "name": "platform",
        "version": "9.9.9",
        "dependencies": [
            {"name": "diloco", "version": VERSION, **dependency} for dependency in names
        ],
    }
    own = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "of-the-parent"}}
    shared = {
        "imageRegistry": "registry.example.com",
        "imagePullSecrets": [{"name": "regcred"}],
        "enabled": False,
        "region": "none of ours",
    }
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (folder / "values.yaml").write_text(yaml.safe_dump({"global": shared}))
    (folder / "templates" / "own.yaml").write_text(yaml.safe_dump(own))
    return folder


def split(objects: list[Any]) -> tuple[list[Any], list[Any]]:
    """The parent's objects, and the others."""
    own = [item for item in objects if (item["kind"], item["metadata"]["name"]) == OWN]
    return own, [item for item in objects if item not in own]


def keys(objects: list[Any]) -> set[tuple[str, str, str]]:
    return {
        (item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"])
        for item in objects
    }


def test_a_dependency_renders_what_the_chart_renders_alone(tmp_path):
    chart = umbrella(tmp_path)
    alone = render(release="stack")
    for flags in (ON, ()):  # the condition is true by default
        own, ours = split(render(*flags, chart=chart, release="stack"))
        assert len(own) == 1
        assert ours == alone


def test_a_dependency_takes_every_value_of_the_chart(tmp_path):
    values = {"diloco": yaml.safe_load(EVERYTHING.read_text()) | {"enabled": True}}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    folder = tmp_path / "chart"
    folder.mkdir()
    _, ours = split(render("--values", str(file), chart=umbrella(folder), release="stack"))
    assert ours == render("--values", str(EVERYTHING), release="stack")


def test_a_dependency_that_is_off_leaves_nothing_behind(tmp_path):
    own, ours = split(render(*OFF, chart=umbrella(tmp_path), release="stack"))
    assert len(own) == 1
    assert ours == []


def test_a_dependency_refuses_unknown_values(tmp_path):
    flags = sets(diloco__enabled=True, diloco__regoin="eu")
    done = helm("template", "stack", str(umbrella(tmp_path)), "--kube-version=1.31.0", *flags)
    assert done.returncode != 0
    assert "regoin" in done.stderr


def test_two_regions_can_be_dependencies_of_one_chart(tmp_path):
    """One operator per region, in one cluster: the second leaves the CRD to the first."""
    chart = umbrella(
        tmp_path,
        {"alias": "eu", "condition": "eu.enabled"},
        {"alias": "us", "condition": "us.enabled"},
    )
    eu = {"enabled": True, "region": {"name": "eu"}}
    us = {"enabled": True, "region": {"name": "us"}, "crds": {"install": False}}
    _, both = split(render(*sets(eu=eu, us=us), chart=chart, release="stack"))
    assert len(keys(both)) == len(both), "two objects of one name"
    _, single = split(
        render(*sets(eu=eu, us=us | {"enabled": False}), chart=chart, release="stack")
    )
    assert keys(single) < keys(both)
    selectors = [
        item["spec"]["selector"]["matchLabels"] for item in both if item["kind"] == "Deployment"
    ]
    assert len(selectors) == 2
    assert selectors[0] != selectors[1]


def test_the_tests_of_a_dependency_are_those_of_the_release(tmp_path):
    _, ours = split(render(*ON, chart=umbrella(tmp_path), release="stack"))
    tests = [item for item in ours if is_test(item)]
    assert {item["kind"] for item in tests} == {"ServiceAccount", "Role", "RoleBinding", "Pod"}
    pod = next(item for item in tests if item["kind"] == "Pod")
    health = next(v["value"] for v in pod["spec"]["containers"][0]["env"] if v["name"] == "HEALTH")
    service = next(item for item in ours if item["kind"] == "Service")
    assert health == f"http://{service['metadata']['name']}:8080/healthz"


@pytest.mark.parametrize("flags", [ON, OFF], ids=["on", "off"])
def test_a_chart_with_this_dependency_lints(tmp_path, flags):
    done = helm("lint", str(umbrella(tmp_path)), "--strict", "--kube-version=1.31.0", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
