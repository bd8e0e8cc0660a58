"""Fetching a job's files through kubectl; the kubectl here runs the pods' half on this machine."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from diloco.errors import ConfigError, UnavailableError
from diloco_operator import remote
from diloco_operator.local.report_data import load
from diloco_operator.remote import RemoteJob, fetch_run

KUBECTL = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
print(*words, file=open({log!r}, "a"))
if "gone" in " ".join(words):
    sys.exit("Error from server (NotFound): deployments.apps \\"gone-syncer\\" not found")
if "get" in words:
    print(open(os.path.join({folder!r}, "pods.json" if "pods" in words else "job.yaml")).read(), end="")
elif "broken" in " ".join(words):
    sys.stdout.write("x" * 100)
else:
    here = words[words.index("--") + 1 :]
    pod = words[words.index("exec") + 1].replace("/", "-")
    here = [word.replace("/var/lib/diloco", os.path.join({folder!r}, pod)) for word in here]
    here = [word.replace("/etc/diloco/spec", os.path.join({folder!r}, "spec")) for word in here]
    if not os.path.isdir(os.path.join({folder!r}, pod)):
        sys.exit("error: cannot exec in a stopped container")
    sys.exit(subprocess.run([sys.executable, *here[1:]]).returncode)
"""


START = json.dumps({"event": "start", "epoch": 1, "fragments": 2, "interval": 2}) + "\n"
JOB = """\
apiVersion: diloco.dev/v1alpha1
kind: DiLoCoJob
metadata:
  name: a
spec:
  learner:
    podsPerLearner: 2
  regions:
  - name: eu
    learners: 3
  - name: us
    learners: 1
  steps: 9
status:
  specHash: "123"
  startTime: "2026-01-02T03:04:05Z"
  state: Training
  step: 5
  tokens: 700
"""


@pytest.fixture
def state(tmp_path):
    """What lies on the syncer's volume."""
    path = tmp_path / "cluster/deployment-a-syncer"
    (path / "model").mkdir(parents=True)
    (path / "events.jsonl").write_text(START)
    (path / "model/model.safetensors").write_bytes(b"tensors" * 1000)
    digest = hashlib.sha256(b"tensors" * 1000).hexdigest()
    (path / "model/model.json").write_text(json.dumps({"step": 5, "sha256": digest}))
    return path


def pod(name, region="eu", phase="Running"):
    labels = {"diloco.dev/region": region}
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase}}


def line(tokens):
    return json.dumps(
        {"time": "2026-01-02T03:04:06.000+00:00", "localStep": 1, "tokens": tokens, "loss": 2.5}
    )


@pytest.fixture
def kubectl(tmp_path, state):
    cluster = tmp_path / "cluster"
    (cluster / "job.yaml").write_text(JOB)
    # As the kubelet mounts a ConfigMap.
    (cluster / "spec/..data").mkdir(parents=True)
    (cluster / "spec/..data/spec.json").write_text('{"job": "a", "steps": 9}')
    (cluster / "spec/spec.json").symlink_to("..data/spec.json")
    # Learner 0 trains, 1 is pending, 2 ends between the listing and the fetching; us is elsewhere.
    for ordinal in range(2):
        kept = cluster / f"pod-a-eu-{ordinal}"
        kept.mkdir()
        (kept / "steps.jsonl").write_text(line(100 + ordinal) + "\n")
    pods = [*(pod(f"a-eu-{n}") for n in (0, 1, 4, 5)), pod("a-eu-2", phase="Pending")]
    (cluster / "pods.json").write_text(json.dumps({"items": [*pods, pod("a-eu-b-0")]}))
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    log = str(tmp_path / "said")
    program.write_text(KUBECTL.format(python=sys.executable, log=log, folder=str(cluster)))
    program.chmod(0o755)
    return str(program)


