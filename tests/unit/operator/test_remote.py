"""Fetching a job's files through kubectl; the kubectl here runs the syncer's half on this machine."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from diloco.errors import ConfigError, UnavailableError
from diloco_operator import remote
from diloco_operator.remote import RemoteJob

KUBECTL = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
print(*words, file=open({log!r}, "a"))
if "gone" in " ".join(words):
    sys.exit("Error from server (NotFound): deployments.apps \\"gone-syncer\\" not found")
if "get" in words:
    print("kind: DiLoCoJob")
elif "broken" in " ".join(words):
    sys.stdout.write("x" * 100)
else:
    here = words[words.index("--") + 1 :]
    here = [word.replace("/var/lib/diloco", {state!r}) for word in here]
    sys.exit(subprocess.run([sys.executable, *here[1:]]).returncode)
"""


@pytest.fixture
def state(tmp_path):
    """What lies on the syncer's volume."""
    path = tmp_path / "volume"
    (path / "model").mkdir(parents=True)
    (path / "events.jsonl").write_text('{"event": "start"}\n')
    (path / "model/model.safetensors").write_bytes(b"tensors" * 1000)
    digest = hashlib.sha256(b"tensors" * 1000).hexdigest()
    (path / "model/model.json").write_text(json.dumps({"step": 5, "sha256": digest}))
    return path


@pytest.fixture
def kubectl(tmp_path, state):
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    log = str(tmp_path / "said")
    program.write_text(KUBECTL.format(python=sys.executable, log=log, state=str(state)))
    program.chmod(0o755)
    return str(program)


def test_files_come_from_the_syncers_pod_and_missing_ones_are_left_out(tmp_path, kubectl):
    job = RemoteJob(name="a", namespace="team", context="eu", kubectl=kubectl)
    job.fetch(remote.LOGS, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["events.jsonl"]
    assert (tmp_path / "run/events.jsonl").read_text() == '{"event": "start"}\n'
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


def test_logs_make_a_run_directory_that_can_be_audited(tmp_path, kubectl):
    done = diloco(kubectl, "logs", "a", "--to", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run/job.yaml").read_text() == "kind: DiLoCoJob\n"
    assert (tmp_path / "run/events.jsonl").exists()
