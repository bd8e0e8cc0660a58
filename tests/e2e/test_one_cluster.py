"""
One cluster, as the README shows it: helm install, kubectl apply, wait, fetch the model, generate text.

The learners run in the true worker image, in a namespace that enforces restricted Pod Security.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diloco_testing.clusters import ROOT
from diloco_testing.clusters_install import NAMESPACE, RELEASE, RESTRICTED
from diloco_testing.clusters_job import TINY, Job
from diloco_testing.kubectl import KubectlError

STEPS = 150
PATIENCE_SECONDS = 600.0


def text_example():
    """examples/01-text/job.yaml, made smaller by its fields alone."""
    manifest = yaml.safe_load((ROOT / "examples/01-text/job.yaml").read_text())
    spec = manifest["spec"]
    spec["steps"] = STEPS
    spec["learner"]["recipe"]["config"] = dict(TINY)
    spec["learner"]["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    spec["sync"] = {"fragments": 8, "interval": 8}  # the small model has 14 tensors
    spec["syncer"] = {"storage": {"size": "1Gi"}}
    return manifest


@pytest.fixture(scope="module")
def example(eu, fleet):
    """The finished example; its namespace stays until the module ends."""
    worker = fleet.true_worker(eu)
    with fleet.namespace("text-example", eu, **RESTRICTED) as namespace:
        job = Job(eu, namespace, text_example())
        job.manifest["spec"]["learner"]["image"] = worker.name
        watched = eu.kubectl.popen("get", "dlj", "-n", namespace, "--watch")
        try:
            job.apply()
            eu.kubectl(
                "wait", "--for=condition=Complete", f"dlj/{job.name}", "-n", namespace,
                f"--timeout={int(PATIENCE_SECONDS)}s", seconds=PATIENCE_SECONDS + 30,
            )  # fmt: skip
        except KubectlError as error:
            raise AssertionError(f"{error}\n{job.tell()}") from None
        finally:
            watched.kill()
            seen = watched.communicate()[0].decode()
        yield job, seen


@pytest.fixture(scope="module")
def job(example):
    return example[0]


@pytest.fixture(scope="module")
def watched(example):
    """What `kubectl get dlj --watch` printed meanwhile."""
    return example[1]


def test_the_text_example_becomes_complete(job):
    status = job.status()
    assert status["state"] == "Complete"
    assert status["step"] == STEPS
    assert status["progress"] == f"{STEPS}/{STEPS}"
    conditions = {c["type"]: c["status"] for c in status["conditions"]}
    assert conditions["Complete"] == "True"
    assert conditions["Accepted"] == "True"
    assert conditions["Failed"] == "False"


def test_kubectl_get_shows_the_way_there(watched):
    """The printer columns, as a person who watches sees them."""
    print(watched)
    lines = watched.splitlines()
    assert lines[0].split()[:5] == ["NAME", "STATE", "STEP", "LEARNERS", "QUORUM"]
    states = [line.split()[1] for line in lines[1:] if len(line.split()) > 4]
    assert "Training" in states, watched
    assert states[-1] == "Complete", watched
    assert any("4/4" in line for line in lines), watched


def test_children_have_the_promised_names(job):
    kinds = {}
    for child in job.children():
        kinds.setdefault(child["kind"], set()).add(child["metadata"]["name"])
    name = job.name
    assert kinds["StatefulSet"] == {f"{name}-eu", f"{name}-us"}
    assert kinds["Deployment"] == {f"{name}-syncer", f"{name}-evaluator"}
    assert kinds["PersistentVolumeClaim"] == {f"{name}-syncer"}
    assert kinds["Service"] == {f"{name}-eu", f"{name}-us", f"{name}-syncer"}
    assert kinds["ServiceAccount"] == {name}
    assert kinds["PodDisruptionBudget"] == {f"{name}-eu", f"{name}-us"}


def test_nothing_but_the_syncer_runs_any_more(job):
    """cleanupPolicy Running: the learners are gone, the syncer holds the model."""
    roles = {pod["metadata"]["labels"]["diloco.dev/role"] for pod in job.pods()}
    assert roles <= {"syncer", "evaluator"}
    assert "syncer" in roles


def test_the_audit_of_the_run_is_clean(job):
    verdict = job.audit()
    assert verdict.ok, verdict.violations
    assert verdict.merges == STEPS


@pytest.fixture(scope="module")
def diloco(job, tmp_path_factory):
    """Runs `diloco ...` as a person does who has kubectl for this cluster; returns what it prints."""
    folder = tmp_path_factory.mktemp("person")
    path = job.cluster.kubectl.script(folder / "bin").parent
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("diloco")), *words], env=environment,
            cwd=folder, capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def fetched(job, diloco):
    """What the run wrote, and its model, in a directory of this machine."""
    where = ("-n", job.namespace, "--to")
    print(diloco("logs", job.name, *where, "fetched"))
    print(diloco("export", "--job", job.name, *where, "fetched/model"))
    return diloco.folder / "fetched"


def test_the_model_is_fetched_and_generates_text(job, diloco, fetched):
    digest = hashlib.sha256((fetched / "model/model.safetensors").read_bytes()).hexdigest()
    assert digest == job.status()["model"]["sha256"]
    text = diloco("sample", "--dir", "fetched")
    print(text)
    assert len(text.strip()) > 100


def test_what_the_run_wrote_is_fetched_and_audited(diloco, fetched):
    assert f"{STEPS} merges of" in diloco("audit", "--dir", "fetched")
    diloco("report", "--dir", "fetched")
    assert (fetched / "report.html").stat().st_size > 10_000


def test_the_chart_tests_its_release(eu, job):
    """`helm test`, in a namespace that enforces restricted Pod Security like the operator itself."""
    said = eu.helm("test", RELEASE, "--namespace", NAMESPACE, "--timeout", "2m")
    assert "Succeeded" in said, said


def test_neither_operator_nor_syncer_has_torch(eu, job):
    command = ("python3", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    operator = ("exec", "-n", NAMESPACE, "deployment/diloco", "-c", "operator", "--")
    assert eu.kubectl(*operator, *command).strip() == "None"
    assert eu.kubectl.exec(job.syncer_pod(), *command, namespace=job.namespace).strip() == "None"


def test_the_validation_loss_falls(job):
    lines = [json.loads(line) for line in job.kept("eval.jsonl").decode().splitlines()]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"], lines