def test_files_come_from_the_syncers_pod_and_missing_ones_are_left_out(tmp_path, kubectl):
    job = RemoteJob(name="a", namespace="team", context="eu", kubectl=kubectl)
    job.fetch(remote.LOGS, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["events.jsonl"]
    assert (tmp_path / "run/events.jsonl").read_text() == START
    said = (tmp_path / "said").read_text()
    assert "--context=eu --namespace=team exec deployment/a-syncer -c main" in said


def test_what_kubectl_says_is_passed_on(tmp_path, kubectl):
    with pytest.raises(UnavailableError, match=r"cannot fetch files of job gone: .*NotFound"):
        RemoteJob(name="gone", kubectl=kubectl).fetch(remote.MODEL, tmp_path)


def test_a_stream_that_breaks_off_is_an_error(tmp_path, kubectl):
    with pytest.raises(UnavailableError, match="the stream broke off"):
        RemoteJob(name="broken", kubectl=kubectl).fetch(remote.MODEL, tmp_path)


def test_without_kubectl_it_is_said_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="no such program; install kubectl"):
        RemoteJob(name="a", kubectl="no-kubectl-here").fetch(remote.MODEL, tmp_path)


def diloco(kubectl, *words):
    path = f"{os.path.dirname(kubectl)}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "diloco_operator.cli", *map(str, words)],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_export_takes_the_model_of_a_job_in_a_cluster(tmp_path, kubectl, state):
    done = diloco(kubectl, "export", "--job", "a", "--to", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    exported = (tmp_path / "out/model.safetensors").read_bytes()
    assert exported == (state / "model/model.safetensors").read_bytes()


def test_logs_make_a_run_directory(tmp_path, kubectl):
    run = tmp_path / "run"
    done = diloco(kubectl, "logs", "a", "--to", run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "no running pod in this cluster, so no steps.jsonl: eu/1, us/0",
        "eu/2: no steps.jsonl: cannot fetch files of job a: error: cannot exec in a stopped container",
        f"{run}: fetched; check every merge with: diloco audit --dir {run}",
    ]
    assert (run / "job.yaml").read_text() == JOB
    assert json.loads((run / "spec.json").read_text()) == {"job": "a", "steps": 9}
    assert not (run / "spec.json").is_symlink()
    status = json.loads((run / "status.json").read_text())
    assert (status["job"], status["step"], status["startTime"]) == ("a", 5, "2026-01-02T03:04:05Z")
    kept = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert kept == {
        "job.yaml", "spec.json", "status.json", "events.jsonl", "learners/eu-0/steps.jsonl",
    }  # fmt: skip
    assert json.loads((run / "learners/eu-0/steps.jsonl").read_text())["tokens"] == 100


def test_what_logs_fetched_can_be_reported_and_audited(tmp_path, kubectl):
    run = tmp_path / "run"
    diloco(kubectl, "logs", "a", "--to", run)
    audited = diloco(kubectl, "audit", "--dir", run)
    assert (audited.returncode, audited.stderr) == (0, "")
    reported = load(run)
    assert (reported.name, reported.state, reported.step, reported.steps) == ("a", "Training", 5, 9)
    assert [(one.name, one.tokens) for one in reported.learners] == [("eu/0", 100.0)]
    assert diloco(kubectl, "report", "--dir", run).returncode == 0
    assert (run / "report.html").exists()


def test_the_status_of_what_was_fetched_is_asked_of_the_cluster(tmp_path, kubectl):
    diloco(kubectl, "logs", "a", "--to", tmp_path / "run")
    asked = diloco(kubectl, "status", "--dir", tmp_path / "run")
    assert asked.returncode == 2
    assert "was fetched from a cluster" in asked.stderr


def test_without_a_list_of_pods_the_rest_is_fetched(tmp_path, kubectl):
    forbidden = 'if "pods" in words:\n    sys.exit("pods is forbidden")\n'
    with open(kubectl) as program:
        text = program.read()
    with open(kubectl, "w") as program:
        program.write(text.replace('if "gone"', forbidden + 'if "gone"'))
    said = fetch_run(RemoteJob(name="a", kubectl=kubectl), tmp_path / "run")
    assert said == ["no learner's steps.jsonl: cannot read job a: pods is forbidden"]
    assert (tmp_path / "run/spec.json").exists()


def test_many_learners_that_are_gone_are_one_line(tmp_path, kubectl):
    job = tmp_path / "cluster/job.yaml"
    job.write_text(JOB.replace("learners: 1", "learners: 500"))
    said = fetch_run(RemoteJob(name="a", kubectl=kubectl), tmp_path / "run")
    assert said[0].endswith(": eu/1, us/0, us/1, us/2, us/3, us/4, us/5, us/6 and 493 more")
