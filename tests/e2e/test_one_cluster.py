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
import threading
import time
from pathlib import Path

import pytest
import yaml

from diloco_testing.clusters.install import NAMESPACE, RELEASE, RESTRICTED
from diloco_testing.clusters.job import TINY, Job
from diloco_testing.clusters.kubectl import KubectlError, until
from diloco_testing.clusters.provision import ROOT
from diloco_testing.clusters.reads import UnansweredError

CRD = "dilocojobs.diloco.dev"
STEPS = 150
PATIENCE_SECONDS = 1800.0


def text_example():
    """examples/01-text/job.yaml, made smaller by its fields alone."""
    manifest = yaml.safe_load((ROOT / "examples/01-text/job.yaml").read_text())
    spec = manifest["spec"]
    spec["steps"] = STEPS
    spec["learner"]["recipe"]["config"] = TINY | {"slowdown": 10}  # which has to end
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
        seen: list[str] = []
        reader = threading.Thread(target=_read, args=(watched.stdout, seen), daemon=True)
        reader.start()
        try:
            job.apply()
            eu.kubectl(
                "wait", "--for=condition=Complete", f"dlj/{job.name}", "-n", namespace,
                f"--timeout={int(PATIENCE_SECONDS)}s", seconds=PATIENCE_SECONDS + 30,
            )  # fmt: skip
            # `wait` and the watch are two connections: the last line may come later.
            deadline = time.monotonic() + 60
            while not any(" Complete " in line for line in seen) and time.monotonic() < deadline:
                time.sleep(0.1)
        except KubectlError as error:
            raise AssertionError(f"{error}\n{job.details()}") from None
        finally:
            watched.kill()
            watched.wait()
            reader.join(30)
            watched.stdout.close()
        yield job, "".join(seen)


def _read(output, lines):
    """Keep each line as soon as it comes."""
    for line in output:
        lines.append(line.decode())


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


def test_kubectl_get_shows_the_progress(watched):
    """The printer columns, as `kubectl get --watch` prints them."""
    print(watched)
    lines = watched.splitlines()
    assert lines[0].split()[:5] == ["NAME", "STATE", "STEP", "LEARNERS", "QUORUM"]
    states = [line.split()[1] for line in lines[1:] if len(line.split()) > 4]
    assert "Training" in states, watched
    assert states[-1] == "Complete", watched
    assert any("4/4" in line for line in lines), watched


def test_children_have_the_documented_names(job):
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


def test_only_the_syncer_still_runs(job):
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
    """Runs `diloco ...` as a user with kubectl for this cluster does; returns what it prints."""
    folder = tmp_path_factory.mktemp("person")
    path = job.cluster.kubectl.script(folder / "bin").parent
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("diloco")), *arguments], env=environment,
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
    output = eu.helm("test", RELEASE, "--namespace", NAMESPACE, "--timeout", "2m")
    assert "Succeeded" in output, output


HOLDS = {
    "operator": {"diloco", "diloco_job", "diloco_operator"},
    "syncer": {"diloco", "diloco_agent", "diloco_syncer"},
    "worker": {"diloco", "diloco_agent", "diloco_worker"},
}
"""Image → our packages in it."""

CONTENTS = """
import importlib.util, json, pathlib, shutil, sysconfig
site = pathlib.Path(sysconfig.get_paths()["purelib"])
names = ("torch", "kopf", "matplotlib", "rich", "typer")
print(json.dumps({
    "ours": sorted(path.name for path in site.glob("diloco*") if path.suffix != ".dist-info"),
    "others": [name for name in names if importlib.util.find_spec(name)],
    "command": shutil.which("diloco"),
}))
"""


@pytest.fixture(scope="module")
def contents(fleet, job):
    """What each image holds, as a pod of it reports; what it prints comes last in its log."""
    kubectl = job.cluster.kubectl
    images = {
        "operator": fleet.images.operator, "syncer": fleet.images.syncer, "worker": fleet.true_worker(),
    }  # fmt: skip
    names = {kind: f"contents-{kind}" for kind in images}
    pods = [_printing(names[kind], image.name) for kind, image in images.items()]
    kubectl.apply(*pods, namespace=job.namespace)
    found = {}
    for kind, name in names.items():
        until(lambda n=name: _phase(job, n) == "Succeeded", 120, expected=f"{name} has ended")
        found[kind] = json.loads(kubectl("logs", "-n", job.namespace, name))
        kubectl.delete("pod", name, job.namespace, "--wait=false")
    return found


@pytest.mark.parametrize("kind", HOLDS)
def test_an_image_holds_only_the_packages_that_it_runs(contents, kind):
    assert set(contents[kind]["ours"]) == HOLDS[kind]
    assert contents[kind]["command"] is None, "the command line has no package there"
    others = {"operator": {"kopf"}, "syncer": set(), "worker": {"torch"}}
    assert set(contents[kind]["others"]) == others[kind]


def _printing(name: str, image: str):
    """A pod under restricted Pod Security that prints CONTENTS."""
    secured = {
        "allowPrivilegeEscalation": False, "runAsNonRoot": True, "runAsUser": 65532,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    container = {
        "name": "main", "image": image, "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", CONTENTS], "securityContext": secured,
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }  # fmt: skip


def _phase(job: Job, pod: str) -> str:
    found = job.cluster.kubectl.get("pod", pod, job.namespace)
    return str((found or {}).get("status", {}).get("phase", ""))


def test_the_validation_loss_falls(job):
    lines = [json.loads(line) for line in job.kept("eval.jsonl").decode().splitlines()]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"], lines


def test_what_tests_read_is_what_kubectl_prints(kubectl):
    """Tests poll through one proxy that keeps running; nothing of what they see may differ."""
    for kind, name in (
        ("svc", "kubernetes"),
        ("crd", CRD),
        ("namespace", NAMESPACE),
        ("dlj", "no"),
    ):
        printed = kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        assert kubectl.reads.get(kind, name, "default") == (
            json.loads(printed) if printed else None
        )
    for kinds in ("svc,serviceaccounts", "clusterroles", "dilocojobs.diloco.dev"):
        printed = kubectl("get", kinds, "-A", "-o", "json")
        assert kubectl.reads.list(kinds, "", "") == json.loads(printed)["items"]
    chosen = "app.kubernetes.io/component=operator"
    assert [pod["kind"] for pod in kubectl.reads.list("pods", NAMESPACE, chosen)] == ["Pod"]
    assert kubectl.reads.list("pods", NAMESPACE, f"{chosen},no=such") == []
    with pytest.raises(UnansweredError, match="no kind is called dilocos"):
        kubectl.reads.get("dilocos", "no", "default")
    with pytest.raises(KubectlError, match="doesn't have a resource type"):
        kubectl.get("dilocos", "no")
