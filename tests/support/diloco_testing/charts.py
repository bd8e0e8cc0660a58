"""The chart diloco as helm renders it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_testing.clusters.provision import cache as programs_cache
from diloco_testing.clusters.provision import required

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "diloco"
OLDEST = "1.31.0"
"""Kubernetes that Chart.yaml asks for; a helm built by `go install` takes itself for far older."""
EVERYTHING = CHART / "ci" / "everything-values.yaml"
"""Values that switch on all that the chart has."""


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm; skips the test where there is none."""
    return run("helm", *arguments)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that `cluster.sh build` provides; skips the test where there is none."""
    places = (os.environ.get("DILOCO_E2E_BIN"), str(programs_cache() / "bin"), os.environ["PATH"])
    path = os.pathsep.join(filter(None, places))
    program = shutil.which(name, path=path)
    if program is None:
        assert not required(), f"no {name} in {path}"
        pytest.skip(f"tests/unit/charts need {name} in PATH, or the {name} that tests/e2e provides")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, timeout=280
    )


@cache
def render(
    *arguments: str, chart: Path = CHART, release: str = "diloco", namespace: str = "system"
) -> list[Any]:
    """The objects that `helm template` makes."""
    kube = ("--namespace", namespace, "--kube-version", OLDEST)
    done = helm("template", release, str(chart), *kube, *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


def sets(**values: object) -> tuple[str, ...]:
    """--set-json flags; a double underscore is a dot."""
    return tuple(
        word
        for key, value in values.items()
        for word in ("--set-json", f"{key.replace('__', '.')}={json.dumps(value)}")
    )


def only(objects: list[Any], kind: str) -> Any:
    """The only object of this kind that is installed."""
    found = [item for item in objects if item["kind"] == kind and not is_test(item)]
    assert len(found) == 1, [item["metadata"]["name"] for item in found]
    return found[0]


def is_test(item: Any) -> bool:
    """Whether it belongs to `helm test`."""
    return "helm.sh/hook" in item["metadata"].get("annotations", {})


def installed(objects: list[Any]) -> list[Any]:
    """Those that `helm install` makes."""
    return [item for item in objects if not is_test(item)]
